"""What scripts/bench_kernels.py times: shapes, and FlashAttention-3's figures.

With JAX_PLATFORMS=cpu the shapes are tiny and the kernels run in the interpreter: a rehearsal.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic_attention import cache_head_dim
from pallas_kernels.tuning import AttentionConfig, attention_config
from pallas_kernels.validation import Backend

ANCHORS = Path(__file__).with_name("anchors_h200.json")
ON_CARD = os.environ.get("JAX_PLATFORMS") != "cpu"
BACKEND: Backend = "mosaic_gpu" if ON_CARD else "mosaic_gpu_interpret"
# Of some tokens of a result, against float64: it is rounded to dtype, and so are the weights of the keys.
MAX_RELATIVE_ERROR = {"bfloat16": 6e-3, "float16": 1e-3}
SINK = 1.0  # the score of every sink


@dataclass(frozen=True)
class KernelShape:
    """What decode and prefill measurements have in common."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def cache_head_dim(self) -> int:
        return cache_head_dim(self.head_dim)

    @property
    def kv_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.cache_dtype or self.dtype)

    def config_for(self, num_rows: int) -> AttentionConfig:
        """What serves so many requests of this shape."""
        sizes = {"num_rows": num_rows, "block_size": self.block_size, "head_dim": self.cache_head_dim}
        return attention_config(interpret=not ON_CARD, cache_bytes=self.kv_dtype.itemsize, **sizes)

    @property
    def kv_scales(self) -> tuple[float, float]:
        """Of keys and values in 8 bits."""
        return (0.5, 2.0) if self.kv_dtype.itemsize == 1 else (1.0, 1.0)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels."""
        sinks = jnp.full(self.num_heads, SINK, jnp.float32) if self.has_sinks else None
        kv_scale = jnp.array(self.kv_scales, jnp.float32) if self.kv_dtype.itemsize == 1 else None
        masks = {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap, "sinks": sinks}
        return {"scale": self.head_dim**-0.5, "kv_scale": kv_scale, "interpret": not ON_CARD, **masks}


@dataclass(frozen=True)
class DecodeShape(KernelShape):
    """One token a request over `lens` keys each.

    cut: how its work is cut, (tile, stages, num_ctas) of tuning.DecodeConfig; None is what serves it.
    """

    lens: tuple[int, ...] = ()
    cut: tuple[int, int, int] | None = None

    @property
    def config(self) -> AttentionConfig:
        """What serves it, or what `cut` says."""
        config = self.config_for(len(self.lens))
        if self.cut is None:
            return config
        tile, stages, num_ctas = self.cut
        return replace(config, decode=replace(config.decode, tile=tile, stages=stages, num_ctas=num_ctas))

    @property
    def num_bytes(self) -> int:
        """Of the keys and values that have to be read, without the padding of heads."""
        num_keys = sum(min(n, self.sliding_window or n) for n in self.lens)
        return 2 * num_keys * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize


@dataclass(frozen=True)
class PrefillShape(KernelShape):
    """`num_requests` requests of `new` tokens behind `cached` ones, causal."""

    num_requests: int = 1
    new: int = 0
    cached: int = 0

    @property
    def flops(self) -> float:
        keys = self.new * (self.cached + self.new / 2)
        if self.sliding_window is not None:
            keys = sum(min(self.sliding_window, self.cached + i + 1) for i in range(self.new))
        return 4 * self.num_requests * self.num_heads * self.head_dim * keys


def _decode(num_requests: int, context: int, num_heads: int, num_kv_heads: int = 8, **options: Any) -> DecodeShape:
    lens = (context,) * num_requests
    shape = DecodeShape("", num_heads, num_kv_heads, lens=lens, **options)
    dim = "" if shape.head_dim == 128 else f"x{shape.head_dim}"
    heads = f"H={num_heads}/{num_kv_heads}{dim}"
    name = f"S={num_requests} {heads} ctx={context} BS={shape.block_size}{_suffix(shape)}"
    return replace(shape, name=name)


def _prefill(
    num_requests: int, new: int, cached: int, num_heads: int, num_kv_heads: int = 8, **options: Any
) -> PrefillShape:
    shape = PrefillShape("", num_heads, num_kv_heads, num_requests=num_requests, new=new, cached=cached, **options)
    dim = "" if shape.head_dim == 128 else f"x{shape.head_dim}"
    heads = f"H={num_heads}/{num_kv_heads}{dim}"
    name = f"B={num_requests} q={new} ctx={cached} {heads} paged BS={shape.block_size}{_suffix(shape)}"
    return replace(shape, name=name)


def _suffix(shape: KernelShape) -> str:
    """What is not as usual."""
    parts = [shape.dtype] if shape.dtype != "bfloat16" else []
    parts += [f"{shape.cache_dtype} cache"] if shape.cache_dtype else []
    parts += [f"window {shape.sliding_window}"] if shape.sliding_window else []
    parts += [f"cap {shape.soft_cap:g}"] if shape.soft_cap else []
    parts += ["sinks"] if shape.has_sinks else []
    return "".join(f", {part}" for part in parts)


@dataclass(frozen=True)
class MixedStep:
    """Decodes of equal context and one chunk of a new request."""

    heads: KernelShape
    num_decodes: int
    context: int
    chunk: int

    @property
    def name(self) -> str:
        return f"{self.num_decodes} x {self.context} + {self.chunk}"

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.chunk

    def parts(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Keys and new tokens of each request: of all, of the decodes, of the chunk."""
        lens = np.array([self.context] * self.num_decodes + [self.chunk], np.int32)
        new = np.array([1] * self.num_decodes + [self.chunk], np.int32)
        return {"all": (lens, new), "decodes": (lens[:-1], new[:-1]), "chunk": (lens[-1:], new[-1:])}


_UNEVEN = tuple(int(x) for x in np.random.default_rng(0).integers(100, 1501, 256))
DECODE_SHAPES = (
    _decode(256, 800, 16),
    _decode(64, 2048, 32),
    _decode(16, 16384, 32),
    _decode(1, 32768, 32),
    _decode(1, 384, 16),
    _decode(256, 800, 32),
    _decode(64, 2048, 16),
    _decode(256, 800, 16, block_size=64),
    _decode(64, 2048, 32, block_size=64),
    DecodeShape("S=256 H=16/8 ctx=100..1500 BS=16", 16, 8, lens=_UNEVEN),
    DecodeShape("1x60000 + 255x200 H=16/8 BS=16", 16, 8, lens=(60000,) + (200,) * 255),
)
WRITE_AND_DECODE_SHAPES = DECODE_SHAPES[:6]
PREFILL_SHAPES = (
    _prefill(1, 8192, 0, 32),
    _prefill(1, 2048, 6144, 32),
    _prefill(8, 1024, 0, 32),
    _prefill(64, 100, 0, 32),
    _prefill(1, 8192, 0, 16),
    _prefill(1, 8192, 0, 32, block_size=64),
)
MIXED_STEP = MixedStep(KernelShape("", 32, 8), 200, 800, 2048)
WRITE_TOKENS = (1, 64, 256, 2048, 16384)
WORK_SIZES = ((1, 1, "decode"), (256, 256, "decode"), (2048, 256, "mixed"), (16384, 1024, "mixed"))
FP8 = "float8_e4m3fn"
# What else a model may want: (query heads, kv heads, options). The first two are what 8 bits are compared with.
_OPTIONS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (16, 8, {}),
    (32, 8, {}),
    (16, 8, {"cache_dtype": FP8}),
    (32, 8, {"cache_dtype": FP8}),
    (16, 8, {"dtype": "float16"}),
    (9, 3, {"head_dim": 64}),
    (16, 16, {"head_dim": 80}),
    (16, 16, {"head_dim": 96}),
    (8, 4, {"head_dim": 256}),
    (8, 4, {"head_dim": 256, "sliding_window": 512, "soft_cap": 50.0}),
    (16, 8, {"sliding_window": 256}),
    (16, 8, {"soft_cap": 50.0}),
    (16, 8, {"has_sinks": True}),
    (16, 8, {"block_size": 32}),
    (16, 8, {"block_size": 64}),
    (16, 8, {"block_size": 128}),
)
OPTION_SHAPES = tuple(
    (_decode(256, 800, heads, kv_heads, **options), _prefill(1, 4096, 0, heads, kv_heads, **options))
    for heads, kv_heads, options in _OPTIONS
)


def _cut_of(shape: DecodeShape) -> tuple[int, int, int]:
    config = shape.config.decode
    return config.tile, config.stages, config.num_ctas


# Decode cut otherwise, beside what serves: over long and short contexts.
CUT_SHAPES = tuple(
    replace(shape, name=f"{shape.name}, cut {' x '.join(map(str, cut))}", cut=cut) if cut else shape
    for shape in (
        *DECODE_SHAPES[:5],
        *(_decode(num_requests, 500, 16) for num_requests in (16, 32, 64)),
        *(_decode(num_requests, 2048, 32) for num_requests in (16, 32)),
    )
    for cut in (None, (64, 2, 256), (128, 2, 128), (192, 1, 128), (256, 1, 128))
    if cut != _cut_of(shape)
)
# Every group of 1 to 16 query heads a kv head.
GROUP_SHAPES = tuple((_decode(256, 800, 4 * group, 4), _prefill(1, 4096, 0, 4 * group, 4)) for group in range(1, 17))

if not ON_CARD:
    _small: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 64}
    DECODE_SHAPES = (_decode(2, 70, 2, **_small), _decode(1, 90, 3, **_small))
    WRITE_AND_DECODE_SHAPES = DECODE_SHAPES[:1]
    PREFILL_SHAPES = (_prefill(1, 40, 30, 2, **_small), _prefill(2, 20, 0, 1, **_small))
    _wide = {"cache_dtype": FP8, "sliding_window": 40, "has_sinks": True, "soft_cap": 5.0, **_small}
    OPTION_SHAPES = ((_decode(2, 70, 2, **_wide), _prefill(1, 40, 30, 2, **_wide)),)
    GROUP_SHAPES = ((_decode(1, 70, 5, **_small), _prefill(1, 20, 0, 5, **_small)),)
    CUT_SHAPES = (replace(DECODE_SHAPES[0], name="cut", cut=(128, 1, 3)),)
    MIXED_STEP = MixedStep(KernelShape("", 2, 1, 64), 2, 50, 20)
    WRITE_TOKENS, WORK_SIZES = (3,), ((2, 2, "decode"), (20, 4, "mixed"))


def flash_attention_3_us(name: str) -> float | None:
    """FlashAttention-3's time for a shape, measured on an H200 through CUDA graphs, or None."""
    rows = json.loads(ANCHORS.read_text())["flash_attention_3_kernels"]
    return next((row["us"] for row in rows if row["shape"] == name), None)
