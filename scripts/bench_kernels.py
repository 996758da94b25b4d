"""Check and time the Pallas kernels on one H200.

    PYTHONPATH=. python scripts/bench_kernels.py --commit $(git rev-parse HEAD)

First random ragged batches against float64, then times: wall clock over many queued calls of a program that
runs the kernel `CHAIN` times, each call reading the one before, over layers that do not fit the L2 cache together
where the shape is large. A row that fails is recorded as such and the rest goes on; sections run in processes of their
own, so that a kernel that hangs or breaks the CUDA context takes no other section with it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import kernel_shapes as shapes
import numpy as np
from kernel_checks import Check, CheckShape

from pallas_kernels import ops
from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape
from pallas_kernels.decode import paged_decode
from pallas_kernels.mosaic import attend
from pallas_kernels.prefill import paged_prefill
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.tuning import H200, AttentionConfig
from pallas_kernels.validation import Backend
from pallas_kernels.work_lists import cut_attention_work, make_decode_work, make_prefill_work

CHAIN = 16
NUM_LAYERS = 4
# Measured on this card: TB/s of a reduction over 4 GB, TFLOP/s of an 8192^3 product in bfloat16.
READ_CEILING, MATMUL_CEILING = 4.51, 806.0
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
Row = dict[str, Any]
Measure = Callable[[Any], Row]  # of the compiled program


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
    count = max(3, int(0.1 / (once / 3)))
    times = []
    for _ in range(5):
        elapsed, args = queue(count, args)
        times.append(elapsed / count)
    return statistics.median(times)


def make_cache(num_blocks: int, shape: shapes.KernelShape) -> jax.Array:
    sizes = (NUM_LAYERS, num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.cache_head_dim)
    return jax.jit(lambda: jax.random.normal(jax.random.key(0), sizes, jnp.bfloat16).astype(shape.kv_dtype))()


def make_tables(lens: tuple[int, ...], block_size: int) -> tuple[np.ndarray, int]:
    """Random block ids for each request, and the number of blocks."""
    counts = [-(-n // block_size) for n in lens]
    ids = np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    tables = np.zeros((len(lens), max(counts)), np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        tables[row, :count] = ids[end - count : end]
    return tables, sum(counts) + 1


def layer_of(i: int) -> jax.Array:
    return jnp.int32(i % NUM_LAYERS)


def specs_of(args: tuple) -> tuple:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), args)


def decode_row(shape: shapes.DecodeShape) -> tuple[Any, Measure]:
    """The lowered program of one decode measurement, and what measures it once compiled."""
    config = shape.config.decode
    tables, num_blocks = make_tables(shape.lens, shape.block_size)
    lens = jnp.asarray(shape.lens, jnp.int32)
    count = jnp.int32(len(shape.lens))
    cut = partial(make_decode_work, num_kv_heads=shape.num_kv_heads, sliding_window=shape.sliding_window, config=config)
    work = jax.jit(cut)(lens, count)
    one = jax.jit(partial(paged_decode, **shape.options(), config=config))

    def chain(q, kv_cache, tables, lens, count, work):
        for i in range(CHAIN):
            q = one(q, kv_cache, layer_of(i), tables, lens, count, work)
        return q

    q = jax.ShapeDtypeStruct((len(lens), shape.num_heads, shape.cache_head_dim), shape.dtype)
    cache = partial(make_cache, num_blocks, shape)
    rest = (jnp.asarray(tables), lens, count, work)
    lowered = jax.jit(chain).lower(q, jax.eval_shape(cache), *specs_of(rest))

    def measure(compiled: Any) -> Row:
        seconds = seconds_a_call(compiled, (jnp.ones(q.shape, q.dtype), cache(), *rest)) / CHAIN
        rate = shape.num_bytes / seconds / 1e12
        return timing_row("decode", shape.name, "default", seconds, rate=rate, unit="TB/s", ceiling=READ_CEILING)

    return lowered, measure


def prefill_arrays(shape: shapes.PrefillShape) -> tuple[np.ndarray, int, tuple]:
    lens = (shape.new + shape.cached,) * shape.num_requests
    tables, num_blocks = make_tables(lens, shape.block_size)
    starts = np.arange(shape.num_requests + 1) * shape.new
    rows = (jnp.asarray(lens, jnp.int32), jnp.asarray(starts, jnp.int32), jnp.int32(0), jnp.int32(shape.num_requests))
    return tables, num_blocks, rows


def prefill_row(shape: shapes.PrefillShape) -> tuple[Any, Measure]:
    """As decode_row. The calls alternate between two arrays as q and as the array that is written."""
    config = shape.config.prefill
    tables, num_blocks, rows = prefill_arrays(shape)
    num_tokens = shape.num_requests * shape.new
    group = shape.num_heads // shape.num_kv_heads
    work = jax.jit(partial(make_prefill_work, num_tokens=num_tokens, group_size=group, config=config))(*rows)
    one = jax.jit(partial(paged_prefill, **shape.options(), config=config))

    def chain(q, out, kv_cache, tables, work):
        for i in range(CHAIN):
            q, out = one(q, kv_cache, layer_of(i), tables, out, work), q
        return q, out

    q = jax.ShapeDtypeStruct((num_tokens, shape.num_heads, shape.cache_head_dim), shape.dtype)
    cache = partial(make_cache, num_blocks, shape)
    rest = (jnp.asarray(tables), work)
    lowered = jax.jit(chain, donate_argnums=(0, 1)).lower(q, q, jax.eval_shape(cache), *specs_of(rest))

    def measure(compiled: Any) -> Row:
        arrays = [jax.random.normal(jax.random.key(i), q.shape, q.dtype) for i in range(2)]
        seconds = seconds_a_call(compiled, (*arrays, cache(), *rest), carry=True) / CHAIN
        rate = shape.flops / seconds / 1e12
        return timing_row("prefill", shape.name, "default", seconds, rate=rate, unit="TFLOP/s", ceiling=MATMUL_CEILING)

    return lowered, measure


def mixed_row(name: str, num_decodes: int, new: int, config: AttentionConfig) -> tuple[Any, Measure]:
    """A whole mixed step's attention: `num_decodes` requests of 800 keys, and a first chunk of `new` tokens."""
    lens = (800,) * num_decodes + ((new,) if new else ())
    tables, num_blocks = make_tables(lens, 16)
    num_tokens = num_decodes + new
    starts = np.concatenate([np.arange(num_decodes + 1), [num_tokens] if new else []]).astype(np.int32)
    rows = (jnp.asarray(lens, jnp.int32), jnp.asarray(starts), jnp.int32(num_decodes), jnp.int32(len(lens)))
    sizes = {"kind": "mixed" if new else "decode", "num_tokens": num_tokens, "num_heads": 32, "num_kv_heads": 8}
    work = jax.jit(partial(cut_attention_work, **sizes, config=config))(*rows)
    one = jax.jit(partial(attend, scale=128**-0.5, config=config))

    def chain(q, kv_cache, tables, lens, starts, work):
        for i in range(CHAIN):
            q = one(q, kv_cache, layer_of(i), tables, lens, starts, work)
        return q

    q = jax.ShapeDtypeStruct((num_tokens, 32, 128), jnp.bfloat16)
    cache = partial(make_cache, num_blocks, shapes.KernelShape("", 32, 8))
    rest = (jnp.asarray(tables), *rows[:2], work)
    lowered = jax.jit(chain).lower(q, jax.eval_shape(cache), *specs_of(rest))

    def measure(compiled: Any) -> Row:
        args = (jnp.ones(q.shape, q.dtype), cache(), *rest)
        return timing_row("mixed", name, "default", seconds_a_call(compiled, args) / CHAIN)

    return lowered, measure


def work_row(num_tokens: int, num_rows: int, kind: str) -> tuple[Any, Measure]:
    """The work lists of a step, which come once a step and not once a layer."""
    sizes = {"kind": kind, "num_tokens": num_tokens, "num_heads": 32, "num_kv_heads": 8, "config": H200}
    lens = jnp.full((num_rows,), max(num_tokens // num_rows, 1), jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * (num_tokens // num_rows)

    def chain(lens, starts, num_decodes, num_reqs):
        for _ in range(CHAIN):
            work = cut_attention_work(lens, starts, num_decodes, num_reqs, **sizes)
            lens = lens + work.decode[0].arrivals[0]
            lens = lens if work.prefill is None else lens + jnp.minimum(work.prefill.tiles[1, 0], 0)
        return lens

    args = (lens, starts, jnp.int32(0), jnp.int32(num_rows))
    lowered = jax.jit(chain).lower(*args)
    name = f"{kind} T={num_tokens} R={num_rows}"
    return lowered, lambda compiled: timing_row("work lists", name, "default", seconds_a_call(compiled, args) / CHAIN)


def write_row(num_tokens: int, backend: Backend) -> tuple[Any, Measure]:
    """Norm, rope and KV write of 16 / 8 heads of 128: scattered slots up to 256 tokens, whole blocks above."""
    num_blocks, block_size, heads, group, head_dim = 4096, 16, 8, 2, 128
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.arange(1, num_blocks))
    token = np.arange(num_tokens)
    is_decode = num_tokens <= 256
    slot = blocks[token] * block_size + 5 if is_decode else blocks[token // 16] * block_size + token % 16
    one = jax.jit(partial(ops.rope_and_write_kv, backend=backend))

    def chain(kv_cache, queries, qkv, table, weight, slots):
        queries = []  # all are results, and a barrier lies between, so that XLA does each as often as a model would
        for i in range(CHAIN):
            norm = HeadNorm(weight, weight, eps=1e-6)
            q, kv_cache = one(qkv, kv_cache, slots, layer_of(i), rope=(table, table), norm=norm)
            qkv, kv_cache, q = jax.lax.optimization_barrier((qkv, kv_cache, q))
            queries.append(q)
        return kv_cache, queries

    qkv = jnp.ones((num_tokens, heads, group + 2, head_dim), jnp.bfloat16)
    table, weight = jnp.full((num_tokens, head_dim // 2), 0.7), jnp.ones((head_dim,), jnp.bfloat16)
    rest = (qkv, table, weight, jnp.asarray(slot, jnp.int32))
    cache = partial(make_cache, num_blocks, shapes.KernelShape("", heads * group, heads, head_dim, block_size))
    queries = [jax.ShapeDtypeStruct((num_tokens, heads * group, head_dim), jnp.bfloat16)] * CHAIN
    lowered = jax.jit(chain, donate_argnums=(0, 1), keep_unused=True).lower(
        jax.eval_shape(cache), queries, *specs_of(rest)
    )

    def measure(compiled: Any) -> Row:
        buffers = [jnp.zeros(q.shape, q.dtype) for q in queries]
        seconds = seconds_a_call(compiled, (cache(), buffers, *rest), carry=True) / CHAIN
        rate = 2 * qkv.nbytes / seconds / 1e12
        return timing_row(
            "rope and kv write", f"T={num_tokens}", backend, seconds, rate=rate, unit="TB/s read + written"
        )

    return lowered, measure


def timing_row(kernel: str, shape: str, config: str, seconds: float, ceiling: float | None = None, **rates: Any) -> Row:
    row: Row = {"kernel": kernel, "shape": shape, "config": config, "us": round(seconds * 1e6, 2), **rates}
    if ceiling is not None:
        row["of_ceiling"] = round(row["rate"] / ceiling, 3)
    anchor = shapes.flash_attention_3_us(shape)
    if anchor is not None:
        row |= {"fa3_us": anchor, "fa3_ratio": round(anchor / row["us"], 3)}
    return row


Plan = list[tuple[str, Callable[[], tuple[Any, Measure]]]]


def plan_rows(section: str) -> Plan:
    """What a section times, the most wanted first."""
    rows: Plan = []
    backends: tuple[Backend, ...] = ("mosaic_gpu", "reference")
    if section == "decode":
        rows += [(shape.name, partial(decode_row, shape)) for shape in shapes.DECODE_SHAPES]
        for num_tokens in shapes.WRITE_TOKENS:
            for backend in backends:
                rows.append((f"write T={num_tokens} {backend}", partial(write_row, num_tokens, backend)))
    if section == "prefill":
        rows += [(shape.name, partial(prefill_row, shape)) for shape in shapes.PREFILL_SHAPES]
        for name, num_decodes, new in (("200x800 + 2048", 200, 2048), ("200x800", 200, 0), ("2048", 0, 2048)):
            rows.append((name, partial(mixed_row, name, num_decodes, new, H200)))
        for sizes in ((1, 1, "decode"), (256, 256, "decode"), (2048, 256, "mixed"), (16384, 1024, "mixed")):
            rows.append((f"work {sizes}", partial(work_row, *sizes)))
    if section == "breadth":
        for decode, prefill in zip(shapes.BREADTH_DECODE_SHAPES, shapes.BREADTH_PREFILL_SHAPES, strict=True):
            rows.append((decode.name, partial(decode_row, decode)))
            rows.append((prefill.name, partial(prefill_row, prefill)))
    return rows


def plan_checks(section: str) -> list[tuple[CheckShape, int]]:
    """Shapes to check and the number of batches: 100 of the usual ones, and 100 over all that models may want."""
    heads = {shape.name: shape for shape in HEAD_SHAPES}
    qwen3, llama, smollm2, qwen2 = (heads[n] for n in ("qwen3-0.6b", "llama-3.1-8b", "smollm2-135m", "qwen2-7b"))
    if section == "check":
        mixed = [(qwen3, 16), (llama, 16), (smollm2, 16), (qwen2, 16)]
        mixed += [(HeadShape("1 of 128", 4, 4, 128), 32), (HeadShape("8 of 64", 16, 2, 64), 64)]
        rows = [(CheckShape(h, "mixed", 1024, 32, block_size), 12) for h, block_size in mixed]
        rows.append((CheckShape(qwen3, "decode", 64, 64, max_len=20000, num_blocks=8000), 12))
        rows.append((CheckShape(qwen2, "decode", 64, 64, 128, max_len=20000, num_blocks=1000), 10))
        rows.append((CheckShape(smollm2, "mixed", 16, 8, max_len=20000, num_blocks=4000), 6))
        return rows
    if section != "check breadth":
        return []
    gemma = {"sliding_window": 300, "soft_cap": 50.0}
    shapes_of_options = [
        (llama, {"cache_dtype": shapes.FP8}),
        (smollm2, {"cache_dtype": shapes.FP8, "block_size": 32, **gemma, "has_sinks": True}),
        (HeadShape("gemma", 8, 4, 256), {"cache_dtype": shapes.FP8}),
        (HeadShape("gemma", 8, 4, 256), gemma),
        (llama, {"sliding_window": 100, "has_sinks": True}),
        (HeadShape("group 3", 9, 3, 128), {"has_sinks": True, "block_size": 64}),
        (qwen3, {"dtype": "float16", "soft_cap": 20.0}),
        (HeadShape("phi-2", 8, 8, 80), {}),
        (HeadShape("group 5", 5, 1, 96), {"dtype": "float16"}),
        (HeadShape("group 12", 24, 2, 128), {"has_sinks": True}),
        (HeadShape("group 16", 32, 2, 128), {"cache_dtype": shapes.FP8, "block_size": 128}),
    ]
    checks: list[tuple[CheckShape, int]] = []
    for h, options in shapes_of_options:
        checks.append((CheckShape(h, "mixed", 512, 16, num_blocks=1500, **options), 8))
    return checks


class Results:
    """The rows so far, written out after each; a section goes on where the one before ended."""

    def __init__(self, path: Path):
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text())

    def add(self, kind: str, row: Row) -> None:
        self.data[kind].append(row)
        self.path.write_text(json.dumps(self.data, indent=1))
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"


def run_checks(section: str, results: Results) -> None:
    with ThreadPoolExecutor(12) as pool:
        plan = plan_checks(section)
        jobs = [pool.submit(Check.compile, shape, seed) for seed, (shape, _) in enumerate(plan)]
        for seed, (shape, num_batches) in enumerate(plan):
            start = time.monotonic()
            try:
                row = jobs[seed].result().run(num_batches, seed)
            except Exception as error:  # one broken shape must not hide the others
                traceback.print_exc()
                row = {"check": shape.name, "failed": failure(error)}
            results.add("checks", {"seconds": round(time.monotonic() - start, 1), **row})


def run_timings(section: str, results: Results, only: str, limit_s: float) -> None:
    """Lower one after the other for half of the time, compile in threads, measure when nothing else runs."""
    start = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        jobs = []
        for name, make in plan_rows(section):
            if only not in name:
                continue
            if time.monotonic() - start > limit_s / 2:
                results.add("rows", {"shape": name, "failed": "no time left"})
                continue
            try:
                lowered, measure = make()
                jobs.append((name, pool.submit(lowered.compile, COMPILER_OPTIONS), measure))
            except Exception as error:
                results.add("rows", {"shape": name, "failed": failure(error)})
        wait([job for _, job, _ in jobs])
        for name, job, measure in jobs:
            try:
                results.add("rows", measure(job.result()))
            except Exception as error:
                results.add("rows", {"shape": name, "failed": failure(error)})


def gpu_and_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "none"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


# Seconds after which a section is given up.
SECTIONS = {"check": 150, "decode": 120, "prefill": 120, "check breadth": 150, "breadth": 150}


def run_all(args: argparse.Namespace) -> None:
    """Each section in a process; this one never touches the device."""
    data = {
        "commit": args.commit,
        "jax": jax.__version__,
        "gpu": gpu_and_driver(),
        "config": asdict(H200),
        "checks": [],
        "rows": [],
        "sections": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(data, indent=1))
    begin = time.monotonic()
    for section, limit in SECTIONS.items():
        if args.sections and section not in args.sections.split(","):
            continue
        limit = min(limit, args.budget_s - (time.monotonic() - begin))
        command = [sys.executable, __file__, "--section", section, "--out", str(args.out), "--only", args.only]
        command += ["--budget-s", str(limit)]
        start = time.monotonic()
        try:
            end = (
                f"exit {subprocess.run(command, timeout=limit, check=False).returncode}"
                if limit > 10
                else "no time left"
            )
        except subprocess.TimeoutExpired:
            end = "timed out"
        data = json.loads(args.out.read_text())
        data["sections"][section] = f"{end}, {time.monotonic() - start:.0f} s"
        args.out.write_text(json.dumps(data, indent=1))
    passed = sum(row.get("passed", 0) for row in data["checks"])
    total = sum(row.get("batches", 1) for row in data["checks"])
    print(f"{passed} of {total} batches right; {data['sections']}; {args.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown", help="what the results are of")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200" / "kernels.json")
    parser.add_argument("--sections", default="", help=f"comma separated, of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--only", default="", help="time only rows whose name contains this")
    parser.add_argument("--budget-s", type=float, default=355, help="no section runs past this many seconds")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.section:
        run_all(args)
        return
    results = Results(args.out)
    run_checks(args.section, results)
    run_timings(args.section, results, args.only, args.budget_s)


if __name__ == "__main__":
    main()
