"""How scripts/bench_kernels.py measures: programs to compile, and what to do with them.

A program runs a kernel some 16 times, each call reading what the one before wrote, over layers that do not fit the L2
cache together where the shape is large. The first call's result is compared with float64 for some requests and tokens,
and with the same call once more, bit for bit, before anything is timed.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import kernel_shapes as shapes
import numpy as np
from kernel_shapes import KernelShape
from kernel_trace import trace_kernels

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
