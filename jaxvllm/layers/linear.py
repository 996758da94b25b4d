"""Projections. Weights are [out..., in...], as checkpoints store them: no transposing when they are read, and the
inputs of an output column lie side by side, as pallas_kernels.matmul_stages wants them.

A projection does not run by itself: `stage` describes it, with what surrounds it, for LayerContext.project.

Letters: T tokens  D hidden  K kv heads  G query heads of a kv head  N query heads  H head_dim  F ffn
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.layers.norm import RMSNorm
from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec, declare
from jaxvllm.model_config import ModelConfig
from pallas_kernels import LayerArray, MatmulStage


def make_stage(
    weight: LayerArray, bias: nnx.Param | None, *, norm: RMSNorm | None = None, **options: Any
) -> MatmulStage:
    """A product for LayerContext.project.

    Args:
      weight: [N, K], or [2, N, K] with a gate.
      bias: any shape of so many elements.
      norm: of the input.
      options: other fields of MatmulStage.
    """
    if norm is not None:
        options |= {"norm_weight": norm.weight.get_value(), "eps": norm.eps, "unit_offset": norm.unit_offset}
    return MatmulStage(weight, bias=None if bias is None else bias.get_value().reshape(*weight.shape[:-1]), **options)


class Linear(nnx.Module):
    """[T, in] -> [T, out] from one [out, in] tensor of the checkpoint."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        prefix: str,
        *,
        axes: tuple[str | None, str | None],
        dtype: str,
        bias: bool = False,
    ):
        """`prefix`: of the tensors "weight" and "bias"; `axes`: logical names of (out, in)."""
        source = CheckpointTensor(f"{prefix}.weight", (out_size, in_size))
        self.weight = declare(ParamSpec((out_size, in_size), jnp.dtype(dtype), axes, (source,)))
        bias_source = CheckpointTensor(f"{prefix}.bias", (out_size,))
        spec = ParamSpec((out_size,), jnp.dtype(dtype), axes[:1], (bias_source,), "zeros")
        self.bias = declare(spec) if bias else None

    def stage(self, *, norm: RMSNorm | None = None, **options: Any) -> MatmulStage:
        """See make_stage."""
        return make_stage(self.weight.get_value(), self.bias, norm=norm, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Project."""
        out = x @ self.weight.get_value().T
        return out if self.bias is None else out + self.bias.get_value()


class QKVProjection(nnx.Module):
    """[T, D] -> [T, K * (G + 2) * H]: for each kv head its G query heads, its key, its value.

    Splitting the K axis over devices keeps the query heads beside the key that they read.
    """

    def __init__(self, config: ModelConfig, prefix: str, *, fused_name: str | None = None):
        """`prefix`: of q_proj, k_proj, v_proj; `fused_name`: of one tensor that has them in that order instead."""
        kv_heads, head_dim = config.num_kv_heads, config.head_dim
        group = config.num_heads // kv_heads
        shape = (kv_heads, group + 2, head_dim, config.hidden_size)
        dtype = jnp.dtype(config.dtype)
        if fused_name is None:
            weights = tuple(_head_parts(prefix, "weight", kv_heads, group, head_dim, config.hidden_size))
        else:
            merge = partial(_merge_qkv, kv_heads=kv_heads, group=group, head_dim=head_dim)
            stored = (kv_heads * (group + 2) * head_dim, config.hidden_size)
            weights = (CheckpointTensor(fused_name, stored, convert=merge),)
        self.weight = declare(ParamSpec(shape, dtype, ("kv_heads", None, None, None), weights))
        biases = tuple(_head_parts(prefix, "bias", kv_heads, group, head_dim))
        bias_spec = ParamSpec(shape[:-1], dtype, ("kv_heads", None, None), biases, "zeros")
        self.bias = declare(bias_spec) if config.attention_bias else None

    def stage(self, *, norm: RMSNorm | None = None, **options: Any) -> MatmulStage:
        """See make_stage; the result is [T, K * (G + 2) * H]."""
        weight = self.weight.get_value()
        return make_stage(weight.reshape(-1, weight.shape[-1]), self.bias, norm=norm, **options)


def _head_parts(prefix: str, part: str, kv_heads: int, group: int, head_dim: int, *hidden: int):
    """The tensors of q_proj, k_proj and v_proj as parts of [K, G + 2, H, D] (weight) or [K, G + 2, H] (bias)."""
    for name, heads, index in (("q_proj", (group,), slice(group)), ("k_proj", (), group), ("v_proj", (), group + 1)):
        layout = (kv_heads, *heads, head_dim, *hidden)
        stored = (kv_heads * int(np.prod(heads)) * head_dim, *hidden)
        yield CheckpointTensor(
            f"{prefix}.{name}.{part}", stored, index=(slice(None), index), convert=partial(np.reshape, shape=layout)
        )


def _merge_qkv(stored: np.ndarray, *, kv_heads: int, group: int, head_dim: int) -> np.ndarray:
    """[(N + 2K) * H, D] with all queries, all keys, all values -> [K, G + 2, H, D]."""
    ends = [kv_heads * group * head_dim, kv_heads * (group + 1) * head_dim]
    parts = [part.reshape(kv_heads, -1, head_dim, stored.shape[1]) for part in np.split(stored, ends)]
    return np.concatenate(parts, axis=1)


class OutputProjection(nnx.Module):
    """[T, N * H] -> [T, D], the end of attention."""

    def __init__(self, config: ModelConfig, prefix: str, *, bias: bool):
        """`prefix`: of the tensors "weight" and "bias"."""
        shape = (config.hidden_size, config.num_heads, config.head_dim)
        stored = (config.hidden_size, config.num_heads * config.head_dim)
        source = CheckpointTensor(f"{prefix}.weight", stored, convert=partial(np.reshape, shape=shape))
        self.weight = declare(ParamSpec(shape, jnp.dtype(config.dtype), (None, "heads", None), (source,)))
        bias_source = CheckpointTensor(f"{prefix}.bias", (config.hidden_size,))
        spec = ParamSpec((config.hidden_size,), jnp.dtype(config.dtype), (None,), (bias_source,), "zeros")
        self.bias = declare(spec) if bias else None

    def stage(self, *, norm: RMSNorm | None = None, **options: Any) -> MatmulStage:
        """See make_stage; the input is [T, N * H]."""
        weight = self.weight.get_value()
        return make_stage(weight.reshape(weight.shape[0], -1), self.bias, norm=norm, **options)
