"""Normalisation layers. Statistics are float32 whatever the dtype of the activations."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec, declare
from pallas_kernels import as_array, rms_norm


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; with `unit_offset`, * (1 + weight), as in Gemma."""

    def __init__(self, size: int, name: str, *, eps: float, dtype: str, unit_offset: bool = False):
        """`name`: of the checkpoint's tensor, with "{layer}" for the layer number."""
        self.eps = eps
        self.unit_offset = unit_offset
        init = "zeros" if unit_offset else "ones"
        self.weight = declare(ParamSpec((size,), jnp.dtype(dtype), (None,), (CheckpointTensor(name, (size,)),), init))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., size]; the result has x's dtype."""
        return rms_norm(x, self.weight.get_value(), eps=self.eps, unit_offset=self.unit_offset)


class LayerNorm(nnx.Module):
    """(x - mean) / std * weight + bias over the last axis; without weights, the first half of it."""

    def __init__(self, size: int, prefix: str, *, eps: float, dtype: str, has_weights: bool = True):
        """`prefix`: of the checkpoint's two tensors."""
        self.eps = eps
        weight, bias = (CheckpointTensor(f"{prefix}.{part}", (size,)) for part in ("weight", "bias"))
        weight_spec = ParamSpec((size,), jnp.dtype(dtype), (None,), (weight,), "ones")
        bias_spec = ParamSpec((size,), jnp.dtype(dtype), (None,), (bias,), "zeros")
        self.weight, self.bias = (declare(spec) if has_weights else None for spec in (weight_spec, bias_spec))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., size]; the result has x's dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.weight is not None and self.bias is not None:
            weight, bias = (as_array(param.get_value()).astype(jnp.float32) for param in (self.weight, self.bias))
            wide = wide * weight + bias
        return wide.astype(x.dtype)
