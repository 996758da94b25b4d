"""What only the XLA reference can do: float32, heads and blocks of any size, a window that is an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, rope_and_write_kv
from tests.pallas_kernels.attention_cases import AttentionCase, expected_attention, make_case, merge_qkv

SCALE = 0.31


def run(case: AttentionCase, kind: str, **options) -> np.ndarray:
    def both_ops(q, k, v, kv_cache, slot_mapping, layer, *rows):
        q, kv_cache = rope_and_write_kv(merge_qkv(q, k, v), kv_cache, slot_mapping, layer)
        return paged_attention(q, kv_cache, layer, *rows, scale=SCALE, kind=kind, **options)

    floats = [jnp.asarray(x, jnp.float32) for x in (case.q, case.k, case.v, case.kv_cache)]
    return np.asarray(jax.jit(both_ops)(*floats, case.slot_mapping, case.layer, *case.rows()), np.float32)


def assert_matches(case: AttentionCase, kind: str, **options) -> None:
    got = run(case, kind, **options)
    expected = expected_attention(case, scale=SCALE, **options)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    assert not got[case.num_tokens :].any(), "pad tokens must give zeros"


DECODES = [(0, 1), (15, 1), (16, 1), (130, 1), (17, 1), (256, 1), (127, 1)]
MIXED = [(5, 1), (200, 1), (0, 131), (31, 1), (140, 67), (0, 3), (1, 64)]
OPTIONS = [
    {},
    {"sliding_window": 7},
    {"sliding_window": 139},
    {"soft_cap": 1.5},
    {"soft_cap": 3.0, "sliding_window": 37, "sinks": np.linspace(-2, 3, 6, dtype=np.float32)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_matches_the_oracle_in_float32(options):
    window = options.get("sliding_window")
    case = make_case(np.random.default_rng(1), DECODES, pad_tokens=4, pad_rows=4, num_decodes=7, hidden_before=window)
    assert_matches(case, "decode", **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mixed_matches_the_oracle_in_float32(options):
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


def test_a_window_given_as_an_array_equals_the_static_one():
    case = make_case(np.random.default_rng(6), MIXED, num_decodes=2)
    static, traced = run(case, "mixed", sliding_window=37), run(case, "mixed", sliding_window=jnp.int32(37))
    np.testing.assert_array_equal(static, traced)
