"""One loop over the decoder layers, unrolled or scanned, and what each layer gets to know."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.layers.rope import rope_tables
from jaxvllm.model_config import ModelConfig
from jaxvllm.rope_config import RopeConfig
from pallas_kernels import (
    FEW_ROWS,
    Backend,
    LayerSlice,
    MatmulStage,
    make_arrivals,
    matmul_stages,
    prefers_matmul_kernel,
)

logger = logging.getLogger(__name__)

# Stands for "no window" where the window is data: longer than any context.
_NO_WINDOW = 2**30


@dataclass(frozen=True)
class LayerKind:
    """What attention layers of one model may differ in."""

    sliding_window: int | None
    rope: RopeConfig | None


@dataclass(frozen=True)
class LayerKinds:
    """The distinct kinds of a model's layers, and which one each layer is."""

    kinds: tuple[LayerKind, ...]
    of_layer: tuple[int, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct sliding windows, None for layers that see all."""
        return tuple(dict.fromkeys(kind.sliding_window for kind in self.kinds))

    @classmethod
    def from_config(cls, config: ModelConfig, *, has_rope: bool = True) -> "LayerKinds":
        """Read config.layer_types, the window, and the ropes of the two types of layers."""
        local = config.local_rope or config.rope
        by_type = {
            "full_attention": LayerKind(None, config.rope if has_rope else None),
            "sliding_attention": LayerKind(config.sliding_window, local if has_rope else None),
        }
        kinds = tuple(dict.fromkeys(by_type[name] for name in config.layer_types))
        return cls(kinds, tuple(kinds.index(by_type[name]) for name in config.layer_types))


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Hidden:
    """What one layer hands to the next."""

    x: jax.Array  # [T, D] the residual stream
    begun: jax.Array | None = None  # what the next layer's first products give, if this layer ended with them


@partial(jax.tree_util.register_dataclass, data_fields=["metadata", "ropes", "arrivals"], meta_fields=["windows"])
@dataclass(frozen=True)
class LayerInputs:
    """What all layers of a step share."""

    metadata: AttentionMetadata
    ropes: tuple[tuple[jax.Array, jax.Array] | None, ...]  # a kind: cos, sin f32[T, rotated / 2]; None without rope
    windows: tuple[int | None, ...]  # a kind; static
    arrivals: jax.Array | None  # see pallas_kernels.make_arrivals

    @classmethod
    def make(cls, kinds: LayerKinds, head_dim: int, positions: jax.Array, metadata: AttentionMetadata) -> "LayerInputs":
        """Compute the rope tables of the step, once for each distinct rope. `positions`: i32[T]."""
        distinct = {kind.rope: kind.rope and rope_tables(kind.rope, head_dim, positions) for kind in kinds.kinds}
        ropes = tuple(distinct[kind.rope] for kind in kinds.kinds)
        windows = tuple(kind.sliding_window for kind in kinds.kinds)
        return cls(_out_of_the_plan(metadata), ropes, windows, make_arrivals(metadata.backend))

    def at(self, layer: jax.Array, kind: int | jax.Array, next_layer: Any = None) -> "LayerContext":
        """The view of one layer, i32[]; `kind` is static, or i32[] where one program serves layers of many kinds."""
        if isinstance(kind, int):
            rope, window = self.ropes[kind], self.windows[kind]
        else:
            rope = jax.tree.map(lambda *tables: jnp.stack(tables)[kind], *self.ropes)
            windows = jnp.array([_NO_WINDOW if w is None else w for w in self.windows], jnp.int32)
            window = None if set(self.windows) == {None} else windows[kind]
        return LayerContext(self.metadata, layer, rope, window, self.arrivals, next_layer)


def _out_of_the_plan(metadata: AttentionMetadata) -> AttentionMetadata:
    """Have what the kernels of each layer read copied out of the step's buffer, once.

    XLA would hand each kernel a slice of the buffer instead, whose address the host computes in every layer and step.
    """
    names = ("slot_mapping", "seq_lens", "query_start_loc")
    copies = jax.lax.optimization_barrier([getattr(metadata, name) for name in names])
    return replace(metadata, **dict(zip(names, copies, strict=True)))


@dataclass(frozen=True)
class LayerContext:
    """What one layer needs besides its activations; lives within one trace."""

    metadata: AttentionMetadata
    layer: jax.Array  # i32[]
    rope: tuple[jax.Array, jax.Array] | None  # cos, sin f32[T, rotated / 2]
    sliding_window: int | jax.Array | None
    arrivals: jax.Array | None
    next_layer: Any  # the layer behind this one, with its weights, where `end` runs ahead into it

    def project(self, x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None = None) -> jax.Array:
        """pallas_kernels.matmul_stages: kernels where they were measured to be faster, XLA elsewhere.

        Returns: the result of the last stage.
        """
        is_kernel = prefers_matmul_kernel(x, stages, self.metadata.backend)
        if len(x) == FEW_ROWS and self.metadata.backend != "reference":
            sizes = ", ".join("x".join(map(str, stage.weight.shape)) for stage in stages)
            logger.info("%d rows times %s: %s", len(x), sizes, "Pallas kernel" if is_kernel else "XLA")
        backend = self.metadata.backend if is_kernel else "reference"
        return matmul_stages(x, stages, residual, self.arrivals, backend=backend)[-1]

    def begin(self, hidden: Hidden, stages: tuple[MatmulStage, ...]) -> jax.Array:
        """The layer's first products, unless the layer before ended with them."""
        return self.project(hidden.x, stages) if hidden.begun is None else hidden.begun

    def end(self, x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array) -> Hidden:
        """The layer's last products, the last of which adds the residual; then the next layer's first ones.

        As one kernel where there is one: weights of the next layer are on their way while this one's are worked on.
        """
        if self.next_layer is None:
            return Hidden(self.project(x, stages, residual))
        stages = (*stages, *self.next_layer.first_stages())
        *_, x, begun = matmul_stages(x, stages, residual, self.arrivals, backend=self.metadata.backend)
        return Hidden(x, begun)


def default_unroll() -> bool:
    """Whether run_layers unrolls where nobody chose: everywhere but on a CPU."""
    return jax.default_backend() != "cpu"


def run_layers(
    layers: nnx.Module,
    x: jax.Array,
    kv_cache: jax.Array,
    inputs: LayerInputs,
    kind_of_layer: tuple[int, ...],
    *,
    unroll: bool,
) -> tuple[jax.Array, jax.Array]:
    """Run all layers in order.

    Unrolled is for GPUs: kernels take the stacked weights whole, slices by constant numbers fuse into what XLA makes,
    and the step becomes one CUDA graph; an inner jit with the layer number as an argument lowers each kind of layer
    once. The scan is for CPUs: a second of compile instead of ten, and no copy of the slices. The cache is a carry,
    never xs and ys: those copy a layer a step.

    Args:
      layers: one module whose weights are stacked by layer; called as layer(Hidden, kv_cache, LayerContext), which
        returns Hidden and the cache. It may have `first_stages()`, a product that it begins with and that the layer
        before may end with, and `last_stages()`, those that are computed together with it then.
      x: [T, D].
      kv_cache: see pallas_kernels.rope_and_write_kv; consumed.
      kind_of_layer: index into the kinds of `inputs`, one a layer.

    Returns: [T, D] and kv_cache after the last layer.
    """
    graphdef, state = nnx.split(layers)
    weights = nnx.to_pure_dict(state)

    if unroll:
        return _run_unrolled(graphdef, weights, Hidden(x), kv_cache, inputs, kind_of_layer)
    is_uniform = len(set(kind_of_layer)) == 1
    kinds = jnp.array(kind_of_layer, jnp.int32)

    def step(carry: tuple[Hidden, jax.Array], per_layer: tuple) -> tuple[tuple[Hidden, jax.Array], None]:
        of_layer, layer, kind = per_layer
        context = inputs.at(layer, kind_of_layer[0] if is_uniform else kind)
        return nnx.merge(graphdef, of_layer)(*carry, context), None

    layer_numbers = jnp.arange(len(kind_of_layer), dtype=jnp.int32)
    hidden, kv_cache = jax.lax.scan(step, (Hidden(x), kv_cache), (weights, layer_numbers, kinds))[0]
    return hidden.x, kv_cache


def _run_unrolled(
    graphdef: Any,
    weights: dict,
    hidden: Hidden,
    kv_cache: jax.Array,
    inputs: LayerInputs,
    kind_of_layer: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """See run_layers."""

    def layer_of(weights: dict, number: jax.Array) -> Any:
        return nnx.merge(graphdef, jax.tree.map(lambda stack: LayerSlice(stack, number), weights))

    @partial(jax.jit, static_argnames="kind")
    def run_one(
        weights: dict,
        hidden: Hidden,
        kv_cache: jax.Array,
        inputs: LayerInputs,
        number: jax.Array,
        following: jax.Array | None,
        kind: int,
    ) -> tuple[Hidden, jax.Array]:
        next_layer = None if following is None else layer_of(weights, following)
        return layer_of(weights, number)(hidden, kv_cache, inputs.at(number, kind, next_layer))

    # Constants: an element of an array would be one more kernel a layer.
    numbers = [jnp.array(i, jnp.int32) for i in range(len(kind_of_layer))]
    following: list[jax.Array] | list[None] = [None] * len(numbers)
    first = layer_of(weights, numbers[0])
    if (
        len(hidden.x) == FEW_ROWS
        and hasattr(first, "first_stages")
        and _runs_ahead(first, hidden.x, inputs.metadata.backend)
    ):
        # The first layer finds its product done, and the last is told of a layer -1: each is lowered with the others.
        begun = inputs.at(numbers[0], kind_of_layer[0]).project(hidden.x, first.first_stages())
        hidden, following = Hidden(hidden.x, begun), [*numbers[1:], jnp.array(-1, jnp.int32)]
    for number, after, kind in zip(numbers, following, kind_of_layer, strict=True):
        hidden, kv_cache = run_one(weights, hidden, kv_cache, inputs, number, after, kind=kind)
    # A last layer whose second result is unused would be lowered apart too: that takes seconds.
    return jax.lax.optimization_barrier(hidden).x, kv_cache


def _runs_ahead(layer: Any, x: jax.Array, backend: Backend) -> bool:
    """Whether kernels of few rows take a layer's last products and the next one's first in one go."""
    stages = (*layer.last_stages(), *layer.first_stages())
    attended = jax.ShapeDtypeStruct((len(x), stages[0].weight.shape[-1]), x.dtype)
    return prefers_matmul_kernel(attended, stages, backend)
