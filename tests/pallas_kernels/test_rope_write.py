"""The norm, rotation and KV write of merged qkv, on every backend, against a float64 oracle."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import HeadNorm, LayerSlice, cache_head_dim, rope_and_write_kv

KERNELS = ("mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu))
BACKENDS = ("reference", *KERNELS)
NUM_BLOCKS, BLOCK_SIZE, LAYER = 7, 16, 1


def bf16(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@dataclass(frozen=True)
class Case:
    """Arguments as NumPy; the cache and the last `pad_tokens` tokens are NaN."""

    qkv: np.ndarray  # [T, K, G + 2, H]
    kv_cache: np.ndarray  # [3, NUM_BLOCKS, 2, K, BLOCK_SIZE, H]
    slots: np.ndarray  # i32[T]
    rope: tuple[np.ndarray, np.ndarray] | None
    norm: HeadNorm | None
    num_tokens: int

    def run(self, backend: str) -> tuple[np.ndarray, np.ndarray]:
        as_bf16 = partial(jnp.asarray, dtype=jnp.bfloat16)
        norm = self.norm and replace(
            self.norm, q_weight=as_bf16(self.norm.q_weight), k_weight=as_bf16(self.norm.k_weight)
        )
        args = (as_bf16(self.qkv), as_bf16(self.kv_cache), self.slots, jnp.int32(LAYER))
        got = jax.jit(partial(rope_and_write_kv, backend=backend))(*args, rope=self.rope, norm=norm)
        return tuple(np.asarray(x, np.float64) for x in got)


def make_case(
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    *,
    pad_tokens: int = 2,
    rotated: int | None = None,
    has_norm: bool = True,
    unit_offset: bool = False,
) -> Case:
    rng = np.random.default_rng(num_tokens)
    padded = num_tokens + pad_tokens
    qkv = bf16(3 * rng.standard_normal((padded, num_kv_heads, group + 2, head_dim)))
    qkv[num_tokens:] = np.nan
    slots = np.zeros(padded, np.int32)
    slots[:num_tokens] = rng.permutation(np.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))[:num_tokens]
    angles = rng.uniform(0, 999, (padded, (head_dim if rotated is None else rotated) // 2)).astype(np.float32)
    q_weight, k_weight = bf16(rng.uniform(0.2, 2, (2, head_dim)))
    return Case(
        qkv=qkv,
        kv_cache=np.full((3, NUM_BLOCKS, 2, num_kv_heads, BLOCK_SIZE, head_dim), np.nan),
        slots=slots,
        rope=(np.cos(angles), np.sin(angles)) if rotated != 0 else None,
        norm=HeadNorm(q_weight, k_weight, eps=1e-3, unit_offset=unit_offset) if has_norm else None,
        num_tokens=num_tokens,
    )


def expected(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [T, N, H], k and v [T, K, H] of the real tokens, rounded where models round."""

    def norm_and_rotate(x: np.ndarray, weight_name: str) -> np.ndarray:
        if case.norm is not None:
            weight = getattr(case.norm, weight_name)
            x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + case.norm.eps)
            x = bf16(x * (1 + weight)) if case.norm.unit_offset else bf16(bf16(x) * weight)
        if case.rope is None:
            return x
        cos, sin = (table[: case.num_tokens, None, None].astype(np.float64) for table in case.rope)
        half = cos.shape[-1]
        first, second, rest = np.split(x, [half, 2 * half], axis=-1)
        return np.concatenate([bf16(first * cos - second * sin), bf16(second * cos + first * sin), rest], axis=-1)

    qkv = case.qkv[: case.num_tokens]
    q, k = norm_and_rotate(qkv[:, :, :-2], "q_weight"), norm_and_rotate(qkv[:, :, -2:-1], "k_weight")
    return q.reshape(len(q), -1, q.shape[-1]), k[:, :, 0], qkv[:, :, -1]


def assert_same_but_for_last_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Nearly all elements equal; the rest off by a last bit, of the head's largest element where a sum cancels."""
    unit = 2.0**-7 * np.maximum(np.abs(want), np.abs(want).max(axis=-1, keepdims=True) / 2)
    assert (np.abs(got - want) <= unit).all()
    assert np.mean(got != want) < 0.005


def assert_matches(case: Case, backend: str) -> None:
    got_q, got_cache = case.run(backend)
    q, k, v = expected(case)
    assert_same_but_for_last_bits(got_q[: case.num_tokens], q)
    block, offset = np.divmod(case.slots[: case.num_tokens], BLOCK_SIZE)
    assert_same_but_for_last_bits(got_cache[LAYER, block, 0, :, offset], k)
    np.testing.assert_array_equal(got_cache[LAYER, block, 1, :, offset], v)
    got_cache[LAYER, block, :, :, offset] = np.nan
    assert np.isnan(got_cache).all(), "only the slots of the real tokens may change"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        make_case(13, 3, 3, 64),
        make_case(5, 8, 2, 128, unit_offset=True),
        make_case(3, 4, 7, 128, has_norm=False),
        make_case(2, 2, 5, 64, rotated=0),
        make_case(1, 1, 8, 128, pad_tokens=0),
        make_case(4, 32, 1, 64, rotated=0, has_norm=False),
    ],
    ids=lambda case: "x".join(map(str, case.qkv.shape)),
)
def test_heads_of_every_number_are_normed_rotated_and_written(case, backend):
    assert_matches(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_the_head_may_rotate(backend):
    assert_matches(make_case(6, 2, 3, 64, rotated=26), backend)


FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_8_bit_cache_holds_keys_and_values_over_their_scales_clipped_to_its_range(backend):
    case = make_case(7, 3, 2, 64, has_norm=False, rotated=0)
    case.qkv[2, 1, 2:, 5] = 1e4
    scale = np.array([0.5, 3], np.float32)
    args = (jnp.asarray(case.qkv, jnp.bfloat16), jnp.asarray(case.kv_cache, FP8), case.slots, jnp.int32(LAYER))
    _, plain = jax.jit(partial(rope_and_write_kv, backend=backend))(*args, kv_scale=scale)

    def run(qkv, kv_cache, slots, layer):
        scales = LayerSlice(jnp.stack([jnp.full(2, jnp.nan), scale]), layer)
        return rope_and_write_kv(qkv, kv_cache, slots, layer, kv_scale=scales, backend=backend)[1]

    cache = jax.jit(run)(*args)
    np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(plain, np.float32))
    block, offset = np.divmod(case.slots[: case.num_tokens], BLOCK_SIZE)
    got = np.asarray(cache.astype(jnp.float32))[LAYER, block, :, :, offset]  # [T, 2, K, H]
    wide = np.stack([bf16(case.qkv[: case.num_tokens, :, part]) for part in (-2, -1)], axis=1)
    want = np.clip(wide * (1 / scale)[:, None, None], -448, 448)
    np.testing.assert_allclose(got, want, rtol=2**-4, atol=2**-10)  # half a last bit, of a subnormal below 2^-6
    np.testing.assert_array_equal(got, np.asarray(jnp.asarray(want, jnp.float32).astype(FP8).astype(jnp.float32)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_norms_of_one_layer_are_found_among_those_of_all(backend):
    case = make_case(5, 2, 3, 64)
    args = (jnp.asarray(case.qkv, jnp.bfloat16), jnp.asarray(case.kv_cache, jnp.bfloat16), case.slots)
    weights = [jnp.asarray(w, jnp.bfloat16) for w in (case.norm.q_weight, case.norm.k_weight)]

    def run(qkv, kv_cache, slots, layer, weights):
        norm = HeadNorm(*(LayerSlice(jnp.stack([jnp.nan * w, w]), layer) for w in weights), eps=case.norm.eps)
        return rope_and_write_kv(qkv, kv_cache, slots, layer, rope=case.rope, norm=norm, backend=backend)

    got = jax.jit(run)(*args, jnp.int32(LAYER), weights)
    for one, plain in zip(got, case.run(backend), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64)[: case.num_tokens], plain[: case.num_tokens])


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(80, jnp.bfloat16), (64, jnp.float16), (128, jnp.float16)])
def test_the_kernel_writes_what_the_reference_writes(head_dim, dtype, backend):
    case = make_case(5, 2, 3, head_dim)
    cache_dim = cache_head_dim(head_dim)
    kv_cache = np.pad(case.kv_cache, [(0, 0)] * 5 + [(0, cache_dim - head_dim)])
    norm = HeadNorm(*(jnp.asarray(w, dtype) for w in (case.norm.q_weight, case.norm.k_weight)), eps=1e-3)
    args = (jnp.asarray(case.qkv, dtype), jnp.asarray(kv_cache, dtype), case.slots, jnp.int32(LAYER))
    results = [
        jax.jit(partial(rope_and_write_kv, backend=of))(*args, rope=case.rope, norm=norm)
        for of in ("reference", backend)
    ]
    (want_q, want), (got_q, got) = ([np.asarray(x, np.float64) for x in result] for result in results)
    block, offset = np.divmod(case.slots[: case.num_tokens], BLOCK_SIZE)
    assert got_q.shape == (7, 6, head_dim)
    assert_same_but_for_last_bits(got_q[: case.num_tokens], want_q[: case.num_tokens])
    assert_same_but_for_last_bits(got[LAYER, block, :, :, offset], want[LAYER, block, :, :, offset])
    assert not got[LAYER, block, :, :, offset][..., head_dim:].any()


def test_the_cache_is_written_in_place():
    case = make_case(11, 3, 2, 64)
    cache = jax.ShapeDtypeStruct(case.kv_cache.shape, jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct(case.qkv.shape, jnp.bfloat16)
    compiled = jax.jit(rope_and_write_kv, donate_argnums=1).lower(qkv, cache, case.slots, jnp.int32(LAYER)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * case.kv_cache.size
    assert memory.temp_size_in_bytes < case.kv_cache.size


def test_without_a_kernel_it_says_what_to_use():
    with pytest.raises(NotImplementedError, match=r"head_dim 32: only .* have kernels; use backend 'reference'"):
        make_case(2, 2, 1, 32).run("mosaic_gpu_interpret")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": np.zeros((5, 2, 2, 64))}, r"qkv has shape \(5, 2, 2, 64\), expected \[T, K, G \+ 2, H\] with K = 2"),
        ({"slots": np.zeros(4, np.int32)}, r"slot_mapping.shape=\(4,\) expected \(5,\)"),
        ({"slots": np.zeros(5, np.int16)}, "slot_mapping has dtype int16"),
        ({"rope": (np.zeros((5, 33)),) * 2}, r"a rope table has shape \(5, 33\), expected \[5, at most 32\]"),
        ({"norm": HeadNorm(np.zeros(63), np.zeros(64), eps=0.0)}, r"a norm weight has shape \(63,\)"),
    ],
)
def test_arguments_that_disagree_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(make_case(3, 2, 1, 64), **change).run("reference")
