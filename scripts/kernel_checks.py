"""Random ragged batches through the compiled kernels, against float64 on the same device.

The cache is NaN wherever a batch may not read: null block, tails of last blocks, blocks nobody owns, other layers; so
are the queries, keys and values of pad tokens. Requests share the blocks of common prefixes. Each batch runs twice and
has to give the same bits. The queries are those of the XLA reference, and the cache that the kernel wrote is compared
with what that one writes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_shapes import BACKEND, MAX_RELATIVE_ERROR, ON_CARD

from pallas_kernels.arg_specs import HeadShape
from pallas_kernels.mosaic_attention import attend, cache_head_dim
from pallas_kernels.ops import rope_and_write_kv, rope_write_and_attend
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.tuning import AttentionConfig, attention_config
from pallas_kernels.validation import Backend, Kind
from pallas_kernels.work_lists import cut_attention_work

# Of any one element.
MAX_ABSOLUTE_ERROR = {"bfloat16": 0.06, "float16": 0.01}
LAYER = 1


@dataclass(frozen=True)
class CheckShape:
    """A bucket and a pool that random batches are drawn for."""

    heads: HeadShape
    kind: Kind
    num_tokens: int
    num_rows: int
    block_size: int = 16
    max_len: int = 20000
    num_slots: int = 64000
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def name(self) -> str:
        """For the results."""
        heads = self.heads
        parts = [f"{heads.name} {heads.num_heads}/{heads.num_kv_heads}x{heads.head_dim}", self.kind, self.dtype]
        parts += [self.cache_dtype] if self.cache_dtype else []
        parts += [f"window {self.sliding_window}"] if self.sliding_window else []
        parts += [f"cap {self.soft_cap}"] if self.soft_cap else []
        return " ".join([*parts, "sinks"] if self.has_sinks else parts)

    @property
    def num_blocks(self) -> int:
        """With the null block."""
        return self.num_slots // self.block_size + 1


def random_lengths(rng: np.random.Generator, shape: CheckShape) -> tuple[list[int], list[int], int]:
    """Computed and new tokens of each request, and how many of them are decodes; they fill some part of the bucket."""
    num_rows = int(rng.integers(1, shape.num_rows + 1))
    num_decodes = num_rows if shape.kind == "decode" else int(rng.integers(0, num_rows))
    budget_tokens, budget_slots = shape.num_tokens, (shape.num_blocks - 1) * shape.block_size
    computed, new = [], []
    for row in range(num_rows):
        rows_left = num_rows - row
        longest = min(shape.max_len, budget_slots // rows_left - shape.block_size)
        length = int(np.exp(rng.uniform(0, np.log(longest)))) if rng.random() < 0.7 else longest
        count = 1 if row < num_decodes else int(rng.integers(1, max(min(length, budget_tokens // rows_left), 1) + 1))
        new.append(count)
        computed.append(length - count)
        budget_tokens -= count
        budget_slots -= -(-length // shape.block_size) * shape.block_size
    return computed, new, num_decodes


@dataclass(frozen=True)
class Batch:
    """The integer arguments of the ops, and which slots hold old keys."""

    slot_mapping: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    num_decodes: np.int32
    num_reqs: np.int32
    is_old: np.ndarray  # bool[num_blocks, block_size]

    def rows(self) -> tuple:
        return self.block_tables, self.seq_lens, self.query_start_loc, self.num_decodes, self.num_reqs

    def lists(self) -> tuple:
        """What the oracle needs of them."""
        return self.block_tables, self.seq_lens, self.query_start_loc, self.num_reqs


def random_batch(rng: np.random.Generator, shape: CheckShape) -> Batch:
    computed, new, num_decodes = random_lengths(rng, shape)
    block_size = shape.block_size
    tables = np.zeros((shape.num_rows, -(-shape.max_len // block_size) + 1), np.int32)
    slots = np.zeros(shape.num_tokens, np.int32)
    is_old = np.zeros((shape.num_blocks, block_size), bool)
    free = rng.permutation(np.arange(1, shape.num_blocks))
    used = token = 0
    for row, (old, count) in enumerate(zip(computed, new, strict=True)):
        # Every other request begins like the one before it, as far as both were computed.
        shared = min(old, computed[row - 1]) // block_size if row % 2 else 0
        num_own = -(-(old + count) // block_size) - shared
        blocks = np.concatenate([tables[row - 1, :shared], free[used : used + num_own]])
        used += num_own
        tables[row, : len(blocks)] = blocks
        position = np.arange(old + count)
        slot = blocks[position // block_size] * block_size + position % block_size
        is_old.reshape(-1)[slot[:old]] = True
        slots[token : token + count] = slot[old:]
        token += count
    pad_rows = shape.num_rows - len(new)
    return Batch(
        slot_mapping=slots,
        block_tables=tables,
        seq_lens=np.pad(np.array(computed) + np.array(new), (0, pad_rows)).astype(np.int32),
        query_start_loc=np.pad(np.cumsum([0, *new]), (0, pad_rows), mode="edge").astype(np.int32),
        num_decodes=np.int32(num_decodes),
        num_reqs=np.int32(len(new)),
        is_old=is_old,
    )


def _to_write(shape: CheckShape, base: Any, *args: Any) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """The step's qkv, the cache with the batch's old keys and values, the slots, and the options of the write."""
    qkv, rope, head_norm, is_old, num_tokens, slot_mapping = args
    qkv = jnp.where(jnp.arange(len(qkv))[:, None, None, None] < num_tokens, qkv, jnp.nan)
    is_layer = jnp.arange(base.shape[0])[:, None, None] == LAYER
    kv_cache = jnp.where((is_old & is_layer)[:, :, None, None, :, None], base, jnp.nan).astype(base.dtype)
    return qkv, kv_cache, slot_mapping, {"rope": rope, "norm": head_norm, "kv_scale": _kv_scale(shape)}


def _write(shape: CheckShape, backend: Backend, base: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Queries, and the cache with the batch's old and new keys and values."""
    qkv, kv_cache, slot_mapping, options = _to_write(shape, base, *args)
    return rope_and_write_kv(qkv, kv_cache, slot_mapping, jnp.int32(LAYER), **options, backend=backend)


def _kv_scale(shape: CheckShape) -> jax.Array | None:
    return jnp.array([0.75, 1.5], jnp.float32) if shape.cache_dtype else None


def _sinks(shape: CheckShape) -> jax.Array | None:
    return jnp.linspace(-2.0, 4.0, shape.heads.num_heads) if shape.has_sinks else None


def _attend(shape: CheckShape, config: AttentionConfig, base: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Write and attention by the kernels: results [T, N, H], and the cache."""
    *to_write, tables, lens, starts, num_decodes, num_reqs = args
    heads = shape.heads
    work = cut_attention_work(
        lens,
        starts,
        num_decodes,
        num_reqs,
        kind=shape.kind,
        num_tokens=shape.num_tokens,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        windows=(shape.sliding_window,),
        config=config,
    )
    options = {"sliding_window": shape.sliding_window, "soft_cap": shape.soft_cap}
    options |= {"sinks": _sinks(shape), "kv_scale": _kv_scale(shape), "scale": heads.head_dim**-0.5}
    if shape.kind == "decode":
        qkv, kv_cache, slot_mapping, write_options = _to_write(shape, base, *to_write)
        rows = (jnp.int32(LAYER), tables, lens, starts, num_reqs, work)
        options |= write_options | {"backend": BACKEND}
        return rope_write_and_attend(qkv, kv_cache, slot_mapping, *rows, **options)
    q, kv_cache = _write(shape, BACKEND, base, *to_write)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, kv_cache.shape[-1] - q.shape[-1])))
    options |= {"interpret": not ON_CARD}
    out = attend(padded, kv_cache, jnp.int32(LAYER), tables, lens, starts, work, config=config, **options)
    return out[..., : heads.head_dim], kv_cache


def _oracle(shape: CheckShape, q: Any, kv_cache: Any, tables: Any, lens: Any, starts: Any, num_reqs: Any) -> jax.Array:
    """Plain softmax attention in float64, a request and 64 of its tokens at a time: [T, N, H], zeros for pads."""
    heads, chunk = shape.heads, 1 if shape.kind == "decode" else min(64, shape.num_tokens)
    group = heads.num_heads // heads.num_kv_heads
    kv_scale, sinks = _kv_scale(shape), _sinks(shape)
    scales = jnp.ones(2) if kv_scale is None else kv_scale.astype(jnp.float64)
    num_chunks = -(-(starts[1:] - starts[:-1]) // chunk)
    ends = jnp.cumsum(jnp.where(jnp.arange(len(lens)) < num_reqs, num_chunks, 0))
    q = jnp.pad(q, ((0, chunk), (0, 0), (0, 0))).astype(jnp.float64)
    key = jnp.arange(tables.shape[1] * shape.block_size)

    def one(i: Any, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, i, side="right")
        first = (i - jnp.where(row > 0, ends[row - 1], 0)) * chunk
        start, length = starts[row] + first, lens[row]
        position = length - (starts[row + 1] - starts[row]) + first + jnp.arange(chunk)
        blocks = kv_cache[LAYER, tables[row], ..., : heads.head_dim]
        kv = blocks.transpose(1, 2, 0, 3, 4)
        kv = kv.reshape(2, heads.num_kv_heads, len(key), heads.head_dim).astype(jnp.float64)
        kv = jnp.where((key < length)[:, None], kv, 0) * scales[:, None, None, None]
        mine = jax.lax.dynamic_slice_in_dim(q, start, chunk).reshape(chunk, heads.num_kv_heads, group, -1)
        scores = jnp.einsum("tkgh,ksh->tkgs", mine, kv[0]) * heads.head_dim**-0.5
        if shape.soft_cap is not None:
            scores = shape.soft_cap * jnp.tanh(scores / shape.soft_cap)
        seen = key <= position[:, None]
        if shape.sliding_window is not None:
            seen &= key > position[:, None] - shape.sliding_window
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        if sinks is not None:
            by_head = sinks.reshape(heads.num_kv_heads, group, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(by_head, (*scores.shape[:3], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(key)]
        values = jnp.where(seen.any(axis=0)[:, None], kv[1], 0)
        result = jnp.einsum("tkgs,ksh->tkgh", weights, values).reshape(chunk, heads.num_heads, heads.head_dim)
        # Tokens past the end of this request are the next one's, and are overwritten by it.
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out = jax.lax.fori_loop(0, ends[-1], one, jnp.zeros((*q.shape[:2], heads.head_dim), jnp.float64))
    return out[: shape.num_tokens]


def _compare(got: Any, again: Any, want: Any, expected_cache: Any, num_tokens: jax.Array) -> dict[str, jax.Array]:
    """Figures of one batch, on the device."""
    out, cache = got
    is_real = (jnp.arange(len(out)) < num_tokens)[:, None, None]
    want = jnp.where(is_real, want, 0)
    error = jnp.where(is_real, out.astype(want.dtype), 0) - want
    bits = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    return {
        "relative": jnp.linalg.norm(error) / jnp.linalg.norm(want),
        "absolute": jnp.max(jnp.abs(error)),
        "pads_zero": jnp.all(jnp.where(is_real, 0, out) == 0),
        "same_bits": jnp.all(bits(out) == bits(again[0])),
        "cache_close": _is_close(cache[:, 1:], expected_cache[:, 1:]),
    }


def _is_close(got: jax.Array, want: jax.Array) -> jax.Array:
    """Whether caches are NaN at the same places and equal elsewhere, but for a last bit of the head's largest."""
    last_bit = 2.0 ** -jnp.finfo(got.dtype).nmant
    is_nan = jnp.isnan(want)
    is_same = jnp.all(jnp.isnan(got) == is_nan)
    got, want = (jnp.where(is_nan, 0, x).astype(jnp.float32) for x in (got, want))
    size = jnp.abs(want)
    unit = last_bit * jnp.maximum(size, jnp.max(size, axis=-1, keepdims=True) / 2)
    return is_same & jnp.all(jnp.abs(got - want) <= unit)


def config_of(shape: CheckShape) -> AttentionConfig:
    """The configuration that serves this shape."""
    dtype = jnp.dtype(shape.cache_dtype or shape.dtype)
    head_dim = cache_head_dim(shape.heads.head_dim)
    return attention_config(
        interpret=not ON_CARD,
        num_rows=shape.num_rows,
        block_size=shape.block_size,
        head_dim=head_dim,
        cache_bytes=dtype.itemsize,
    )


@dataclass(frozen=True)
class Check:
    """A shape with its compiled programs and float arguments."""

    shape: CheckShape
    kernels: Any
    oracle: Any
    write: Any  # by the XLA reference
    compare: Any
    floats: tuple

    @classmethod
    def compile(cls, shape: CheckShape, seed: int) -> "Check":
        """Draw the numbers and compile; may run in a thread."""
        heads, dtype = shape.heads, jnp.dtype(shape.dtype)
        keys = jax.random.split(jax.random.key(seed), 4)
        pool = (2, shape.num_blocks, 2, heads.num_kv_heads, shape.block_size, cache_head_dim(heads.head_dim))
        base = jax.jit(lambda: jax.random.normal(keys[0], pool, dtype).astype(shape.cache_dtype or dtype))()
        group = heads.num_heads // heads.num_kv_heads
        qkv = jax.random.normal(keys[1], (shape.num_tokens, heads.num_kv_heads, group + 2, heads.head_dim), dtype)
        angles = jax.random.uniform(keys[2], (shape.num_tokens, heads.head_dim // 2), jnp.float32, 0, 999)
        weights = jax.random.uniform(keys[3], (2, heads.head_dim), dtype, 0.2, 1.2)
        floats = (base, qkv, (jnp.cos(angles), jnp.sin(angles)), HeadNorm(weights[0], weights[1], eps=1e-6))
        batch = random_batch(np.random.default_rng(seed), shape)
        to_write = (*floats, batch.is_old, batch.query_start_loc[-1], batch.slot_mapping)
        kernels = jax.jit(partial(_attend, shape, config_of(shape))).lower(*to_write, *batch.rows()).compile()
        # Else XLA leaves out roundings to 16 bits that the kernel does.
        exact = {"xla_allow_excess_precision": False}
        write = jax.jit(partial(_write, shape, "reference")).lower(*to_write).compile(exact)
        out, kv_cache = got = kernels.out_info
        with jax.enable_x64(True):
            oracle = jax.jit(partial(_oracle, shape)).lower(write.out_info[0], kv_cache, *batch.lists()).compile()
            want = jax.ShapeDtypeStruct(out.shape, jnp.float64)
            compare = jax.jit(_compare).lower(got, got, want, kv_cache, batch.query_start_loc[-1]).compile()
        return cls(shape, kernels, oracle, write, compare, floats)

    def run(self, num_batches: int, seed: int) -> dict:
        """Run random batches; a row for the results."""
        rng = np.random.default_rng(seed)
        rows = [self._run_one(random_batch(rng, self.shape)) for _ in range(num_batches)]
        max_relative, max_absolute = MAX_RELATIVE_ERROR[self.shape.dtype], MAX_ABSOLUTE_ERROR[self.shape.dtype]
        failures = [
            {"batch": i, **row}
            for i, row in enumerate(rows)
            if not (row["relative"] < max_relative and row["absolute"] < max_absolute)
            or not (row["pads_zero"] and row["same_bits"] and row["cache_close"])
        ]
        return {
            "check": self.shape.name,
            "bucket": [self.shape.num_tokens, self.shape.num_rows],
            "block_size": self.shape.block_size,
            "batches": num_batches,
            "passed": num_batches - len(failures),
            "worst_relative_error": max(row["relative"] for row in rows),
            "worst_absolute_error": max(row["absolute"] for row in rows),
            "failures": failures[:3],
        }

    def _run_one(self, batch: Batch) -> dict[str, Any]:
        num_tokens = batch.query_start_loc[-1]
        to_write = (*self.floats, batch.is_old, num_tokens, batch.slot_mapping)
        got, again = (self.kernels(*to_write, *batch.rows()) for _ in range(2))
        q, cache_wanted = self.write(*to_write)
        with jax.enable_x64(True):
            want = self.oracle(q, got[1], *batch.lists())
            figures = self.compare(got, again, want, cache_wanted, num_tokens)
        return {name: value.item() for name, value in figures.items()}
