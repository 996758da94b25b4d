"""What the layers of a step get to know, what one hands to the next, and how a layer's products run."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.layers.rope import rope_tables
from jaxvllm.model_config import ModelConfig
from jaxvllm.rope_config import RopeConfig
from pallas_kernels import (
    Backend,
    MatmulStage,
    has_product_kernels,
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


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Attended:
    """What run_layers leaves of each token. What lies behind it, logits included, looks at each token by itself."""

    heads: jax.Array | None  # [T, N * H] what the last layer's attention gives; None: that layer is finished
    residual: jax.Array  # [T, D] the residual stream that it is added to

    @classmethod
    def of_one_token(cls, config: ModelConfig, *, is_finished: bool) -> "Attended":
        """The shapes and dtype, without the axis of tokens; `is_finished`: the layers are not unrolled."""
        sizes = (config.num_heads * config.head_dim, config.hidden_size)
        heads, residual = (jax.ShapeDtypeStruct((size,), jnp.dtype(config.dtype)) for size in sizes)
        return cls(None if is_finished else heads, residual)  # pyright: ignore[reportArgumentType]

    def take(self, tokens: jax.Array) -> "Attended":
        """Of the tokens of these numbers, i32[R]."""
        return jax.tree.map(lambda array: array[tokens], self)


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
            rope, window = self.ropes[kind], self.windows[kind]
        else:
            rope = jax.tree.map(lambda *tables: jnp.stack(tables)[kind], *self.ropes)
            windows = jnp.array([_NO_WINDOW if w is None else w for w in self.windows], jnp.int32)
            window = None if set(self.windows) == {None} else windows[kind]
        return LayerContext(self.metadata, layer, rope, window, self.products())

    def products(self) -> "Products":
        """What runs products of the step's tokens."""
        return Products(self.metadata.backend, self.arrivals)


def _out_of_the_plan(metadata: AttentionMetadata) -> AttentionMetadata:
    """Have what the kernels of each layer read copied out of the step's buffer, once.

    XLA would hand each kernel a slice of the buffer instead, whose address the host computes in every layer and step.
    """
    names = ("slot_mapping", "seq_lens", "query_start_loc")
    copies = jax.lax.optimization_barrier([getattr(metadata, name) for name in names])
    return replace(metadata, **dict(zip(names, copies, strict=True)))


@dataclass(frozen=True)
class Products:
    """Runs the products of one layer; lives within one trace."""

    backend: Backend
    arrivals: jax.Array | None  # see pallas_kernels.make_arrivals
    next_layer: Any = None  # the layer behind this one, with its weights, where `end` runs ahead into it

    def project(self, x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None = None) -> jax.Array:
        """pallas_kernels.matmul_stages: kernels where they were measured to be faster, XLA elsewhere.

        Returns: the result of the last stage.
        """
        is_kernel = prefers_matmul_kernel(x, stages, self.backend)
        if has_product_kernels(len(x)) and self.backend != "reference":
            sizes = ", ".join("x".join(map(str, stage.weight.shape)) for stage in stages)
            logger.info("%d rows times %s: %s", len(x), sizes, "Pallas kernel" if is_kernel else "XLA")
        backend = self.backend if is_kernel else "reference"
        return matmul_stages(x, stages, residual, self.arrivals, backend=backend)[-1]

    def begin(self, hidden: Hidden, stages: tuple[MatmulStage, ...]) -> jax.Array:
        """The layer's first products, unless the layer before ended with them."""
        return self.project(hidden.x, stages) if hidden.begun is None else hidden.begun

    def end(self, x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array) -> Hidden:
        """The layer's last products, the last of which adds the residual; then the next layer's first ones.

        In one go: as one kernel where there is one, so that weights of the next layer are on their way while this one's
        are worked on, or so that the last product begins the next one's norm.
        """
        if self.next_layer is None:
            return Hidden(self.project(x, stages, residual))
        stages = (*stages, *self.next_layer.first_stages())
        *_, x, begun = matmul_stages(x, stages, residual, self.arrivals, backend=self.backend)
        return Hidden(x, begun)


@dataclass(frozen=True)
class LayerContext:
    """What one layer needs besides its activations, up to its attention; lives within one trace."""

    metadata: AttentionMetadata
    layer: jax.Array  # i32[]
    rope: tuple[jax.Array, jax.Array] | None  # cos, sin f32[T, rotated / 2]
    sliding_window: int | jax.Array | None
    products: Products
