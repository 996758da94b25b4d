"""Self-attention over the paged cache: the one place that unpacks AttentionMetadata."""

import jax
from flax import nnx

from jaxvllm.layers.linear import OutputProjection, QKVProjection
from jaxvllm.layers.norm import RMSNorm
from jaxvllm.layers.run_layers import LayerContext
from jaxvllm.model_config import ModelConfig
from pallas_kernels import HeadNorm, paged_attention, rope_and_write_kv


class Attention(nnx.Module):
    """Merged qkv, optional norm of queries and keys, rope, cache write, paged attention, output projection."""

    def __init__(
        self,
        config: ModelConfig,
        qkv_proj: QKVProjection,
        o_proj: OutputProjection,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ):
        """`scale`: of the scores, head_dim ** -0.5 if None; `soft_cap`: see pallas_kernels.paged_attention."""
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap

    def __call__(self, x: jax.Array, kv_cache: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """[T, D] -> [T, D], and the cache with the step's keys and values; the cache given is consumed."""
        metadata = context.metadata
        q, kv_cache = rope_and_write_kv(
            self.qkv_proj(x),
            kv_cache,
            metadata.slot_mapping,
            context.layer,
            rope=context.rope,
            norm=self._head_norm(),
            backend=metadata.backend,
        )
        out = paged_attention(
            q,
            kv_cache,
            context.layer,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.num_decodes,
            metadata.num_reqs,
            metadata.work,
            scale=self.scale,
            sliding_window=context.sliding_window,
            soft_cap=self.soft_cap,
            kind=metadata.kind,
            backend=metadata.backend,
        )
        return self.o_proj(out), kv_cache

    def _head_norm(self) -> HeadNorm | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        weights = (self.q_norm.weight.get_value(), self.k_norm.weight.get_value())
        return HeadNorm(*weights, eps=self.q_norm.eps, unit_offset=self.q_norm.unit_offset)
