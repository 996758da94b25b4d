"""The Mosaic GPU kernels lower for CUDA, on any machine, at the shapes of real models and buckets.

Mosaic checks layouts and the 227 KiB of shared memory while it lowers. scripts/compile_for_h200.py goes on from here.
"""

import re

import jax
import pytest

from pallas_kernels import FEW_ROWS
from pallas_kernels.arg_specs import BUCKETS, HEAD_SHAPES, Bucket, HeadShape, layer_function, layer_specs
from pallas_kernels.mosaic_attention import unsupported_reason

KERNEL = re.compile(r"stablehlo\.custom_call @mosaic_gpu\w*\(%")
LLAMA = HEAD_SHAPES[1]
# Write and attention are two kernels where heads are padded in the cache, or too many of a group to fit beside its key.
SEPARATE = ("phi-2", "phi-3-mini", "glm-4-9b", "falcon-like 12 of 128", "gemma-3-1b fp8")
MIXED = Bucket("mixed", 2048, 256)


def assert_lowers(heads: HeadShape, bucket: Bucket, block_size: int = 16) -> None:
    """A mixed bucket holds the write and two attention kernels, one of few decode rows one that writes and attends."""
    traced = jax.jit(layer_function(heads, bucket), donate_argnums=0).trace(
        *layer_specs(heads, bucket, block_size=block_size)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    num_of_decode = 2 if heads.name in SEPARATE or bucket.num_rows > FEW_ROWS else 1
    assert len(KERNEL.findall(text)) == (3 if bucket.kind == "mixed" else num_of_decode)


@pytest.mark.parametrize("heads", HEAD_SHAPES, ids=lambda heads: heads.name)
def test_the_kernels_lower_for_the_heads_of_every_model(heads):
    assert_lowers(heads, MIXED)


@pytest.mark.parametrize("name", ["qwen3-0.6b fp8", "smollm2-135m", "glm-4-9b"])
def test_a_bucket_of_few_decode_rows_has_one_kernel_where_a_group_fits_beside_its_key(name):
    assert_lowers(next(heads for heads in HEAD_SHAPES if heads.name == name), Bucket("decode", 8, 8))


@pytest.mark.parametrize("bucket", [bucket for bucket in BUCKETS if bucket != MIXED], ids=str)
def test_the_kernels_lower_for_every_bucket(bucket):
    assert_lowers(LLAMA, bucket)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_the_kernels_lower_for_larger_blocks(block_size):
    assert_lowers(LLAMA, MIXED, block_size)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@pytest.mark.parametrize("heads", HEAD_SHAPES, ids=lambda heads: heads.name)
def test_the_kernels_lower_for_every_model_bucket_and_block(heads, bucket, block_size):
    sizes = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "block_size": block_size}
    reason = unsupported_reason(dtype=heads.dtype, head_dim=heads.head_dim, **sizes)
    if reason is not None:
        with pytest.raises(NotImplementedError, match=r"block_size=128 with heads of 256"):
            assert_lowers(heads, bucket, block_size)
        return
    assert_lowers(heads, bucket, block_size)
