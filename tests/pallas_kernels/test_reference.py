"""The XLA reference against a float64 oracle: nothing that must not be read may reach an output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, rope_and_write_kv
from tests.pallas_kernels.attention_cases import AttentionCase, expected_attention, make_case, merge_qkv

SCALE = 0.31


def run(case: AttentionCase, kind: str, dtype: jnp.dtype = jnp.float32, **options) -> np.ndarray:
    def both_ops(q, k, v, kv_cache, slot_mapping, layer, *rows):
        q, kv_cache = rope_and_write_kv(merge_qkv(q, k, v), kv_cache, slot_mapping, layer)
        return paged_attention(q, kv_cache, layer, *rows, scale=SCALE, kind=kind, **options)

    floats = [jnp.asarray(x, dtype) for x in (case.q, case.k, case.v, case.kv_cache)]
    return np.asarray(jax.jit(both_ops)(*floats, case.slot_mapping, case.layer, *case.rows()), np.float32)


def assert_matches(case: AttentionCase, kind: str, *, tolerance: float = 1e-5, dtype=jnp.float32, **options) -> None:
    got = run(case, kind, dtype, **options)
    expected = expected_attention(case, scale=SCALE, **options)
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=tolerance)
    assert not got[case.num_tokens :].any(), "pad tokens must give zeros"


DECODES = [(0, 1), (15, 1), (16, 1), (130, 1), (17, 1), (256, 1), (127, 1)]
MIXED = [(5, 1), (200, 1), (0, 131), (31, 1), (140, 67), (0, 3), (1, 64)]
OPTIONS = [
    {},
    {"sliding_window": 7},
    {"sliding_window": 139},
    {"soft_cap": 1.5},
    {"soft_cap": 3.0, "sliding_window": 37},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_matches_the_oracle_with_nan_in_all_that_is_not_visible(options):
    window = options.get("sliding_window")
    case = make_case(np.random.default_rng(1), DECODES, pad_tokens=4, pad_rows=4, num_decodes=7, hidden_before=window)
    assert_matches(case, "decode", **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mixed_matches_the_oracle_with_nan_in_all_that_is_not_visible(options):
    window = options.get("sliding_window")
    case = make_case(np.random.default_rng(2), MIXED, pad_tokens=53, pad_rows=2, num_decodes=2, hidden_before=window)
    assert_matches(case, "mixed", **options)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"), [(7, 1, 8, 8), (5, 5, 24, 32), (12, 3, 64, 256)]
)
def test_heads_and_blocks_of_any_size(num_heads, num_kv_heads, head_dim, block_size):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    rng = np.random.default_rng(3)
    assert_matches(make_case(rng, [(33, 1), (70, 29), (0, 2)], num_decodes=1, **sizes), "mixed")
    assert_matches(make_case(rng, [(33, 1), (300, 1)], num_decodes=2, **sizes), "decode")


def test_a_step_without_decode_rows_and_one_without_prefill_rows():
    rng = np.random.default_rng(4)
    assert_matches(make_case(rng, [(0, 19)], pad_tokens=1), "mixed")
    assert_matches(make_case(rng, [(8, 1), (3, 1)], num_decodes=2, pad_tokens=3, pad_rows=1), "mixed")


def test_bfloat16_accumulates_in_float32():
    case = make_case(np.random.default_rng(5), MIXED, num_decodes=2)
    rounded = {
        name: getattr(case, name).astype(jnp.bfloat16).astype(np.float32) for name in ("q", "k", "v", "kv_cache")
    }
    history = [tuple(x.astype(jnp.bfloat16).astype(np.float32) for x in kv) for kv in case.history]
    case = AttentionCase(**{**vars(case), **rounded, "history": history})
    assert_matches(case, "mixed", dtype=jnp.bfloat16, tolerance=2**-8)  # half a unit in the last place of the result


def test_a_window_given_as_an_array_equals_the_static_one():
    case = make_case(np.random.default_rng(6), MIXED, num_decodes=2)
    static, traced = run(case, "mixed", sliding_window=37), run(case, "mixed", sliding_window=jnp.int32(37))
    np.testing.assert_array_equal(static, traced)


def test_a_larger_bucket_changes_nothing():
    small = make_case(np.random.default_rng(7), MIXED, num_decodes=2)
    large = make_case(np.random.default_rng(7), MIXED, num_decodes=2, pad_tokens=241, pad_rows=9)
    large = AttentionCase(**{**vars(large), "q": np.concatenate([small.q, large.q[small.num_tokens :]])})
    np.testing.assert_array_equal(run(small, "mixed"), run(large, "mixed")[: small.num_tokens])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "prefill"}, "kind='prefill' must be one of"),
        ({"kind": "decode"}, "decode: 7 rows but"),
        ({"q": np.zeros((9, 5, 16), np.float32)}, "num_heads=5 must be a multiple of num_kv_heads=2"),
        ({"q": np.zeros((300, 6, 12), np.float32)}, "head_dim 12"),
        ({"seq_lens": np.zeros(7, np.int16)}, "seq_lens has dtype int16"),
        ({"backend": "triton"}, "backend='triton' must be one of"),
    ],
)
def test_arguments_that_disagree_are_named(change, message):
    case = make_case(np.random.default_rng(9), MIXED, num_decodes=2)
    names = ("q", "kv_cache", "layer", "block_tables", "seq_lens", "query_start_loc", "num_decodes", "num_reqs")
    kwargs = {**{n: getattr(case, n) for n in names}, "kind": "mixed", "scale": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        paged_attention(**kwargs)
