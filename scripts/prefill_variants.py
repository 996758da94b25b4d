"""Time variants of the prefill kernel on one H200, each checked against float32. An experiment's script.

    PYTHONPATH=.:scripts python scripts/prefill_variants.py [--budget-s 85] [--only NAME,NAME]
"""

import argparse
import os
import statistics
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")

import bench_kernels as bench
import jax
import jax.numpy as jnp
import kernel_shapes as shapes
import numpy as np
import prefill_before

from pallas_kernels.prefill import paged_prefill
from pallas_kernels.work_lists import make_prefill_work

BETTER = {"late_sum": True, "late_rescale": True}
VARIANTS = {
    "before": None,
    "late": BETTER,
    "qreg": BETTER | {"q_in_registers": True},
    "qreg+cluster": BETTER | {"q_in_registers": True, "cluster": 2},
    "zero": {},
    "late+pack": BETTER | {"late_pack": True},
    "lazy": {"late_sum": True, "lazy_rescale": True},
    "late+lazy": BETTER | {"lazy_rescale": True},
    "turns": BETTER | {"turns": True},
    "cluster": BETTER | {"cluster": 2},
}
SHAPES = (
    shapes._prefill(1, 8192, 0, 32),
    shapes._prefill(1, 2048, 6144, 32),
    shapes._prefill(8, 1024, 0, 32),
)


class Clock:
    """SM clock in MHz and power in W while something runs."""

    def __init__(self):
        self.samples, self.stop = [], False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "20"]
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            self.samples.append((time.monotonic(), *map(float, line.split(","))))
            if self.stop:
                break
        process.kill()

    def between(self, begin, end):
        rows = [s[1:] for s in self.samples if begin + 0.15 < s[0] < end]
        return tuple(round(statistics.mean(column)) for column in zip(*rows, strict=True)) if rows else (0, 0)


def reference(q, cache, tables, layer, shape, rows):
    """float32 results of a few tokens: [len(rows), N, H]."""
    length, group = shape.new + shape.cached, shape.num_heads // shape.num_kv_heads

    def one(token):
        request, position = token // shape.new, token % shape.new + shape.cached
        blocks = cache[layer][tables[request]]  # [blocks, 2, K, block, H]
        k, v = (blocks[:, i].swapaxes(0, 1).reshape(shape.num_kv_heads, -1, shape.head_dim) for i in range(2))
        queries = q[token].reshape(shape.num_kv_heads, group, -1).astype(jnp.float32)
        scores = jnp.einsum("kgh,kth->kgt", queries, k.astype(jnp.float32), precision="highest")
        seen = jnp.arange(k.shape[1]) <= position
        p = jax.nn.softmax(jnp.where(seen, scores * shape.head_dim**-0.5, -jnp.inf), axis=-1)
        p = jnp.where(seen, p, 0)
        v = jnp.where(seen[:, None], v.astype(jnp.float32), 0)
        out = jnp.einsum("kgt,kth->kgh", p, v, precision="highest")
        return out.reshape(shape.num_heads, -1)

    assert length <= tables.shape[1] * shape.block_size
    return jax.lax.map(one, rows)


def lower(name, shape):
    options = VARIANTS[name]
    config = shape.config.prefill if options is None else replace(shape.config.prefill, **options)
    kernel = prefill_before.paged_prefill if options is None else paged_prefill
    tables, num_blocks, rows = bench.prefill_arrays(shape)
    num_tokens = shape.num_requests * shape.new
    group = shape.num_heads // shape.num_kv_heads
    work = jax.jit(partial(make_prefill_work, num_tokens=num_tokens, group_size=group, config=config))(*rows)
    q = jax.ShapeDtypeStruct((num_tokens, shape.num_heads, shape.cache_head_dim), shape.dtype)
    cache = partial(bench.make_cache, num_blocks, shape)

    def call(q, out, kv_cache, layer, tables, work):
        return kernel(q, kv_cache, layer, tables, out, work, **shape.options(), config=config)

    specs = (q, q, jax.eval_shape(cache), *bench.specs_of((jnp.int32(0), tables, work)))
    return jax.jit(call, donate_argnums=1).lower(*specs), jnp.asarray(tables), work, q, cache


def timed(function, q, cache, layers, tables, work, swap):
    """Seconds of one call. `swap`: results become the next queries, so that weights are nearly uniform."""
    out = q + 1

    def queue(count, q, out):
        start = time.perf_counter()
        for i in range(count):
            new = function(q, out, cache, layers[i % len(layers)], tables, work)
            q, out = (new, q) if swap else (q, new)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / count, q, out

    q = q + 0
    once, q, out = queue(20, q, out)
    times = []
    for _ in range(4):
        seconds, q, out = queue(max(8, int(0.08 / once)), q, out)
        times.append(seconds)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget-s", type=float, default=85)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    begin = time.monotonic()
    names = [n for n in VARIANTS if not args.only or n in args.only.split(",")]
    layers = [jnp.int32(i) for i in range(bench.NUM_LAYERS)]
    with ThreadPoolExecutor(14) as pool:
        jobs = {}
        for shape in SHAPES:
            for name in names:
                if time.monotonic() - begin > args.budget_s * 0.45:
                    continue
                try:
                    lowered, *rest = lower(name, shape)
                    jobs[shape, name] = pool.submit(lowered.compile, bench.COMPILER_OPTIONS), rest
                except Exception as error:
                    print(name, shape.name, "lowering failed:", str(error)[:600], flush=True)
        compiled = {}
        for key, (job, rest) in jobs.items():
            try:
                compiled[key] = job.result(), rest
            except Exception as error:
                print(key[1], key[0].name, "compiling failed:", str(error)[:300], flush=True)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    clock = Clock()
    for shape in SHAPES:
        mine = {name: value for (s, name), value in compiled.items() if s is shape}
        if not mine:
            continue
        _, (tables, _, spec, make) = next(iter(mine.values()))
        cache, q = make(), jax.random.normal(jax.random.key(5), spec.shape, spec.dtype)
        # Keys that grow, and a few large ones, so that maxima jump.
        tokens = np.random.default_rng(0).integers(0, spec.shape[0], 96)
        wanted = jax.jit(partial(reference, shape=shape, rows=jnp.asarray(tokens), layer=1))
        hard = jax.jit(lambda c: c * (1 + 15 * (jax.random.uniform(jax.random.key(9), c.shape[1:5])[None, ..., None] > 0.99)).astype(c.dtype))(cache)
        wants = [np.asarray(wanted(q, c, tables)) for c in (cache, hard)]
        errors = {}
        for name, (function, (_, work, _, _)) in mine.items():
            for c, want in zip((cache, hard), wants, strict=True):
                got = np.asarray(function(q, q * jnp.nan, c, layers[1], tables, work)[tokens], np.float32)
                error = np.linalg.norm(got - want) / np.linalg.norm(want)
                errors.setdefault(name, []).append(f"{error:.2g}")
        del hard
        rows = {name: {False: [], True: []} for name in mine}
        clocks = {}
        for _ in range(2):
            for swap in (False, True) if shape is SHAPES[0] else (False,):
                for name, (function, (_, work, _, _)) in mine.items():
                    if time.monotonic() - begin > args.budget_s:
                        break
                    start = time.monotonic()
                    rows[name][swap].append(timed(function, q, cache, layers, tables, work, swap) * 1e6)
                    if not swap:
                        clocks[name] = clock.between(start, time.monotonic())
        for name, times in rows.items():
            same, swapped = ([f"{t:.1f}" for t in times[s]] for s in (False, True))
            print(f"{shape.name:42} {name:14} us {same} swapped {swapped} MHz, W {clocks.get(name)} errors {errors[name]}", flush=True)
    clock.stop = True
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
