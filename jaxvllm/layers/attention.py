"""Self-attention over the paged cache: the one place that unpacks AttentionMetadata."""

import jax
from flax import nnx

from jaxvllm.layers.kv_scale import declare_kv_scale
from jaxvllm.layers.layer_context import LayerContext
from jaxvllm.layers.linear import OutputProjection, QKVProjection
from jaxvllm.layers.norm import RMSNorm
from jaxvllm.model_config import ModelConfig
from pallas_kernels import HeadNorm, paged_attention, rope_and_write_kv, rope_write_and_attend


class Attention(nnx.Module):
    """Norm of queries and keys (optional), rope, cache write, paged attention; the layer projects before and after."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        qkv_proj: QKVProjection,
        o_proj: OutputProjection,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ):
        """Declare the scales of an 8-bit cache if the config asks for them; the other weights are the projections'.

        Args:
          prefix: of the scales' tensors.
          scale: of the scores, head_dim ** -0.5 if None.
          soft_cap: see pallas_kernels.paged_attention.
        """
        self.qkv_proj = qkv_proj
        self.head_shape = (config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, config.head_dim)
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        self.kv_scale = declare_kv_scale(prefix) if config.has_kv_scales else None

    def __call__(self, qkv: jax.Array, kv_cache: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """What qkv_proj gives -> [T, N * H] for o_proj, and the cache with the step's keys and values.

        The cache given is consumed.
        """
        metadata = context.metadata
        kv_scale = None if self.kv_scale is None else self.kv_scale.get_value()
        rows = (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc)
        to_write = (qkv.reshape(len(qkv), *self.head_shape), kv_cache, metadata.slot_mapping, context.layer)
        write_options = {"rope": context.rope, "norm": self._head_norm(), "backend": metadata.backend}
        options = {
            "scale": self.scale,
            "sliding_window": context.sliding_window,
            "soft_cap": self.soft_cap,
            "kv_scale": kv_scale,
        }
        if metadata.kind == "decode":
            out, kv_cache = rope_write_and_attend(
                *to_write, *rows, metadata.num_reqs, metadata.work, **write_options, **options
            )
            return out.reshape(len(out), -1), kv_cache
        q, kv_cache = rope_and_write_kv(*to_write, **write_options, kv_scale=kv_scale)
        out = paged_attention(
            q,
            kv_cache,
            context.layer,
            *rows,
            metadata.num_decodes,
            metadata.num_reqs,
            metadata.work,
            **options,
            kind=metadata.kind,
            backend=metadata.backend,
        )
        return out.reshape(len(out), -1), kv_cache

    def _head_norm(self) -> HeadNorm | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        weights = (self.q_norm.weight.get_value(), self.k_norm.weight.get_value())
        return HeadNorm(*weights, eps=self.q_norm.eps, unit_offset=self.q_norm.unit_offset)
