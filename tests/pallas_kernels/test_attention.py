"""Paged attention on every backend against a float64 oracle, with NaN in all that must not be read."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    LayerSlice,
    cache_head_dim,
    make_attention_work,
    paged_attention,
    rope_and_write_kv,
    rope_write_and_attend,
)
from tests.pallas_kernels.attention_cases import AttentionCase, expected_attention, make_case, merge_qkv, rounded_case

SCALE = 0.17
BACKENDS = ["reference", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
DECODES = [(69, 1), (0, 1), (129, 1), (199, 1), (63, 1)]
MIXED = [(9, 1), (150, 1), (50, 29), (0, 5), (61, 41)]
SHORT = [(9, 1), (70, 1), (50, 19)]
FEW = [(70, 1), (50, 19)]
FP8 = jnp.float8_e4m3fn
# Of an element of the result, which is rounded to dtype, as its P is.
TOLERANCE = {jnp.bfloat16: 2**-7, jnp.float16: 2**-10}


@dataclass(frozen=True)
class Setting:
    """What a test case is made of."""

    requests: list[tuple[int, int]]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    block_size: int = 16
    kind: str = "mixed"
    num_decodes: int = 2
    pads: tuple[int, int] = (13, 2)  # tokens, rows
    dtype: Any = jnp.bfloat16
    cache_dtype: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, seed: int = 1) -> AttentionCase:
        pad_tokens, pad_rows = self.pads
        case = make_case(
            np.random.default_rng(seed),
            self.requests,
            num_decodes=self.num_decodes,
            pad_tokens=pad_tokens,
            pad_rows=pad_rows,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            hidden_before=self.options.get("sliding_window"),
        )
        return rounded_case(case, self.dtype, self.cache_dtype)

    def run(self, case: AttentionCase, backend: str) -> np.ndarray:
        """In a decode bucket one op writes and attends. In a mixed one the reference writes, with scales of 1."""
        cache_dim = self.head_dim if backend == "reference" else cache_head_dim(self.head_dim)
        kv_cache = np.pad(case.kv_cache, [(0, 0)] * 5 + [(0, cache_dim - self.head_dim)])
        window = self.options.get("sliding_window")

        def both(q, k, v, kv_cache, slot_mapping, layer, *rows):
            to_write = (merge_qkv(q, k, v), kv_cache, slot_mapping, layer)
            work = make_attention_work(
                *rows[1:],
                num_tokens=len(q),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=cache_dim,
                block_size=self.block_size,
                cache_dtype=kv_cache.dtype,
                windows=(None, window) if window else (None,),
                kind=self.kind,
                backend=backend,
            )
            options = {"scale": SCALE, "backend": backend, **self.options}
            if "kv_scale" in options:  # among those of all layers
                scales = jnp.full((len(kv_cache), 2), jnp.nan).at[case.layer].set(options["kv_scale"])
                options["kv_scale"] = LayerSlice(scales, layer)
            if self.kind == "decode":
                return rope_write_and_attend(*to_write, *rows[:3], rows[4], work, **options)[0]
            q, kv_cache = rope_and_write_kv(*to_write)
            return paged_attention(q, kv_cache, layer, *rows, work, **options, kind=self.kind)

        floats = [jnp.asarray(x, self.dtype) for x in (case.q, case.k, case.v)]
        floats.append(jnp.asarray(kv_cache, self.cache_dtype or self.dtype))
        return np.asarray(jax.jit(both)(*floats, case.slot_mapping, case.layer, *case.rows()), np.float32)

    def check(self, backend: str) -> None:
        case = self.make()
        got, expected = self.run(case, backend), expected_attention(case, scale=SCALE, **self.options)
        tolerance = TOLERANCE[self.dtype]
        np.testing.assert_allclose(got, expected, atol=tolerance * 0.75, rtol=tolerance)
        assert not got[case.num_tokens :].any(), "pad tokens must give zeros"


def sinks(num_heads: int) -> np.ndarray:
    return np.linspace(-1, 3, num_heads).astype(np.float32)


SETTINGS = {
    "decode rows, pad rows": Setting(DECODES, 9, 3, kind="decode", num_decodes=5, pads=(6, 6)),
    "one row alone": Setting([(200, 1)], 4, 2, kind="decode", num_decodes=1, pads=(0, 0)),
    "one token in a mixed step": Setting([(0, 1)], 2, 1, num_decodes=0, pads=(1, 0)),
    "decode rows only in a mixed step": Setting([(70, 1)], 2, 2, num_decodes=1, pads=(3, 1)),
    "groups of 1": Setting(MIXED, 2, 2),
    "groups of 2, heads of 128": Setting(FEW, 2, 1, 128, num_decodes=1),
    "groups of 3": Setting(SHORT, 3, 1),
    "groups of 7, heads of 128": Setting(FEW, 7, 1, 128, num_decodes=1),
    "groups of 8": Setting(SHORT, 8, 1),
    "groups of 12": Setting(FEW, 12, 1, num_decodes=1),
    "groups of 16": Setting(FEW, 16, 1, num_decodes=1),
    "heads of 96": Setting(FEW, 1, 1, 96, num_decodes=1),
    "heads of 256": Setting([(30, 1), (40, 19)], 1, 1, 256, num_decodes=1),
    "blocks of 128": Setting([(140, 1), (30, 11)], 2, 1, block_size=128, num_decodes=1, pads=(1, 0)),
    "float16, blocks of 64": Setting(FEW, 4, 2, block_size=64, dtype=jnp.float16, num_decodes=1),
    "8-bit cache, heads of 80": Setting(
        FEW, 2, 1, 80, cache_dtype=FP8, num_decodes=1, options={"kv_scale": np.float32([0.5, 3])}
    ),
    "8-bit cache, float16": Setting(FEW, 2, 1, 128, cache_dtype=FP8, dtype=jnp.float16, num_decodes=1),
    "maxima that jump": Setting(  # by more than prefill's MAX_GROWTH in some rows of some tiles, and by less in others
        [(150, 1), (170, 29)], 2, 1, cache_dtype=FP8, num_decodes=1, options={"kv_scale": np.float32([12, 1])}
    ),
    "window shorter than a tile": Setting([(150, 1), (200, 70)], 2, 1, num_decodes=1, options={"sliding_window": 37}),
    "window of two tiles": Setting([(200, 70)], 1, 1, num_decodes=0, options={"sliding_window": 139}),
    "window of one key": Setting(
        [(140, 1), (60, 19)], 2, 1, num_decodes=1, options={"sliding_window": 1, "sinks": sinks(2)}
    ),
    "window shorter than a block": Setting(
        [(140, 1), (130, 11)], 5, 1, block_size=128, num_decodes=1, options={"sliding_window": 5}
    ),
    "lengths of whole blocks and tiles": Setting(
        [(63, 1), (15, 1), (64, 64), (0, 16)], 2, 1, pads=(0, 0), options={"sliding_window": 64}
    ),
    "soft cap": Setting(SHORT, 4, 2, options={"soft_cap": 1.5}),
    "sinks, blocks of 32": Setting(SHORT, 6, 2, block_size=32, options={"sinks": sinks(6)}),
    "sinks, odd heads": Setting(DECODES, 3, 3, kind="decode", num_decodes=5, pads=(0, 0), options={"sinks": sinks(3)}),
    "all options": Setting(
        [(200, 1), (150, 1), (50, 29)],
        5,
        1,
        cache_dtype=FP8,
        options={
            "sliding_window": 90,
            "soft_cap": 3.0,
            "sinks": sinks(5),
            "kv_scale": np.array([2, 0.25], np.float32),
        },
    ),
}


# Near another one; the interpreter is slow.
SLOW = {
    "groups of 1", "groups of 8", "groups of 12", "8-bit cache, float16", "maxima that jump", "window of one key",
    "window shorter than a block", "lengths of whole blocks and tiles",
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SETTINGS])
def test_results_match_the_oracle_with_nan_in_all_that_is_not_visible(name, backend):
    SETTINGS[name].check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_larger_bucket_changes_nothing(backend):
    small, large = (Setting([(9, 1), (70, 1), (21, 41)], 4, 1, pads=pads) for pads in ((0, 0), (85, 5)))
    case, padded = small.make(), large.make()
    padded = AttentionCase(**{**vars(padded), "q": np.concatenate([case.q, padded.q[case.num_tokens :]])})
    got = large.run(padded, backend)
    np.testing.assert_array_equal(small.run(case, backend), got[: case.num_tokens])
    assert not got[case.num_tokens :].any()


@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu_interpret"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "prefill"}, "kind='prefill' must be one of"),
        ({"kind": "decode"}, "decode: 5 rows but"),
        ({"q": np.zeros((9, 5, 64), np.float32)}, "num_heads=5 must be a multiple of num_kv_heads=2"),
        ({"q": np.zeros((300, 6, 72), np.float32)}, "q has head_dim 72, the cache 64"),
        ({"seq_lens": np.zeros(5, np.int16)}, "seq_lens has dtype int16"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be above 0"),
        ({"sinks": np.zeros(3)}, r"sinks must have shape \(6,\)"),
        ({"kv_scale": np.ones(2)}, "kv_scale is for a float8_e4m3fn cache, this one is float32"),
        ({"backend": "triton"}, "backend='triton' must be one of"),
    ],
)
def test_arguments_that_disagree_are_named(change, message, backend):
    case = make_case(np.random.default_rng(9), MIXED, num_decodes=2, head_dim=64)
    names = ("q", "kv_cache", "layer", "block_tables", "seq_lens", "query_start_loc", "num_decodes", "num_reqs")
    kwargs = {**{n: getattr(case, n) for n in names}, "kind": "mixed", "scale": 1.0, "backend": backend, **change}
    with pytest.raises(ValueError, match=message):
        paged_attention(**kwargs)
