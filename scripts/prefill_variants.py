"""Time variants of the prefill kernel on one H200, each checked against float32. An experiment's script.

    PYTHONPATH=.:scripts python scripts/prefill_variants.py [--budget-s 75] [--only NAME,NAME] [--out FILE]

Each variant has a process of its own, which compiles while the others do and is killed if it takes too long.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"

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
    "zero": {},
    "late": BETTER,
    "qreg": BETTER | {"q_in_registers": True},
    "late+pack": BETTER | {"late_pack": True},
    "lazy": {"late_sum": True, "lazy_rescale": True},
    "qreg+lazy": BETTER | {"q_in_registers": True, "lazy_rescale": True},
    "turns": BETTER | {"turns": True},
    "qreg+turns": BETTER | {"q_in_registers": True, "turns": True},
    "cluster": BETTER | {"cluster": 2},
    "qreg+cluster": BETTER | {"q_in_registers": True, "cluster": 2},
}
SHAPES = (
    shapes._prefill(1, 8192, 0, 32),
    shapes._prefill(1, 2048, 6144, 32),
    shapes._prefill(8, 1024, 0, 32),
)


class Clock:
    """SM clock in MHz and power in W while something runs."""

    def __init__(self):
        self.samples = []
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "25"]
        self.process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        for line in self.process.stdout:
            try:
                self.samples.append((time.monotonic(), *map(float, line.split(","))))
            except ValueError:
                return

    def between(self, begin, end):
        rows = [s[1:] for s in self.samples if begin + 0.1 < s[0] < end]
        return [round(statistics.mean(column)) for column in zip(*rows, strict=True)] if rows else []


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
    for _ in range(3):
        seconds, q, out = queue(max(8, int(0.07 / once)), q, out)
        times.append(seconds)
    return statistics.median(times)


def say(**row):
    print(json.dumps(row), flush=True)


class Prepared:
    """A compiled variant for one shape, and its data."""

    def __init__(self, name, shape, layers):
        lowered, self.tables, self.work, spec, make = lower(name, shape)
        self.function, self.shape, self.layers = lowered.compile(bench.COMPILER_OPTIONS), shape, layers
        self.cache, self.q = make(), jax.random.normal(jax.random.key(5), spec.shape, spec.dtype)
        self.tokens = jnp.asarray(np.random.default_rng(0).integers(0, spec.shape[0], 64))
        # Some keys are large, so that maxima jump.
        self.hard = self.cache.at[:, ::7, 0, :, 3].multiply(20)
        self.pick = jax.jit(lambda x: x[self.tokens].astype(jnp.float32))
        jax.block_until_ready((self.q + 0, self.q + 1, self.q * jnp.nan, self.pick(self.q)))

    def results(self):
        for cache in (self.cache, self.hard):
            out = self.function(self.q, self.q * jnp.nan, cache, self.layers[1], self.tables, self.work)
            yield np.asarray(self.pick(out))

    def wanted(self):
        one = jax.jit(partial(reference, shape=self.shape, rows=self.tokens, layer=1))
        return [np.asarray(one(self.q, cache, self.tables)) for cache in (self.cache, self.hard)]


def child(name, folder):
    begin = time.monotonic()
    layers = [jnp.int32(i) for i in range(bench.NUM_LAYERS)]
    prepared = []
    for n, shape in enumerate(SHAPES):
        prepared.append(Prepared(name, shape, layers))
        if name == "before":
            np.save(folder / f"{n}.npy", np.stack(prepared[-1].wanted()))
    say(ready=name, seconds=round(time.monotonic() - begin, 1))
    for line in sys.stdin:
        if line.strip() == "check":
            for n, p in enumerate(prepared):
                say(checking=p.shape.name)
                path = folder / f"{n}.npy"
                wants = np.load(path) if path.exists() else [np.full(1, np.nan)] * 2
                errors = [np.linalg.norm(g - w) / np.linalg.norm(w) for g, w in zip(p.results(), wants, strict=True)]
                say(variant=name, shape=p.shape.name, errors=[float(f"{e:.3g}") for e in errors])
        if line.strip() == "time":
            for n, p in enumerate(prepared):
                for swap in (False, True) if n == 0 else (False,):
                    start = time.monotonic()
                    us = timed(p.function, p.q, p.cache, layers, p.tables, p.work, swap) * 1e6
                    span = (start, time.monotonic())
                    say(variant=name, shape=p.shape.name, swapped=swap, us=round(us, 1), span=span)
        say(done=line.strip())
    os._exit(0)


class Child:
    def __init__(self, name, folder, clock):
        self.clock = clock
        command = [sys.executable, "-u", __file__, "--child", name, "--folder", str(folder)]
        self.name, self.alive = name, True
        self.errors = open(folder / f"{name}.err", "w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.buffer = b""

    def tell(self, word):
        if self.alive:
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, until, deadline, rows):
        """Print what it says until a row has the key; kill it where that does not come in time."""
        while self.alive:
            while b"\n" in self.buffer:
                line, self.buffer = self.buffer.split(b"\n", 1)
                row = json.loads(line) if line.startswith(b"{") else {"text": line.decode()}
                if "span" in row:
                    row["mhz_and_watt"] = self.clock.between(*row.pop("span"))
                print(f"{self.name:14} {row}", flush=True)
                rows.append(row)
                if until in row:
                    return
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.end(f"no answer in time before {until!r}")
                return
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                self.end("it ended")
            self.buffer += data

    def end(self, why):
        self.alive = False
        self.process.kill()
        self.errors.seek(0)
        print(f"{self.name:14} KILLED: {why}; {self.errors.read()[-700:]}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget-s", type=float, default=75)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("prefill_variants.json"))
    parser.add_argument("--child")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder)
    end = time.monotonic() + args.budget_s
    names = [n for n in VARIANTS if not args.only or n in args.only.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        children = [Child(name, Path(folder), clock) for name in names]
        try:
            ready_by = time.monotonic() + args.budget_s * 0.65
            for c in children:
                c.hear("ready", ready_by, rows)
            print(f"ready {end - time.monotonic():.0f} s before the end", flush=True)
            risky = [c for c in children if "turns" in c.name or "cluster" in c.name]
            sure = [c for c in children if c not in risky]
            plan = (
                (sure, "check"),
                (sure, "time"),
                (sure, "time"),
                (risky, "check"),
                (risky, "time"),
                (children, "time"),
            )
            for group, word in plan:
                for c in group:
                    if c.alive and time.monotonic() < end - 2:
                        print(f"{c.name:14} begins: {word}", flush=True)
                        c.tell(word)
                        c.hear("done", min(time.monotonic() + 8, end), rows)
                        args.out.write_text(json.dumps(rows, indent=1))
        finally:
            clock.process.kill()
            for c in children:
                c.process.kill()
    times = {}
    for row in rows:
        if "us" in row:
            times.setdefault((row["shape"], row["swapped"]), {}).setdefault(row["variant"], []).append(row["us"])
    for (shape, swapped), of_variant in times.items():
        print(shape, "swapped" if swapped else "")
        for name, us in of_variant.items():
            print(f"    {name:14} {us}")
    print("end", flush=True)


if __name__ == "__main__":
    main()
