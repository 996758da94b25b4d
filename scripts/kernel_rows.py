"""The measurements of scripts/bench_kernels.py: each a few programs to compile, and what to do with them.

A program runs a kernel some 16 times, each call reading what the one before wrote, over layers that do not fit the L2
cache together where the shape is large. The first call's result is compared with float64 for some requests and tokens,
and with the same call once more, bit for bit, before anything is timed.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kernel_shapes as shapes
import numpy as np
from kernel_shapes import DecodeShape, KernelShape, MixedStep, PrefillShape
from kernel_trace import trace_kernels

from pallas_kernels import ops
from pallas_kernels.decode import paged_decode
from pallas_kernels.mosaic import attend, write_and_attend
from pallas_kernels.prefill import paged_prefill
from pallas_kernels.reference_rope_write import HeadNorm, norm_and_rotate
from pallas_kernels.work_lists import cut_attention_work, make_decode_work, make_prefill_work

CHAIN = 16 if shapes.ON_CARD else 2
NUM_LAYERS = 4
# Measured on this card: TB/s of a reduction over 4 GB, TFLOP/s of an 8192^3 product in bfloat16.
READ_CEILING, MATMUL_CEILING = 4.51, 806.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A function to compile, with its abstract arguments."""

    function: Callable[..., Any]
    specs: tuple = ()
    donated: tuple[int, ...] = ()

    def lower(self) -> Any:
        """Trace and lower: one at a time, Python's lock lets no two of them go on at once."""
        return jax.jit(self.function, donate_argnums=self.donated, keep_unused=True).lower(*self.specs)


@dataclass(frozen=True)
class Measurement:
    """One row of the results: `measure` gets the compiled programs by name."""

    name: str
    programs: dict[str, Program]
    measure: Callable[[dict[str, Any]], Row]


def seconds_a_call(function: Callable[..., Any], args: tuple, *, carry: bool = False) -> float:
    """Median over five runs of the wall clock of one call, many calls queued.

    `carry`: the results take the place of the first arguments, which are donated.
    """

    def queue(count: int, args: tuple) -> tuple[float, tuple]:
        start = time.perf_counter()
        out: Any = None
        for _ in range(count):
            out = function(*args)
            args = (*out, *args[len(out) :]) if carry else args
        jax.block_until_ready(out)
        return time.perf_counter() - start, args

    _, args = queue(2, args)
    once, args = queue(3, args)
    count = max(1, int(0.06 / (once / 3))) if shapes.ON_CARD else 1
    times = []
    for _ in range(5 if shapes.ON_CARD else 1):
        elapsed, args = queue(count, args)
        times.append(elapsed / count)
    return statistics.median(times)


def device_seconds(function: Callable[..., Any], args: tuple) -> float:
    """What the kernels of one call take by a trace, without what lies between them. Donated arguments are gone."""
    jax.block_until_ready(args)
    kernels = trace_kernels(lambda: jax.block_until_ready(function(*args)), 1)
    return sum(kernel.us for name, kernel in kernels.items() if not name.startswith("Mem")) / 1e6


def num_of_calls(is_short: bool) -> int:
    """Calls in a chain, so many that a chain takes longer than its dispatch."""
    return 2 * CHAIN if is_short else CHAIN


def timing_row(kernel: str, shape: str, seconds: float, ceiling: float | None = None, **rates: Any) -> Row:
    """A row of the results, with FlashAttention-3's time where it is known."""
    row: Row = {"kernel": kernel, "shape": shape, "us": round(seconds * 1e6, 2), **rates}
    if ceiling is not None:
        row["of_ceiling"] = round(row["rate"] / ceiling, 3)
    anchor = shapes.flash_attention_3_us(shape)
    if anchor is not None:
        row |= {"fa3_us": anchor, "fa3_ratio": round(anchor / row["us"], 3)}
    return row


@dataclass(frozen=True)
class Requests:
    """Requests with tables of random blocks; their tokens lie one after the other."""

    lens: np.ndarray  # i32[R] keys
    new: np.ndarray  # i32[R] tokens of the step
    block_size: int
    tables: np.ndarray = field(init=False)  # i32[R, max_blocks]
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        counts = -(-self.lens // self.block_size)
        ids = np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
        tables = np.zeros((len(counts), max(counts)), np.int32)
        for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            tables[row, :count] = ids[end - count : end]
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "num_blocks", int(sum(counts)) + 1)

    @property
    def starts(self) -> np.ndarray:
        """i32[R + 1] first token of each."""
        return np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)

    def samples(self) -> list[tuple[int, np.ndarray]]:
        """Some requests, and some of their tokens, counted from the first of the step."""
        rows = sorted({0, len(self.lens) // 2, len(self.lens) - 1})
        return [(row, np.unique(np.linspace(0, self.new[row] - 1, 6).astype(int))) for row in rows]


def cache_shape(requests: Requests, shape: KernelShape) -> tuple[int, ...]:
    return (NUM_LAYERS, requests.num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.cache_head_dim)


def normal_program(sizes: tuple[int, ...], dtype: Any, seed: int = 0) -> Program:
    """Random numbers of a 16-bit dtype, or of 8 bits by way of one."""
    wide = dtype if jnp.dtype(dtype).itemsize > 1 else jnp.bfloat16
    return Program(lambda: jax.random.normal(jax.random.key(seed), sizes, wide).astype(dtype))


def specs_of(*arrays: Any) -> tuple:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), arrays)


def layer_of(i: int) -> jax.Array:
    return jnp.int32(i % NUM_LAYERS)


def read_program(requests: Requests, shape: KernelShape) -> Program:
    """Some blocks of layer 0, where the first call of a chain reads."""
    cache = jax.ShapeDtypeStruct(cache_shape(requests, shape), shape.kv_dtype)
    ids = jax.ShapeDtypeStruct(requests.tables.shape[1:], jnp.int32)
    return Program(lambda kv_cache, ids: kv_cache[0, ids], (cache, ids))


def expected_rows(shape: KernelShape, q: np.ndarray, position: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Attention of some tokens of one request in float64.

    Args:
      q: [m, N, H]; position: [m] of each token in the request, whose keys up to that one are visible.
      blocks: [blocks, 2, K, block_size, H] of the request.
    """
    num_keys = position[-1] + 1
    group = shape.num_heads // shape.num_kv_heads
    key = np.arange(num_keys)
    seen = key <= position[:, None]
    if shape.sliding_window is not None:
        seen &= key > position[:, None] - shape.sliding_window
    out = np.empty(q.shape)
    for kv_head in range(shape.num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys, values = (
            blocks[:, i, kv_head].reshape(-1, blocks.shape[-1])[:num_keys].astype(np.float64) * scale
            for i, scale in enumerate(shape.kv_scales)
        )
        scores = q[:, heads].astype(np.float64) @ keys.T * shape.head_dim**-0.5  # [m, G, keys]
        if shape.soft_cap is not None:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        weights = np.where(seen[:, None], np.exp(scores - scores.max()), 0)
        total = weights.sum(axis=-1, keepdims=True)
        if shape.has_sinks:
            total = total + np.exp(shapes.SINK - scores.max())
        out[:, heads] = weights / total @ values
    return out


def check(shape: KernelShape, requests: Requests, read: Any, kv_cache: Any, q: Any, outs: list[np.ndarray]) -> Row:
    """Figures of two results of one call, [T, N, H]."""
    got, want = [], []
    q = np.asarray(q)
    for row, tokens in requests.samples():
        blocks = np.asarray(read(kv_cache, requests.tables[row]))
        mine = requests.starts[row] + tokens
        want.append(expected_rows(shape, q[mine], requests.lens[row] - requests.new[row] + tokens, blocks))
        got.append(outs[0][mine].astype(np.float64))
    error = np.concatenate(got) - np.concatenate(want)
    relative = float(np.linalg.norm(error) / np.linalg.norm(np.concatenate(want)))
    same_bits = outs[0].tobytes() == outs[1].tobytes()
    is_right = relative < shapes.MAX_RELATIVE_ERROR[shape.dtype] and same_bits
    return {"relative_error": round(relative, 6), "same_bits": same_bits, "is_right": is_right}


def decode_row(shape: DecodeShape) -> Measurement:
    """Decode attention of one layer."""
    config = shape.config.decode
    num_calls = num_of_calls(shape.num_bytes < 2**26)
    requests = Requests(np.array(shape.lens, np.int32), np.ones(len(shape.lens), np.int32), shape.block_size)
    cut = partial(make_decode_work, num_kv_heads=shape.num_kv_heads, sliding_window=shape.sliding_window, config=config)
    one = jax.jit(partial(paged_decode, **shape.options(), config=config))

    def chain(q, kv_cache, tables, lens, count, work):
        first = q = one(q, kv_cache, layer_of(0), tables, lens, count, work)
        for i in range(1, num_calls):
            q = one(q, kv_cache, layer_of(i), tables, lens, count, work)
        return first, q

    q_sizes = (len(requests.lens), shape.num_heads, shape.cache_head_dim)
    cache = jax.ShapeDtypeStruct(cache_shape(requests, shape), shape.kv_dtype)
    count = np.int32(len(requests.lens))
    work = jax.eval_shape(cut, *specs_of(requests.lens, count))
    q = jax.ShapeDtypeStruct(q_sizes, shape.dtype)
    programs = {
        "chain": Program(chain, (q, cache, *specs_of(requests.tables, requests.lens, count), work)),
        "work": Program(cut, specs_of(requests.lens, count)),
        "cache": normal_program(cache.shape, shape.kv_dtype),
        "q": normal_program(q_sizes, shape.dtype, seed=1),
        "read": read_program(requests, shape),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        q, kv_cache = compiled["q"](), compiled["cache"]()
        lens = jnp.asarray(requests.lens)
        rest = (jnp.asarray(requests.tables), lens, jnp.asarray(count), compiled["work"](lens, count))
        outs = [np.asarray(compiled["chain"](q, kv_cache, *rest)[0]) for _ in range(2)]
        checked = check(shape, requests, compiled["read"], kv_cache, q, outs)
        seconds = seconds_a_call(compiled["chain"], (q, kv_cache, *rest)) / num_calls
        rate = shape.num_bytes / seconds / 1e12
        return timing_row("decode", shape.name, seconds, rate=rate, unit="TB/s", ceiling=READ_CEILING) | checked

    return Measurement(shape.name, programs, measure)


def write_and_decode_row(shape: DecodeShape) -> Measurement:
    """Norm, rope, KV write and decode attention of one layer: in a chain each call gets the cache of the one before."""
    num_calls = num_of_calls(shape.num_bytes < 2**26)
    requests = Requests(np.array(shape.lens, np.int32), np.ones(len(shape.lens), np.int32), shape.block_size)
    sizes = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "num_tokens": len(shape.lens)}
    cut = partial(cut_attention_work, **sizes, kind="decode", windows=(shape.sliding_window,), config=shape.config)
    rows = (requests.lens, requests.starts, np.int32(0), np.int32(len(shape.lens)))
    options = shape.options() | {"config": shape.config, "interpret": not shapes.ON_CARD}
    one = jax.jit(partial(write_and_attend, **options))
    last = requests.lens - 1
    slots = requests.tables[np.arange(len(last)), last // shape.block_size] * shape.block_size + last % shape.block_size
    qkv_sizes = (len(last), shape.num_kv_heads, shape.num_heads // shape.num_kv_heads + 2, shape.head_dim)

    def chain(kv_cache, first, qkv, cos, sin, weight, slots, tables, lens, starts, work):
        norm = HeadNorm(weight, weight, eps=1e-6)
        for i in range(num_calls):
            out, kv_cache = one(
                qkv, kv_cache, slots, layer_of(i), tables, lens, starts, work, rope=(cos, sin), norm=norm
            )
            first = out if i == 0 else first
        return kv_cache, first

    def queries(qkv, cos, sin, weight):
        q = norm_and_rotate(qkv, (cos, sin), HeadNorm(weight, weight, eps=1e-6))[0]
        return q.reshape(len(q), -1, q.shape[-1])

    cache = jax.ShapeDtypeStruct(cache_shape(requests, shape), shape.kv_dtype)
    qkv = jax.ShapeDtypeStruct(qkv_sizes, shape.dtype)
    table = jax.ShapeDtypeStruct((len(last), shape.head_dim // 2), jnp.float32)
    weight = jax.ShapeDtypeStruct((shape.head_dim,), shape.dtype)
    out = jax.eval_shape(queries, qkv, table, table, weight)
    lists = specs_of(slots, requests.tables, requests.lens, requests.starts)
    programs = {
        "chain": Program(
            chain, (cache, out, qkv, table, table, weight, *lists, jax.eval_shape(cut, *specs_of(*rows))), (0, 1)
        ),
        "work": Program(cut, specs_of(*rows)),
        "cache": normal_program(cache.shape, shape.kv_dtype),
        "qkv": normal_program(qkv_sizes, shape.dtype, seed=1),
        "weight": normal_program(weight.shape, shape.dtype, seed=2),
        "queries": Program(queries, (qkv, table, table, weight)),
        "out": normal_program(out.shape, shape.dtype),
        "read": read_program(requests, shape),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        angles = np.random.default_rng(0).uniform(0, 999, table.shape).astype(np.float32)
        new = (compiled["qkv"](), jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)), compiled["weight"]())
        arrays = tuple(jnp.asarray(x) for x in (slots, requests.tables, requests.lens, requests.starts))
        rest = (*new, *arrays, compiled["work"](*rows))
        kv_cache, first = compiled["cache"](), compiled["out"]()
        outs = []
        for _ in range(2):
            kv_cache, first = compiled["chain"](kv_cache, first, *rest)
            outs.append(np.asarray(first))
        checked = check(shape, requests, compiled["read"], kv_cache, compiled["queries"](*new), outs)
        seconds = seconds_a_call(compiled["chain"], (kv_cache, first, *rest), carry=True) / num_calls
        rate = shape.num_bytes / seconds / 1e12
        return (
            timing_row("write and decode", shape.name, seconds, rate=rate, unit="TB/s", ceiling=READ_CEILING) | checked
        )

    return Measurement(f"write and {shape.name}", programs, measure)


def prefill_row(shape: PrefillShape) -> Measurement:
    """Prefill attention of one layer. Three arrays take turns: q, the last result, the first result."""
    config = shape.config.prefill
    sizes = np.ones(shape.num_requests, np.int32)
    requests = Requests(sizes * (shape.new + shape.cached), sizes * shape.new, shape.block_size)
    num_tokens = shape.num_requests * shape.new
    group = shape.num_heads // shape.num_kv_heads
    cut = partial(make_prefill_work, num_tokens=num_tokens, group_size=group, config=config)
    rows = (requests.lens, requests.starts, np.int32(0), np.int32(shape.num_requests))
    one = jax.jit(partial(paged_prefill, **shape.options(), config=config))

    def chain(q, x, y, kv_cache, tables, work):
        first = one(q, kv_cache, layer_of(0), tables, y, work)
        last, spare = one(first, kv_cache, layer_of(1), tables, x, work), q
        for i in range(2, CHAIN):
            last, spare = one(last, kv_cache, layer_of(i), tables, spare, work), last
        return spare, last, first  # in the places where they lie, so that nothing is copied

    q_sizes = (num_tokens, shape.num_heads, shape.cache_head_dim)
    q = jax.ShapeDtypeStruct(q_sizes, shape.dtype)
    cache = jax.ShapeDtypeStruct(cache_shape(requests, shape), shape.kv_dtype)
    work = jax.eval_shape(cut, *specs_of(*rows))
    programs = {
        "chain": Program(chain, (q, q, q, cache, *specs_of(requests.tables), work), donated=(0, 1, 2)),
        "work": Program(cut, specs_of(*rows)),
        "cache": normal_program(cache.shape, shape.kv_dtype),
        "q": normal_program(q_sizes, shape.dtype, seed=1),
        "read": read_program(requests, shape),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        kv_cache, q = compiled["cache"](), np.asarray(compiled["q"]())
        rest = (kv_cache, jnp.asarray(requests.tables), compiled["work"](*rows))
        outs, arrays = [], ()
        for _ in range(2):
            arrays = compiled["chain"](compiled["q"](), compiled["q"](), compiled["q"](), *rest)
            outs.append(np.asarray(arrays[2]))
        checked = check(shape, requests, compiled["read"], kv_cache, q, outs)
        seconds = seconds_a_call(compiled["chain"], (*arrays, *rest), carry=True) / CHAIN
        rate = shape.flops / seconds / 1e12
        return timing_row("prefill", shape.name, seconds, rate=rate, unit="TFLOP/s", ceiling=MATMUL_CEILING) | checked

    return Measurement(shape.name, programs, measure)


def mixed_row(step: MixedStep) -> Measurement:
    """A mixed step's attention, and that of its decodes and of its chunk alone, which are steps as well."""
    shape, config = step.heads, step.heads.config
    heads = (shape.num_heads, shape.head_dim)
    one = jax.jit(partial(attend, scale=shape.head_dim**-0.5, config=config, interpret=not shapes.ON_CARD))
    programs: dict[str, Program] = {"q": normal_program((step.num_tokens, *heads), jnp.bfloat16, seed=1)}
    requests = {part: Requests(*lens, shape.block_size) for part, lens in step.parts().items()}
    rows = {}

    def chain(q, kv_cache, tables, lens, starts, work):
        first = q = one(q, kv_cache, layer_of(0), tables, lens, starts, work)
        for i in range(1, CHAIN):
            q = one(q, kv_cache, layer_of(i), tables, lens, starts, work)
        return first, q

    for part, mine in requests.items():
        num_decodes = sum(mine.new == 1)
        rows[part] = (mine.lens, mine.starts, np.int32(num_decodes), np.int32(len(mine.lens)))
        kind = "decode" if part == "decodes" else "mixed"
        num_tokens = int(sum(mine.new))
        sizes = {"num_tokens": num_tokens, "num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads}
        cut = partial(cut_attention_work, **sizes, kind=kind, config=config)
        q = jax.ShapeDtypeStruct((num_tokens, *heads), jnp.bfloat16)
        cache = jax.ShapeDtypeStruct(cache_shape(mine, shape), shape.kv_dtype)
        work = jax.eval_shape(cut, *specs_of(*rows[part]))
        args = (q, cache, *specs_of(mine.tables, mine.lens, mine.starts), work)
        programs[part] = Program(chain, args)
        programs[f"{part} work"] = Program(cut, specs_of(*rows[part]))
        programs[f"{part} cache"] = normal_program(cache.shape, shape.kv_dtype)
    programs["read"] = read_program(requests["all"], shape)

    def measure(compiled: dict[str, Any]) -> Row:
        seconds, checked = {}, {}
        for part, mine in requests.items():
            q, kv_cache = compiled["q"]()[: sum(mine.new)], compiled[f"{part} cache"]()
            work = compiled[f"{part} work"](*rows[part])
            rest = tuple(jnp.asarray(x) for x in (mine.tables, mine.lens, mine.starts))
            if part == "all":
                outs = [np.asarray(compiled[part](q, kv_cache, *rest, work)[0]) for _ in range(2)]
                checked = check(shape, mine, compiled["read"], kv_cache, q, outs)
            seconds[part] = seconds_a_call(compiled[part], (q, kv_cache, *rest, work)) / CHAIN
        parts = {f"{part}_us": round(1e6 * seconds[part], 2) for part in ("decodes", "chunk")}
        of_parts = seconds["all"] / (seconds["decodes"] + seconds["chunk"])
        return timing_row("mixed", step.name, seconds["all"], **parts, of_parts=round(of_parts, 3)) | checked

    return Measurement(step.name, programs, measure)


def work_row(num_tokens: int, num_rows: int, kind: str) -> Measurement:
    """The work lists of a step, which come once a step and not once a layer."""
    shape = KernelShape("", 32, 8)
    sizes = {"kind": kind, "num_tokens": num_tokens, "num_heads": 32, "num_kv_heads": 8, "config": shape.config}
    lens = np.full(num_rows, max(num_tokens // num_rows, 1), np.int32)
    starts = np.arange(num_rows + 1, dtype=np.int32) * (num_tokens // num_rows)
    args = (lens, starts, np.int32(0), np.int32(num_rows))

    def chain(lens, starts, num_decodes, num_reqs):
        for _ in range(CHAIN):
            work = cut_attention_work(lens, starts, num_decodes, num_reqs, **sizes)
            lens = lens + work.decode[0].arrivals[0]
            lens = lens if work.prefill is None else lens + jnp.minimum(work.prefill.tiles[1, 0], 0)
        return lens

    def measure(compiled: dict[str, Any]) -> Row:
        arrays = tuple(jnp.asarray(x) for x in args)
        return timing_row("work lists", name, seconds_a_call(compiled["chain"], arrays) / CHAIN)

    name = f"{kind} T={num_tokens} R={num_rows}"
    return Measurement(f"work {name}", {"chain": Program(chain, specs_of(*args))}, measure)


def write_row(num_tokens: int) -> Measurement:
    """Norm, rope and KV write of 16 / 8 heads of 128 by the kernel, and by the XLA operations that it replaces.

    Scattered slots up to 256 tokens, whole blocks above.
    """
    shape = KernelShape("", 16, 8)
    heads, group, head_dim, block_size = 8, 2, shape.head_dim, shape.block_size
    num_blocks = 1088 if shapes.ON_CARD else 9
    num_calls = num_of_calls(num_tokens <= 256)
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks))
    token = np.arange(num_tokens)
    slots = blocks[token] * block_size + 5 if num_tokens <= 256 else blocks[token // 16] * block_size + token % 16
    slots = slots.astype(np.int32)
    queries = [jax.ShapeDtypeStruct((num_tokens, heads * group, head_dim), jnp.bfloat16)] * num_calls
    cache = jax.ShapeDtypeStruct((NUM_LAYERS, num_blocks, 2, heads, block_size, head_dim), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((num_tokens, heads, group + 2, head_dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((num_tokens, head_dim // 2), jnp.float32)
    weight = jax.ShapeDtypeStruct((head_dim,), jnp.bfloat16)

    def chain(backend, kv_cache, queries, qkv, cos, sin, weight, slots):
        one = jax.jit(partial(ops.rope_and_write_kv, backend=backend))
        queries = []  # all are results, and a barrier lies between, so that XLA does each as often as a model would
        for i in range(num_calls):
            norm = HeadNorm(weight, weight, eps=1e-6)
            q, kv_cache = one(qkv, kv_cache, slots, layer_of(i), rope=(cos, sin), norm=norm)
            qkv, kv_cache, q = jax.lax.optimization_barrier((qkv, kv_cache, q))
            queries.append(q)
        return kv_cache, queries

    def differences(caches, queries):
        """Of q the norm relative to XLA's; of the cache the largest, in last places of the head's largest number."""
        got, want = (x.astype(jnp.float32) for x in queries)
        old, new = (x.astype(jnp.float32) for x in caches)
        unit = 2.0**-7 * jnp.maximum(jnp.abs(new).max(axis=-1, keepdims=True) / 2, jnp.abs(new))
        return jnp.linalg.norm(got - want) / jnp.linalg.norm(want), jnp.max(jnp.abs(old - new) / unit)

    specs = (cache, queries, qkv, table, table, weight, jax.ShapeDtypeStruct(slots.shape, jnp.int32))
    programs = {
        "kernel": Program(partial(chain, shapes.BACKEND), specs, donated=(0, 1)),
        "xla": Program(partial(chain, "reference"), specs, donated=(0, 1)),
        "differences": Program(differences, ((cache, cache), (queries[0], queries[0]))),
        "cache": normal_program(cache.shape, jnp.bfloat16),
        "queries": Program(lambda: [jnp.zeros(q.shape, q.dtype) for q in queries]),
        "qkv": normal_program(qkv.shape, jnp.bfloat16, seed=1),
        "weight": normal_program(weight.shape, jnp.bfloat16, seed=2),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        angles = np.random.default_rng(0).uniform(0, 999, table.shape).astype(np.float32)
        tables = (jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)))
        rest = (compiled["qkv"](), *tables, compiled["weight"](), jnp.asarray(slots))
        state = {name: compiled[name](compiled["cache"](), compiled["queries"](), *rest) for name in ("kernel", "xla")}
        caches, queries = zip(*state.values(), strict=True)
        of_q, of_cache = (float(x) for x in compiled["differences"](caches, tuple(q[0] for q in queries)))
        seconds = {}
        for name in state:
            seconds[name] = seconds_a_call(compiled[name], (*state[name], *rest), carry=True) / num_calls
        rate = 2 * math.prod(qkv.shape) * 2 / seconds["kernel"] / 1e12
        row = timing_row(
            "rope and kv write", f"T={num_tokens}", seconds["kernel"], rate=rate, unit="TB/s read + written"
        )
        row |= {"xla_us": round(1e6 * seconds["xla"], 2), "of_xla": round(seconds["kernel"] / seconds["xla"], 3)}
        if shapes.ON_CARD:
            # The host takes longer for a short call than the device, so that the clock says nothing of the kernels.
            args = {name: (compiled["cache"](), compiled["queries"](), *rest) for name in seconds}
            traced = {name: device_seconds(compiled[name], args[name]) / num_calls for name in seconds}
            row |= {"device_us": round(1e6 * traced["kernel"], 2), "xla_device_us": round(1e6 * traced["xla"], 2)}
        is_right = of_q < shapes.MAX_RELATIVE_ERROR["bfloat16"] and of_cache < 4
        return row | {"relative_error": round(of_q, 6), "cache_last_places": of_cache, "is_right": is_right}

    return Measurement(f"write T={num_tokens}", programs, measure)
