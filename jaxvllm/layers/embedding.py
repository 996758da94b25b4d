"""Token embedding and the projection back to the vocabulary. Einsum letters: R rows  D hidden  V vocab"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec, declare


class Embedding(nnx.Module):
    """A table [V, D]: rows by id, or, as lm_head, logits by row."""

    def __init__(self, vocab_size: int, size: int, name: str, *, dtype: str, axes: tuple = ("vocab", None)):
        """`name`: of the checkpoint's tensor."""
        source = CheckpointTensor(name, (vocab_size, size))
        self.weight = declare(ParamSpec((vocab_size, size), jnp.dtype(dtype), axes, (source,)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Rows [T, D] of ids i32[T], which are in range."""
        return self.weight.get_value().at[ids].get(mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of [R, D]."""
        return jnp.einsum("rd,vd->rv", hidden, self.weight.get_value(), preferred_element_type=jnp.float32)
