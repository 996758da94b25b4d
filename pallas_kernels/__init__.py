"""Attention and KV-cache kernels: arrays in, arrays out."""

from pallas_kernels.ops import paged_attention, write_kv_cache
from pallas_kernels.validation import Backend, Kind

__all__ = ["Backend", "Kind", "paged_attention", "write_kv_cache"]
