"""What scripts/bench_kernels.py times: shapes, the configurations to compare, and FlashAttention-3's figures."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pallas_kernels.tuning import H200, DecodeConfig, PrefillConfig

ANCHORS = Path(__file__).with_name("anchors_h200.json")


@dataclass(frozen=True)
class DecodeShape:
    """One token a request over `lens` keys each."""

    name: str
    lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    block_size: int = 16


@dataclass(frozen=True)
class PrefillShape:
    """`num_requests` requests of `new` tokens behind `cached` ones, causal."""

    name: str
    num_requests: int
    new: int
    cached: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    block_size: int = 16

    @property
    def flops(self) -> float:
        keys = self.new * (self.cached + self.new / 2)
        return 4 * self.num_requests * self.num_heads * self.head_dim * keys


def _decode(num_requests: int, context: int, num_heads: int, block_size: int = 16) -> DecodeShape:
    name = f"S={num_requests} H={num_heads}/8 ctx={context} BS={block_size}"
    return DecodeShape(name, (context,) * num_requests, num_heads, 8, block_size=block_size)


def _prefill(num_requests: int, new: int, cached: int, num_heads: int, block_size: int = 16) -> PrefillShape:
    name = f"B={num_requests} q={new} ctx={cached} H={num_heads}/8 paged BS={block_size}"
    return PrefillShape(name, num_requests, new, cached, num_heads, 8, block_size=block_size)


_UNEVEN = tuple(int(x) for x in np.random.default_rng(0).integers(100, 1501, 256))
DECODE_SHAPES = (
    _decode(256, 800, 16),
    _decode(64, 2048, 32),
    _decode(16, 16384, 32),
    _decode(1, 32768, 32),
    _decode(1, 384, 16),
    _decode(256, 800, 32),
    _decode(64, 2048, 16),
    _decode(256, 800, 16, 64),
    _decode(64, 2048, 32, 64),
    DecodeShape("S=256 H=16/8 ctx=100..1500 BS=16", _UNEVEN, 16, 8),
    DecodeShape("1x60000 + 255x200 H=16/8 BS=16", (60000,) + (200,) * 255, 16, 8),
    DecodeShape("S=256 H=9/3x64 ctx=800 BS=16", (800,) * 256, 9, 3, head_dim=64),
    DecodeShape("S=64 H=28/4 ctx=2048 BS=16", (2048,) * 64, 28, 4),
)
PREFILL_SHAPES = (
    _prefill(1, 8192, 0, 32),
    _prefill(1, 2048, 6144, 32),
    _prefill(8, 1024, 0, 32),
    _prefill(1, 8192, 0, 16),
    _prefill(1, 8192, 0, 32, 64),
    PrefillShape("B=8 q=1024 ctx=0 H=9/3x64 paged BS=16", 8, 1024, 0, 9, 3, head_dim=64),
)
WRITE_TOKENS = (1, 64, 256, 2048, 16384)

_BASE = H200.decode
DECODE_CONFIGS: dict[str, DecodeConfig] = {
    "default": _BASE,
    # 256 divides the items of many batches, so that no item is cut and nothing has to be merged.
    "256 x 64 x 3": replace(_BASE, num_ctas=256, stages=3),
    "256 x 64 x 2": replace(_BASE, num_ctas=256, stages=2),
    "128 x 128 x 3": replace(_BASE, num_ctas=128, tile=128, stages=3),
    "128 x 128 x 2": replace(_BASE, num_ctas=128, tile=128, stages=2),
    "128 x 64 x 4": replace(_BASE, num_ctas=128, stages=4),
    "128 x 64 x 3": replace(_BASE, num_ctas=128, stages=3),
}
PREFILL_CONFIGS: dict[str, PrefillConfig] = {
    "default": H200.prefill,
    "pingpong": replace(H200.prefill, pingpong=True),
    "two-copy-warps": replace(H200.prefill, copy_warps=2),
    "pingpong two-copy-warps": replace(H200.prefill, pingpong=True, copy_warps=2),
}
# All variants are timed on these.
VARIANT_DECODE_SHAPES = (*DECODE_SHAPES[:4], DECODE_SHAPES[9])
VARIANT_PREFILL_SHAPES = PREFILL_SHAPES[:2]


def flash_attention_3_us(name: str) -> float | None:
    """FlashAttention-3's time for a shape, measured on an H200 through CUDA graphs, or None."""
    rows = json.loads(ANCHORS.read_text())["flash_attention_3_kernels"]
    return next((row["us"] for row in rows if row["shape"] == name), None)
