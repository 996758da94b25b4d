"""Attention and KV-cache kernels: arrays in, arrays out."""

from pallas_kernels.mosaic import make_attention_work, unsupported_reason
from pallas_kernels.ops import paged_attention, write_kv_cache
from pallas_kernels.validation import Backend, Kind
from pallas_kernels.work_lists import AttentionWork

__all__ = [
    "AttentionWork",
    "Backend",
    "Kind",
    "make_attention_work",
    "paged_attention",
    "unsupported_reason",
    "write_kv_cache",
]
