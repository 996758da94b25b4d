"""The Mosaic GPU kernels lower for CUDA, on any machine, at the shapes of real models and buckets.

Mosaic checks layouts and the 227 KiB of shared memory while it lowers.
"""

import re

import jax
import pytest

from pallas_kernels import HeadNorm, make_attention_work, paged_attention, rope_and_write_kv
from pallas_kernels.arg_specs import BUCKETS, HEAD_SHAPES, Bucket, HeadShape, step_specs

KERNEL = re.compile(r"stablehlo\.custom_call @mosaic_gpu\w*\(%")


def lower_layer(heads: HeadShape, bucket: Bucket, block_size: int) -> str:
    """The write and the attention of one layer, the cache donated."""

    def layer(kv_cache, qkv, rope, norm_weight, slot_mapping, layer, *rows):
        norm = HeadNorm(norm_weight, norm_weight, eps=1e-6)
        where = (kv_cache, slot_mapping, layer)
        q, kv_cache = rope_and_write_kv(qkv, *where, rope=rope, norm=norm, backend="mosaic_gpu")
        sizes = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "block_size": block_size}
        sizes["head_dim"] = heads.head_dim
        options = {"kind": bucket.kind, "backend": "mosaic_gpu"}
        work = make_attention_work(*rows[1:], num_tokens=bucket.num_tokens, **sizes, **options)
        return paged_attention(q, kv_cache, layer, *rows, work, scale=0.1, **options), kv_cache

    specs = step_specs(heads, bucket, block_size=block_size)
    args = (specs.kv_cache, specs.qkv, specs.rope, specs.norm_weight, specs.slot_mapping, specs.layer)
    rows = (specs.block_tables, specs.seq_lens, specs.query_start_loc, specs.num_decodes, specs.num_reqs)
    return jax.jit(layer, donate_argnums=0).trace(*args, *rows).lower(lowering_platforms=("cuda",)).as_text()


def assert_lowers(heads: HeadShape, bucket: Bucket, block_size: int) -> None:
    """A decode bucket holds the write and one attention kernel, a mixed one the prefill kernel besides."""
    text = lower_layer(heads, bucket, block_size)
    assert len(KERNEL.findall(text)) == (2 if bucket.kind == "decode" else 3)


LLAMA = HEAD_SHAPES[1]
MIXED = Bucket("mixed", 2048, 256)


@pytest.mark.parametrize("heads", HEAD_SHAPES[:6], ids=lambda heads: heads.name)
def test_the_kernels_lower_for_the_heads_of_every_model(heads):
    assert_lowers(heads, MIXED, 16)


@pytest.mark.parametrize(
    "bucket", [Bucket("decode", 1, 1), Bucket("decode", 1024, 1024), Bucket("mixed", 16384, 1024)], ids=str
)
def test_the_kernels_lower_for_the_smallest_and_the_largest_bucket(bucket):
    assert bucket in BUCKETS
    assert_lowers(LLAMA, bucket, 16)


@pytest.mark.parametrize("block_size", [64, 128])
def test_the_kernels_lower_for_larger_blocks(block_size):
    assert_lowers(LLAMA, MIXED, block_size)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@pytest.mark.parametrize("heads", HEAD_SHAPES, ids=lambda heads: heads.name)
def test_the_kernels_lower_for_every_model_bucket_and_block(heads, bucket, block_size):
    assert_lowers(heads, bucket, block_size)
