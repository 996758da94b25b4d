"""The Mosaic GPU kernels beside what every backend must do: their configurations, and what they do not serve."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cache_head_dim, rope_and_write_kv, unsupported_reason
from pallas_kernels.mosaic_attention import attend
from pallas_kernels.tuning import INTERPRET, AttentionConfig, attention_config
from pallas_kernels.work_lists import cut_attention_work
from tests.pallas_kernels.attention_cases import expected_attention, merge_qkv
from tests.pallas_kernels.test_attention import DECODES, SCALE, Setting


def check(setting: Setting, config: AttentionConfig) -> None:
    """As Setting.check, with a configuration of its own."""
    case = setting.make()
    sizes = {"num_tokens": len(case.q), "num_heads": setting.num_heads, "num_kv_heads": setting.num_kv_heads}

    def configured(q, k, v, kv_cache, slot_mapping, layer, *rows):
        q, kv_cache = rope_and_write_kv(merge_qkv(q, k, v), kv_cache, slot_mapping, layer)
        work = cut_attention_work(*rows[1:], **sizes, kind=setting.kind, config=config)
        return attend(q, kv_cache, layer, *rows[:3], work, scale=SCALE, config=config, interpret=True)

    floats = [jnp.asarray(x, jnp.bfloat16) for x in (case.q, case.k, case.v, case.kv_cache)]
    got = np.asarray(jax.jit(configured)(*floats, case.slot_mapping, case.layer, *case.rows()), np.float32)
    np.testing.assert_allclose(got, expected_attention(case, scale=SCALE), atol=6e-3, rtol=2**-7)


@pytest.mark.parametrize("num_ctas", [pytest.param(1, marks=pytest.mark.slow), 29])
def test_any_cut_of_the_line_gives_the_same_result(num_ctas):
    decode = replace(INTERPRET.decode, num_ctas=num_ctas, stages=3)
    check(Setting(DECODES, 4, 2, kind="decode", num_decodes=5, pads=(2, 2)), replace(INTERPRET, decode=decode))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"cache_dtype": jnp.float8_e4m3fn}, None),
        ({"dtype": jnp.float16, "head_dim": 80}, None),
        ({"dtype": jnp.float32}, "float32"),
        ({"cache_dtype": jnp.float16}, "a float16 cache for bfloat16"),
        ({"head_dim": 288}, "head_dim=288"),
        ({"head_dim": 72}, "head_dim=72"),
        ({"num_heads": 136}, "17 query heads a kv head"),
        ({"block_size": 8}, "block_size=8"),
        ({"block_size": 128, "head_dim": 256}, "block_size=128 with heads of 256"),
    ],
)
def test_what_has_no_kernel_is_named(change, reason):
    model = {"dtype": jnp.bfloat16, "head_dim": 64, "num_heads": 16, "num_kv_heads": 8, "block_size": 16}
    got = unsupported_reason(**{**model, **change})
    assert (got is None) if reason is None else (reason in got)


def test_attention_without_a_kernel_raises_and_says_what_to_use():
    setting = Setting([(0, 5)], 2, 1, head_dim=24)
    with pytest.raises(NotImplementedError, match=r"head_dim=24, only multiples of 16 .*; use backend 'reference'"):
        setting.run(setting.make(), "mosaic_gpu_interpret")


def test_small_heads_are_padded_in_the_cache():
    assert [cache_head_dim(size) for size in (64, 80, 96, 128, 192, 256, 300)] == [64, 128, 128, 128, 256, 256, 300]


@pytest.mark.parametrize("cache_bytes", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_rows", [8, 256])
def test_about_the_same_bytes_are_in_flight_whatever_the_cache_is(num_rows, block_size, head_dim, cache_bytes):
    sizes = {"num_rows": num_rows, "block_size": block_size, "head_dim": head_dim, "cache_bytes": cache_bytes}
    decode = attention_config(interpret=False, **sizes).decode
    ring_bytes = decode.stages * 2 * decode.tile * head_dim * cache_bytes
    assert ring_bytes * decode.num_ctas // 128 == 128 * 1024
