"""The shapes that the kernels are for: what lowering tests and benchmarks go through."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_attention import cache_head_dim, make_attention_work
from pallas_kernels.ops import paged_attention, rope_and_write_kv, rope_write_and_attend
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.validation import Kind


@dataclass(frozen=True)
class HeadShape:
    """What a model's attention is like."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class Bucket:
    """The padded sizes of a step."""

    kind: Kind
    num_tokens: int
    num_rows: int


HEAD_SHAPES = (
    HeadShape("qwen3-0.6b", 16, 8, 128),
    HeadShape("llama-3.1-8b", 32, 8, 128),
    HeadShape("smollm2-135m", 9, 3, 64),
    HeadShape("qwen2-7b", 28, 4, 128),
    HeadShape("llama-2-7b", 32, 32, 128),
    HeadShape("llama-3.1-70b", 64, 8, 128),
    HeadShape("qwen2.5-32b", 40, 8, 128),
    HeadShape("llama-3.2-1b", 32, 8, 64),
    HeadShape("qwen3-0.6b fp8", 16, 8, 128, cache_dtype="float8_e4m3fn"),
    HeadShape("llama-3.1-8b fp16", 32, 8, 128, dtype="float16"),
    HeadShape("gemma-2-2b", 8, 4, 256, sliding_window=4096, soft_cap=50.0),
    HeadShape("gemma-3-1b fp8", 4, 1, 256, cache_dtype="float8_e4m3fn", sliding_window=512),
    HeadShape("phi-2", 32, 32, 80),
    HeadShape("phi-3-mini", 32, 32, 96, sliding_window=2047),
    HeadShape("gpt-oss-20b", 64, 8, 64, sliding_window=128, has_sinks=True),
    HeadShape("glm-4-9b", 32, 2, 128),
    HeadShape("falcon-like 12 of 128", 48, 4, 128, dtype="float16", cache_dtype="float8_e4m3fn"),
)

BUCKETS = (
    Bucket("decode", 1, 1),
    Bucket("decode", 4, 4),
    Bucket("decode", 256, 256),
    Bucket("decode", 1024, 1024),
    Bucket("mixed", 16, 8),
    Bucket("mixed", 2048, 256),
    Bucket("mixed", 16384, 8),
    Bucket("mixed", 16384, 1024),
)


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer's products."""

    name: str
    hidden: int
    attended: int  # num_heads * head_dim
    qkv: int
    ffn: int


LAYER_SHAPES = (
    LayerShape("qwen3-0.6b", 1024, 2048, 4096, 3072),
    LayerShape("smollm2-135m", 576, 576, 960, 1536),
    LayerShape("qwen3-1.7b", 2048, 2048, 4096, 6144),
    LayerShape("llama-3.1-8b", 4096, 4096, 6144, 14336),
)


# Rows of products between few and many; what the kernels of 16 to 256 rows are compiled for.
ROW_PRODUCTS = (16, 64, 192, 256)


def layer_stages(
    shape: LayerShape, dtype: Any = jnp.bfloat16, *, has_bias: bool = False, unit_offset: bool = False
) -> dict[str, MatmulStage]:
    """Abstract stages of a layer: qkv; o, gate_up and down, which follow each other."""

    def floats(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def stage(*sizes: int, has_norm: bool = False, **options: Any) -> MatmulStage:
        norm_weight = floats(sizes[-1]) if has_norm else None
        bias = floats(*sizes[:-1]) if has_bias else None
        return MatmulStage(floats(*sizes), norm_weight, bias, eps=1e-6, unit_offset=unit_offset, **options)

    return {
        "qkv": stage(shape.qkv, shape.hidden, has_norm=True),
        "o": stage(shape.hidden, shape.attended, adds_residual=True),
        "gate_up": stage(2, shape.ffn, shape.hidden, has_norm=True, activation="silu"),
        "down": stage(shape.hidden, shape.ffn, adds_residual=True),
    }


@dataclass(frozen=True)
class StepSpecs:
    """Abstract arguments of the ops, [T, ...] first, for one bucket of one model."""

    qkv: jax.ShapeDtypeStruct
    rope: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    norm_weight: jax.ShapeDtypeStruct
    kv_cache: jax.ShapeDtypeStruct
    slot_mapping: jax.ShapeDtypeStruct
    layer: jax.ShapeDtypeStruct
    block_tables: jax.ShapeDtypeStruct
    seq_lens: jax.ShapeDtypeStruct
    query_start_loc: jax.ShapeDtypeStruct
    num_decodes: jax.ShapeDtypeStruct
    num_reqs: jax.ShapeDtypeStruct


def step_specs(
    heads: HeadShape, bucket: Bucket, *, block_size: int = 16, max_model_len: int = 16384, num_blocks: int = 4096
) -> StepSpecs:
    """The arguments of rope_and_write_kv and paged_attention in one bucket."""
    tokens, rows = bucket.num_tokens, bucket.num_rows
    cache_dim, cache_dtype = cache_head_dim(heads.head_dim), heads.cache_dtype or heads.dtype
    table = jax.ShapeDtypeStruct((tokens, heads.head_dim // 2), jnp.float32)

    def floats(*shape: int, dtype: str = heads.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return StepSpecs(
        qkv=floats(tokens, heads.num_kv_heads, heads.num_heads // heads.num_kv_heads + 2, heads.head_dim),
        rope=(table, table),
        norm_weight=floats(heads.head_dim),
        kv_cache=floats(28, num_blocks, 2, heads.num_kv_heads, block_size, cache_dim, dtype=cache_dtype),
        slot_mapping=ints(tokens),
        layer=ints(),
        block_tables=ints(rows, -(-max_model_len // block_size)),
        seq_lens=ints(rows),
        query_start_loc=ints(rows + 1),
        num_decodes=ints(),
        num_reqs=ints(),
    )


def layer_function(heads: HeadShape, bucket: Bucket) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The write and the attention of one layer by the Mosaic kernels, to be traced with layer_specs."""

    def layer(kv_cache, qkv, rope, norm_weight, slot_mapping, layer, *rows):
        norm = HeadNorm(norm_weight, norm_weight, eps=1e-6)
        where = (kv_cache, slot_mapping, layer)
        work = make_attention_work(
            *rows[1:],
            num_tokens=bucket.num_tokens,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=kv_cache.shape[5],
            block_size=kv_cache.shape[4],
            cache_dtype=kv_cache.dtype,
            windows=(heads.sliding_window,),
            kind=bucket.kind,
            backend="mosaic_gpu",
        )
        options = {"sliding_window": heads.sliding_window, "soft_cap": heads.soft_cap}
        options |= {"sinks": jnp.zeros(heads.num_heads) if heads.has_sinks else None, "scale": 0.1}
        to_write = {"rope": rope, "norm": norm, "backend": "mosaic_gpu"}
        if bucket.kind == "decode":
            tables, lens, starts, _, num_reqs = rows
            return rope_write_and_attend(qkv, *where, tables, lens, starts, num_reqs, work, **to_write, **options)
        q, kv_cache = rope_and_write_kv(qkv, *where, **to_write)
        options |= {"kind": bucket.kind, "backend": "mosaic_gpu"}
        return paged_attention(q, kv_cache, layer, *rows, work, **options), kv_cache  # pyright: ignore[reportCallIssue]

    return layer


def layer_specs(heads: HeadShape, bucket: Bucket, *, block_size: int = 16) -> tuple:
    """Arguments of layer_function; the first, the cache, is to be donated."""
    specs = step_specs(heads, bucket, block_size=block_size)
    writing = (specs.kv_cache, specs.qkv, specs.rope, specs.norm_weight, specs.slot_mapping, specs.layer)
    rows = (specs.block_tables, specs.seq_lens, specs.query_start_loc, specs.num_decodes, specs.num_reqs)
    return (*writing, *rows)
