"""A layer's part of an array that all layers share."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_SMALL_BYTES = 64 * 1024


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class LayerSlice:
    """stack[layer], not taken yet: kernels get the whole stack and the number, XLA the slice.

    A slice handed to a kernel costs no copy, but the host some 2 us a call to compute its address in every step.
    """

    stack: jax.Array  # [L, ...]
    layer: jax.Array  # i32[]; -1 for none, where an op says that it takes that

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Of the slice."""
        return self.stack.ndim - 1

    @property
    def size(self) -> int:
        """Of the slice."""
        return self.stack.size // len(self.stack)

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self.stack.dtype

    def reshape(self, *shape: int) -> "LayerSlice":
        """The slice in another shape."""
        return LayerSlice(self.stack.reshape(len(self.stack), *shape), self.layer)

    def take(self) -> jax.Array:
        """The slice itself.

        A small one (norm, bias) becomes part of the kernel that uses it, and a number that XLA knows would make that
        kernel another one to compile in every layer: 14.4 s instead of 4 for a decode program of Qwen3-0.6B.
        """
        is_small = self.size * self.dtype.itemsize <= _SMALL_BYTES
        layer = lax.optimization_barrier(self.layer) if is_small else self.layer
        return lax.dynamic_index_in_dim(self.stack, layer, keepdims=False, allow_negative_indices=False)


# What an op takes of a layer.
LayerArray = jax.Array | LayerSlice


def as_array(x: LayerArray) -> jax.Array:
    """The array, taken from its stack if it is a slice."""
    return x.take() if isinstance(x, LayerSlice) else x


def as_stack(x: LayerArray, layer: jax.Array) -> jax.Array:
    """[L, ...] for a kernel that looks at `layer`; a stack of one if x is an array, or the slice of another number."""
    return x.stack if isinstance(x, LayerSlice) and x.layer is layer else as_array(x)[None]


def layer_of(x: LayerArray) -> jax.Array:
    """i32[] of a slice; 0 for an array."""
    return x.layer if isinstance(x, LayerSlice) else jnp.int32(0)


def place_in(stack: Any, layer: jax.Array) -> jax.Array | int:
    """Where a kernel finds its layer in what as_stack gave."""
    return layer if stack.shape[0] > 1 else 0
