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
from pallas_kernels import FEW_ROWS, LayerSlice, MatmulStage, make_arrivals, matmul_stages, prefers_matmul_kernel

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

    def at(self, layer: jax.Array, kind: int | jax.Array) -> "LayerContext":
        """The view of one layer, i32[]; `kind` is static, or i32[] where one program serves layers of many kinds."""
        if isinstance(kind, int):
            return LayerContext(self.metadata, layer, self.ropes[kind], self.windows[kind], self.arrivals)
        rope = jax.tree.map(lambda *tables: jnp.stack(tables)[kind], *self.ropes)
        window = jnp.array([_NO_WINDOW if w is None else w for w in self.windows], jnp.int32)[kind]
        return LayerContext(self.metadata, layer, rope, None if set(self.windows) == {None} else window, self.arrivals)


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

    def project(self, x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None = None) -> jax.Array:
        """pallas_kernels.matmul_stages: a kernel where there is one that was measured to be faster, XLA elsewhere."""
        is_kernel = prefers_matmul_kernel(x, stages, self.metadata.backend)
        if len(x) == FEW_ROWS and self.metadata.backend != "reference":
            sizes = ", ".join("x".join(map(str, stage.weight.shape)) for stage in stages)
            logger.info("%d rows times %s: %s", len(x), sizes, "Pallas kernel" if is_kernel else "XLA")
        backend = self.metadata.backend if is_kernel else "reference"
        return matmul_stages(x, stages, residual, self.arrivals, backend=backend)


def default_unroll() -> bool:
    """Whether run_layers unrolls where nobody chose: everywhere but on a CPU."""
    return jax.default_backend() != "cpu"


def run_layers(
    layers: nnx.Module,
    hidden: jax.Array,
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
      layers: one module whose weights are stacked by layer; called as layer(hidden, kv_cache, LayerContext).
      hidden: [T, D].
      kv_cache: see pallas_kernels.rope_and_write_kv; consumed.
      kind_of_layer: index into the kinds of `inputs`, one a layer.

    Returns: hidden and kv_cache after the last layer.
    """
    graphdef, state = nnx.split(layers)
    weights = nnx.to_pure_dict(state)

    def run_layer(
        weights: dict, hidden: jax.Array, kv_cache: jax.Array, inputs: LayerInputs, layer: jax.Array, kind: Any
    ) -> tuple[jax.Array, jax.Array]:
        return nnx.merge(graphdef, weights)(hidden, kv_cache, inputs.at(layer, kind))

    if unroll:

        @partial(jax.jit, static_argnames="kind")
        def run_one(weights: dict, hidden: jax.Array, kv_cache: jax.Array, inputs: LayerInputs, layer: Any, kind: int):
            of_layer = jax.tree.map(lambda stack: LayerSlice(stack, layer), weights)
            return run_layer(of_layer, hidden, kv_cache, inputs, layer, kind)

        for i, kind in enumerate(kind_of_layer):
            # A constant: an element of an array would be one more kernel a layer.
            hidden, kv_cache = run_one(weights, hidden, kv_cache, inputs, jnp.array(i, jnp.int32), kind=kind)
        return hidden, kv_cache

    is_uniform = len(set(kind_of_layer)) == 1
    kinds = jnp.array(kind_of_layer, jnp.int32)

    def step(carry: tuple[jax.Array, jax.Array], per_layer: tuple) -> tuple[tuple[jax.Array, jax.Array], None]:
        of_layer, layer, kind = per_layer
        hidden, kv_cache = carry
        return run_layer(of_layer, hidden, kv_cache, inputs, layer, kind_of_layer[0] if is_uniform else kind), None

    layer_numbers = jnp.arange(len(kind_of_layer), dtype=jnp.int32)
    return jax.lax.scan(step, (hidden, kv_cache), (weights, layer_numbers, kinds))[0]
