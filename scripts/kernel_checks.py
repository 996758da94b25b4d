"""Random ragged batches through the compiled kernels, against the XLA reference on the same device.

The cache is NaN wherever a batch may not read: null block, tails of last blocks, blocks nobody owns, other layers; so
are the queries, keys and values of pad tokens. Each batch runs twice and has to give the same bits.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arg_specs import HeadShape
from pallas_kernels.mosaic import attend
from pallas_kernels.ops import paged_attention, rope_and_write_kv
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.tuning import AttentionConfig
from pallas_kernels.validation import Kind
from pallas_kernels.work_lists import cut_attention_work

# Of the whole output relative to the reference's, and of any one element: both round the result to bfloat16.
MAX_RELATIVE_ERROR = 6e-3
MAX_ABSOLUTE_ERROR = 0.06


@dataclass(frozen=True)
class CheckShape:
    """A bucket and a pool that random batches are drawn for."""

    heads: HeadShape
    kind: Kind
    num_tokens: int
    num_rows: int
    block_size: int = 16
    max_len: int = 3000
    num_blocks: int = 3000


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


def random_batch(rng: np.random.Generator, shape: CheckShape) -> Batch:
    computed, new, num_decodes = random_lengths(rng, shape)
    block_size = shape.block_size
    tables = np.zeros((shape.num_rows, -(-shape.max_len // block_size) + 1), np.int32)
    slots = np.zeros(shape.num_tokens, np.int32)
    is_old = np.zeros((shape.num_blocks, block_size), bool)
    free = rng.permutation(np.arange(1, shape.num_blocks))
    used = token = 0
    for row, (old, count) in enumerate(zip(computed, new, strict=True)):
        blocks = free[used : used + -(-(old + count) // block_size)]
        used += len(blocks)
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


def _step(shape: CheckShape, config: AttentionConfig | None, base: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Write and attention, by the kernels with `config` or by the reference: [T, N, H] and the cache."""
    qkv, rope, head_norm, is_old, num_tokens, slot_mapping, *rows = args
    tables, lens, starts, _, _ = rows
    layer = jnp.int32(1)
    qkv = jnp.where(jnp.arange(len(qkv))[:, None, None, None] < num_tokens, qkv, jnp.nan)
    is_layer = jnp.arange(base.shape[0])[:, None, None] == layer
    kv_cache = jnp.where((is_old & is_layer)[:, :, None, None, :, None], base, jnp.nan)
    scale = qkv.shape[-1] ** -0.5
    options = {"rope": rope, "norm": head_norm}
    if config is None:
        q, kv_cache = rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, **options)
        return paged_attention(q, kv_cache, layer, *rows, scale=scale, kind=shape.kind), kv_cache
    q, kv_cache = rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, **options, backend="mosaic_gpu")
    heads = shape.heads
    work = cut_attention_work(
        *rows[1:],
        kind=shape.kind,
        num_tokens=shape.num_tokens,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        config=config,
    )
    return attend(q, kv_cache, layer, tables, lens, starts, work, scale=scale, config=config), kv_cache


@cache
def _reference(shape: CheckShape) -> Any:
    # Else XLA leaves out roundings to bfloat16 that the kernel does.
    exact = {"xla_allow_excess_precision": False}
    return jax.jit(partial(_step, shape, None), compiler_options=exact)


@jax.jit
def _compare(got: Any, again: Any, expected: Any, num_tokens: jax.Array) -> dict[str, jax.Array]:
    """Figures of one batch, on the device."""
    out, cache = got
    is_real = (jnp.arange(len(out)) < num_tokens)[:, None, None]
    want = jnp.where(is_real, expected[0].astype(jnp.float32), 0)
    error = jnp.where(is_real, out.astype(jnp.float32), 0) - want
    bits = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    return {
        "relative": jnp.linalg.norm(error) / jnp.linalg.norm(want),
        "absolute": jnp.max(jnp.abs(error)),
        "pads_zero": jnp.all(jnp.where(is_real, 0, out) == 0),
        "same_bits": jnp.all(bits(out) == bits(again[0])),
        "cache_close": _is_close(cache[:, 1:], expected[1][:, 1:]),
    }


def _is_close(got: jax.Array, want: jax.Array) -> jax.Array:
    """Whether caches are NaN at the same places and equal elsewhere, but for a last bit of the head's largest."""
    is_nan = jnp.isnan(want)
    is_same = jnp.all(jnp.isnan(got) == is_nan)
    got, want = (jnp.where(is_nan, 0, x).astype(jnp.float32) for x in (got, want))
    size = jnp.abs(want)
    unit = 2.0**-7 * jnp.maximum(size, jnp.max(size, axis=-1, keepdims=True) / 2)
    return is_same & jnp.all(jnp.abs(got - want) <= unit)


def check(shape: CheckShape, config: AttentionConfig, *, num_batches: int, seed: int) -> dict:
    """Run `num_batches` random batches of one bucket; a row for the results."""
    heads = shape.heads
    keys = jax.random.split(jax.random.key(seed), 4)
    pool = (2, shape.num_blocks, 2, heads.num_kv_heads, shape.block_size, heads.head_dim)
    base = jax.random.normal(keys[0], pool, jnp.bfloat16)
    group = heads.num_heads // heads.num_kv_heads
    qkv = jax.random.normal(keys[1], (shape.num_tokens, heads.num_kv_heads, group + 2, heads.head_dim), jnp.bfloat16)
    angles = jax.random.uniform(keys[2], (shape.num_tokens, heads.head_dim // 2), jnp.float32, 0, 999)
    weights = jax.random.uniform(keys[3], (2, heads.head_dim), jnp.bfloat16, 0.2, 1.2)
    floats = (qkv, (jnp.cos(angles), jnp.sin(angles)), HeadNorm(weights[0], weights[1], eps=1e-6))
    kernels = jax.jit(partial(_step, shape, config))
    reference = _reference(shape)
    rng = np.random.default_rng(seed)
    worst = {"relative": 0.0, "absolute": 0.0}
    failures = []
    for index in range(num_batches):
        batch = random_batch(rng, shape)
        num_tokens = batch.query_start_loc[-1]
        args = (base, *floats, batch.is_old, num_tokens, batch.slot_mapping, *batch.rows())
        row = {k: v.item() for k, v in _compare(kernels(*args), kernels(*args), reference(*args), num_tokens).items()}
        worst = {name: max(worst[name], row[name]) for name in worst}
        good = row["relative"] < MAX_RELATIVE_ERROR and row["absolute"] < MAX_ABSOLUTE_ERROR
        if not (good and row["pads_zero"] and row["same_bits"] and row["cache_close"]):
            failures.append({"batch": index, **row})
    return {
        "check": f"{heads.name} {heads.num_heads}/{heads.num_kv_heads}x{heads.head_dim} {shape.kind}",
        "bucket": [shape.num_tokens, shape.num_rows],
        "block_size": shape.block_size,
        "batches": num_batches,
        "passed": num_batches - len(failures),
        "worst_relative_error": worst["relative"],
        "worst_absolute_error": worst["absolute"],
        "failures": failures[:3],
    }
