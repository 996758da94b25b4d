"""Norm, rotation, cache write and attention of decode rows in one op, on every backend, against a float64 oracle."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import HeadNorm, LayerSlice, make_attention_work, rope_write_and_attend
from tests.pallas_kernels.attention_cases import AttentionCase, expected_attention, make_case, rounded_case
from tests.pallas_kernels.test_attention import BACKENDS, FP8, SCALE, sinks
from tests.pallas_kernels.test_rope_write import Case, bf16, expected

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Setting:
    """What a test case is made of; `lens` are keys, the new token's included."""

    lens: tuple[int, ...]
    num_kv_heads: int
    group: int
    head_dim: int
    pad_rows: int = 1
    block_size: int = BLOCK_SIZE
    has_norm: bool = True
    unit_offset: bool = False
    has_rope: bool = True
    cache_dtype: Any = None
    options: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "heads of 128": Setting((1, 65), 2, 2, 128, pad_rows=4),
    "heads of 64, groups of 3": Setting((17, 64), 1, 3, 64, pad_rows=0),
    "groups of 7, no norm, blocks of 32": Setting((33, 64), 1, 7, 128, block_size=32, has_norm=False),
    "heads of 256, unit offset": Setting((30,), 1, 2, 256, unit_offset=True),
    "groups of 1": Setting((30, 1), 2, 1, 64, has_rope=False),
    "all options": Setting(
        (150, 66),
        1,
        4,
        128,
        cache_dtype=FP8,
        options={
            "sliding_window": 65,
            "soft_cap": 3.0,
            "sinks": sinks(4),
            "kv_scale": np.array([0.25, 2], np.float32),
        },
    ),
}
# Near another one; the interpreter is slow.
SLOW = {"heads of 64, groups of 3", "groups of 7, no norm, blocks of 32", "heads of 256, unit offset", "groups of 1"}


def to_8_bits(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What an 8-bit cache keeps of x / scale."""
    return np.asarray(jnp.asarray(np.clip(x * (1 / scale), -448, 448), jnp.float32).astype(FP8).astype(jnp.float32))


def make(setting: Setting) -> tuple[AttentionCase, Case, np.ndarray]:
    """Old keys and values, what is new, and the result; the cache is NaN in the slots of new keys as elsewhere."""
    rng = np.random.default_rng(3)
    num_rows, pads = len(setting.lens), setting.pad_rows
    num_heads = setting.num_kv_heads * setting.group
    old = make_case(
        rng,
        [(n - 1, 1) for n in setting.lens],
        num_decodes=num_rows,
        pad_tokens=pads,
        pad_rows=pads,
        num_heads=num_heads,
        num_kv_heads=setting.num_kv_heads,
        head_dim=setting.head_dim,
        block_size=setting.block_size,
        hidden_before=setting.options.get("sliding_window"),
    )
    old = rounded_case(old, jnp.bfloat16, setting.cache_dtype)
    qkv = bf16(rng.standard_normal((num_rows + pads, setting.num_kv_heads, setting.group + 2, setting.head_dim)))
    qkv[num_rows:] = np.nan
    angles = rng.uniform(0, 999, (num_rows + pads, setting.head_dim // 2)).astype(np.float32)
    weights = bf16(rng.uniform(0.2, 2, (2, setting.head_dim)))
    new = Case(
        qkv=qkv,
        kv_cache=old.kv_cache,
        slots=old.slot_mapping,
        rope=(np.cos(angles), np.sin(angles)) if setting.has_rope else None,
        norm=HeadNorm(*weights, eps=1e-3, unit_offset=setting.unit_offset) if setting.has_norm else None,
        num_tokens=num_rows,
    )
    q, *kv = expected(new)
    if setting.cache_dtype is not None:
        kv = [to_8_bits(x, scale) for x, scale in zip(kv, setting.options["kv_scale"], strict=True)]
    history = [
        tuple(np.concatenate([x[:-1], one[row : row + 1]]) for x, one in zip(both, kv, strict=True))
        for row, both in enumerate(old.history)
    ]
    new_kv = dict(zip("kv", kv, strict=True))
    case = replace(old, q=np.concatenate([q, np.zeros((pads, *q.shape[1:]))]), **new_kv, history=history)
    return case, new, expected_attention(case, scale=SCALE, **setting.options)


def run(setting: Setting, case: AttentionCase, new: Case, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """The op on the layer's part of arrays of all layers, which are NaN elsewhere."""
    window = setting.options.get("sliding_window")

    def of_layer(x: Any, layer: jax.Array, dtype: Any) -> LayerSlice:
        stack = jnp.full((len(case.kv_cache), *x.shape), jnp.nan, dtype)
        return LayerSlice(stack.at[case.layer].set(jnp.asarray(x, dtype)), layer)

    def op(qkv, kv_cache, slots, layer, tables, lens, starts, num_reqs):
        work = make_attention_work(
            lens,
            starts,
            num_reqs,
            num_reqs,
            num_tokens=len(qkv),
            num_heads=case.q.shape[1],
            num_kv_heads=setting.num_kv_heads,
            head_dim=setting.head_dim,
            block_size=setting.block_size,
            cache_dtype=kv_cache.dtype,
            windows=(window,),
            kind="decode",
            backend=backend,
        )
        options = {"scale": SCALE, "rope": new.rope, "norm": new.norm, "backend": backend, **setting.options}
        if new.norm is not None:
            weights = [of_layer(w, layer, jnp.bfloat16) for w in (new.norm.q_weight, new.norm.k_weight)]
            options["norm"] = HeadNorm(*weights, eps=new.norm.eps, unit_offset=new.norm.unit_offset)
        if "kv_scale" in options:
            options["kv_scale"] = of_layer(options["kv_scale"], layer, jnp.float32)
        return rope_write_and_attend(qkv, kv_cache, slots, layer, tables, lens, starts, num_reqs, work, **options)

    kv_cache = jnp.asarray(new.kv_cache, setting.cache_dtype or jnp.bfloat16)
    args = (jnp.asarray(new.qkv, jnp.bfloat16), kv_cache, new.slots, case.layer, *case.rows()[:3], case.num_reqs)
    return tuple(np.array(x.astype(jnp.float32)) for x in jax.jit(op)(*args))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SETTINGS])
def test_new_keys_are_seen_and_written_and_nothing_else_changes(name, backend):
    setting = SETTINGS[name]
    case, new, want = make(setting)
    got, cache = run(setting, case, new, backend)
    np.testing.assert_allclose(got, want, atol=6e-3, rtol=2**-7)
    assert not got[case.num_tokens :].any(), "pad tokens must give zeros"
    block, offset = np.divmod(new.slots[: case.num_tokens], setting.block_size)
    last_bit = 2.0**-7 if setting.cache_dtype is None else 2.0**-3
    written = cache[case.layer, block, :, :, offset]  # [T, 2, K, H]
    for kv, expected_kv in enumerate((case.k, case.v)):
        largest = np.abs(expected_kv).max(axis=-1, keepdims=True)
        unit = last_bit * np.maximum(np.abs(expected_kv), largest / 2)
        assert (np.abs(written[:, kv] - expected_kv) <= unit).all()
        assert np.mean(written[:, kv] != expected_kv) < 0.01
    cache[case.layer, block, :, :, offset] = np.nan
    np.testing.assert_array_equal(cache[:, 1:], new.kv_cache[:, 1:].astype(np.float32))


def test_a_step_without_work_lists_says_where_they_come_from():
    setting = SETTINGS["heads of 64, groups of 3"]
    case, new, _ = make(setting)
    call = partial(rope_write_and_attend, scale=1.0, backend="mosaic_gpu_interpret")
    with pytest.raises(ValueError, match="work=None, expected what make_attention_work returns"):
        call(*(jnp.asarray(x) for x in (new.qkv, new.kv_cache, new.slots, case.layer, *case.rows()[:3], case.num_reqs)))
