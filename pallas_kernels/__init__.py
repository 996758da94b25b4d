"""Kernels of attention, KV cache, few-row products, norms and gates: arrays in, arrays out."""

from pallas_kernels.layer_slice import LayerArray, LayerSlice, as_array
from pallas_kernels.matmul_sizes import FEW_ROWS
from pallas_kernels.mosaic_attention import cache_head_dim, make_attention_work, unsupported_reason
from pallas_kernels.mosaic_matmul import has_product_kernels, make_arrivals, prefers_matmul_kernel
from pallas_kernels.ops import (
    act_and_mul,
    matmul_stages,
    paged_attention,
    rms_norm,
    rope_and_write_kv,
    rope_write_and_attend,
)
from pallas_kernels.reference_matmul import Activation, MatmulStage
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.validation import Backend, Kind
from pallas_kernels.work_lists import AttentionWork

__all__ = [
    "FEW_ROWS",
    "Activation",
    "AttentionWork",
    "Backend",
    "HeadNorm",
    "Kind",
    "LayerArray",
    "LayerSlice",
    "MatmulStage",
    "act_and_mul",
    "as_array",
    "cache_head_dim",
    "has_product_kernels",
    "make_arrivals",
    "make_attention_work",
    "matmul_stages",
    "paged_attention",
    "prefers_matmul_kernel",
    "rms_norm",
    "rope_and_write_kv",
    "rope_write_and_attend",
    "unsupported_reason",
]
