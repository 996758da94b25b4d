"""The Mosaic GPU kernels in the CPU interpreter against the float64 oracle, with NaN in all that must not be read."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import make_attention_work, paged_attention, rope_and_write_kv, unsupported_reason
from pallas_kernels.mosaic import attend
from pallas_kernels.tuning import INTERPRET, AttentionConfig
from pallas_kernels.work_lists import cut_attention_work
from tests.pallas_kernels.attention_cases import AttentionCase, expected_attention, make_case, merge_qkv

SCALE = 0.17
BACKEND = "mosaic_gpu_interpret"


def bf16_case(rng: np.random.Generator, requests: list[tuple[int, int]], **sizes) -> AttentionCase:
    """A case whose numbers are exact in bfloat16, and NaN in the q of pad tokens too."""
    case = make_case(rng, requests, **sizes)
    case.q[case.num_tokens :] = np.nan
    rounded = {
        name: getattr(case, name).astype(jnp.bfloat16).astype(np.float32) for name in ("q", "k", "v", "kv_cache")
    }
    history = [tuple(x.astype(jnp.bfloat16).astype(np.float32) for x in kv) for kv in case.history]
    return AttentionCase(**{**vars(case), **rounded, "history": history})


def run(case: AttentionCase, kind: str, config: AttentionConfig | None = None) -> np.ndarray:
    """Attention through the public functions, or with a configuration of its own; the reference writes the cache."""
    block_size = case.kv_cache.shape[4]
    sizes = {"num_tokens": len(case.q), "num_heads": case.q.shape[1], "num_kv_heads": case.k.shape[1], "kind": kind}

    def public(q, k, v, kv_cache, slot_mapping, layer, *rows):
        q, kv_cache = rope_and_write_kv(merge_qkv(q, k, v), kv_cache, slot_mapping, layer)
        work = make_attention_work(*rows[1:], **sizes, block_size=block_size, backend=BACKEND)
        return paged_attention(q, kv_cache, layer, *rows, work, scale=SCALE, kind=kind, backend=BACKEND)

    def configured(q, k, v, kv_cache, slot_mapping, layer, *rows):
        q, kv_cache = rope_and_write_kv(merge_qkv(q, k, v), kv_cache, slot_mapping, layer)
        work = cut_attention_work(*rows[1:], **sizes, config=config)
        return attend(q, kv_cache, layer, *rows[:3], work, scale=SCALE, config=config, interpret=True)

    floats = [jnp.asarray(x, jnp.bfloat16) for x in (case.q, case.k, case.v, case.kv_cache)]
    function = jax.jit(configured if config else public)
    return np.asarray(function(*floats, case.slot_mapping, case.layer, *case.rows()), np.float32)


def assert_matches(case: AttentionCase, got: np.ndarray) -> None:
    expected = expected_attention(case, scale=SCALE)
    np.testing.assert_allclose(got, expected, atol=6e-3, rtol=2**-7)  # p and the result are rounded to bfloat16
    assert not got[case.num_tokens :].any(), "pad tokens must give zeros"


DECODES = [(69, 1), (0, 1), (129, 1), (199, 1), (63, 1)]
MIXED = [(9, 1), (150, 1), (50, 29), (0, 5), (61, 41)]
# group sizes 1, 2, 3, 4, 7, 8 and both head sizes: (num_heads, num_kv_heads, head_dim)
HEADS = [(2, 2, 64), (2, 1, 128), (6, 2, 64), (4, 1, 64), (7, 1, 128), (8, 1, 64)]


def test_decode_matches_the_oracle_and_pads_cost_no_item():
    sizes = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    case = bf16_case(np.random.default_rng(1), DECODES, num_decodes=5, pad_tokens=6, pad_rows=6, **sizes)
    assert_matches(case, run(case, "decode"))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_mixed_matches_the_oracle_for_every_group_size(num_heads, num_kv_heads, head_dim):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    case = bf16_case(np.random.default_rng(2), MIXED, num_decodes=2, pad_tokens=13, pad_rows=2, **sizes)
    assert_matches(case, run(case, "mixed"))


@pytest.mark.parametrize("block_size", [32, 128])
def test_larger_blocks(block_size):
    sizes = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "block_size": block_size}
    case = bf16_case(np.random.default_rng(3), [(140, 1), (129, 11)], num_decodes=1, pad_tokens=1, **sizes)
    assert_matches(case, run(case, "mixed"))


def test_one_row_alone():
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    case = bf16_case(np.random.default_rng(4), [(200, 1)], num_decodes=1, **sizes)
    assert_matches(case, run(case, "decode"))


def test_one_token_alone_in_a_mixed_step():
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    case = bf16_case(np.random.default_rng(5), [(0, 1)], pad_tokens=1, **sizes)
    assert_matches(case, run(case, "mixed"))


def test_a_mixed_step_may_hold_decode_rows_only():
    case = bf16_case(
        np.random.default_rng(6), [(70, 1)], num_decodes=1, pad_tokens=3, pad_rows=1, num_heads=2, head_dim=64
    )
    assert_matches(case, run(case, "mixed"))


@pytest.mark.parametrize(("num_ctas", "copy_warps"), [(1, 1), (29, 2)])
def test_any_cut_of_the_line_gives_the_same_result(num_ctas, copy_warps):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    case = bf16_case(np.random.default_rng(7), DECODES, num_decodes=5, pad_tokens=2, pad_rows=2, **sizes)
    decode = replace(INTERPRET.decode, num_ctas=num_ctas, num_small_ctas=num_ctas // 2, copy_warps=copy_warps)
    assert_matches(case, run(case, "decode", replace(INTERPRET, decode=decode)))


def test_taking_turns_on_the_tensor_cores_and_two_copying_warps_change_nothing():
    case = bf16_case(np.random.default_rng(8), MIXED, num_decodes=2, num_heads=4, num_kv_heads=1, head_dim=64)
    prefill = replace(INTERPRET.prefill, pingpong=not INTERPRET.prefill.pingpong, copy_warps=2, num_ctas=3)
    assert_matches(case, run(case, "mixed", replace(INTERPRET, prefill=prefill)))


def test_a_larger_bucket_changes_nothing():
    sizes = {"num_decodes": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 64}
    requests = [(9, 1), (70, 1), (61, 41)]
    small = bf16_case(np.random.default_rng(9), requests, **sizes)
    large = bf16_case(np.random.default_rng(9), requests, pad_tokens=141, pad_rows=9, **sizes)
    large = AttentionCase(**{**vars(large), "q": np.concatenate([small.q, large.q[small.num_tokens :]])})
    got = run(large, "mixed")
    np.testing.assert_array_equal(run(small, "mixed"), got[: small.num_tokens])
    assert not got[small.num_tokens :].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"sliding_window": 4096}, None),
        ({"sliding_window": 4095}, "sliding_window=4095 is shorter than max_model_len=4096"),
        ({"soft_cap": 30.0}, "soft_cap=30.0"),
        ({"dtype": jnp.float32}, "float32"),
        ({"head_dim": 96}, "head_dim=96"),
        ({"num_heads": 72}, "9 query heads a kv head"),
        ({"block_size": 8}, "block_size=8"),
    ],
)
def test_what_has_no_kernel_is_named(change, reason):
    model = {"dtype": jnp.bfloat16, "head_dim": 64, "num_heads": 16, "num_kv_heads": 8, "block_size": 16}
    got = unsupported_reason(**{**model, "max_model_len": 4096, **change})
    assert (got is None) if reason is None else (reason in got)


def test_attention_without_a_kernel_raises_and_says_what_to_use():
    case = bf16_case(np.random.default_rng(11), [(0, 5)], num_heads=2, head_dim=16)
    with pytest.raises(NotImplementedError, match=r"head_dim=16, only \(64, 128\) .*; use backend 'reference'"):
        run(case, "mixed")
