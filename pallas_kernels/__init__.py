"""Attention and KV-cache kernels: arrays in, arrays out."""

from pallas_kernels.mosaic import cache_head_dim, make_attention_work, unsupported_reason
from pallas_kernels.ops import paged_attention, rope_and_write_kv
from pallas_kernels.reference_rope_write import HeadNorm, rms_norm
from pallas_kernels.validation import Backend, Kind
from pallas_kernels.work_lists import AttentionWork

__all__ = [
    "AttentionWork",
    "Backend",
    "HeadNorm",
    "Kind",
    "cache_head_dim",
    "make_attention_work",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "unsupported_reason",
]
