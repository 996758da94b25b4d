"""What the host pays to dispatch one decode step, and which form of the program makes it pay less.

    python scripts/bench_dispatch.py --out scripts/results/h200/dispatch.json      # some 90 s on one H200
    python scripts/bench_dispatch.py --model tiny                                  # a CPU: the call paths alone

Each variant of the step is timed three ways. idle: the host time of a dispatch when the device has nothing to do. busy:
the host time of a dispatch while the step before it runs; as long as a step means that dispatching waits for the
device. step: wall time of a step when 40 are dispatched back to back. Each variant's ids must equal the first one's.
A child process then reports, from XLA's own log, how many buffers of the CUDA graph changed from step to step and what
updating the graph cost; another does the same with the workspace at a fixed address (SKIP_TEMP).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
import workloads

from jaxvllm.attention_backend import choose_backend
from jaxvllm.compile_cache import compiler_options
from jaxvllm.config import find_device
from jaxvllm.device_state import DeviceState
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.step import make_step
from jaxvllm.weights.dummy import dummy_params
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey
from scheduler.plan import HEADER, ON_DEVICE, PlanLayout

BLOCK_SIZE = 16
REPEATS = 40
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 28, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
UPDATED = re.compile(r"Updated command buffer in (\d+)")
CHANGED = re.compile(r"num_commands=(\d+); updated_allocs=(\d+)")


@dataclass
class Setup:
    """One model on the device, and a decode step of `rows` requests of `context` tokens."""

    config: ModelConfig
    rows: int
    context: int
    num_blocks: int

    def __post_init__(self) -> None:
        self.bucket = BucketKey("decode", max(self.rows, 8), max(self.rows, 8))
        self.limits = BatchLimits(max(self.rows, 8), self.context + BLOCK_SIZE, BLOCK_SIZE)
        self.layout = PlanLayout.make(self.bucket, self.limits)
        config = self.config
        self.spec = KVCacheSpec(
            config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, jnp.dtype(config.dtype)
        )
        self.backend: Any = choose_backend(None, jax.devices()[0], config, self.limits)
        self.model = get_model_class(config.architecture)(config)
        if jax.devices()[0].platform == "cpu":
            self.model.unroll_layers = False

    def params(self) -> dict[str, Any]:
        return dummy_params(param_specs(self.model))

    def state(self) -> DeviceState:
        tables = np.zeros((self.limits.max_num_seqs, self.limits.max_blocks), np.int32)
        for row in range(self.rows):
            tables[row] = 1 + (row * self.limits.max_blocks + np.arange(self.limits.max_blocks)) % (self.num_blocks - 1)
        return replace(DeviceState.zeros(self.limits), block_tables=jnp.asarray(tables))

    def buffer(self) -> np.ndarray:
        buffer = self.layout.empty_buffer(self.limits.max_num_seqs)
        fields, n = self.layout.unpack(buffer), self.rows
        rows = np.arange(n)
        position = self.context - 1
        block = 1 + (rows * self.limits.max_blocks + position // BLOCK_SIZE) % (self.num_blocks - 1)
        fields["header"][:] = n
        fields["input_ids"][:n] = ON_DEVICE
        fields["positions"][:n] = position
        fields["slot_mapping"][:n] = block * BLOCK_SIZE + position % BLOCK_SIZE
        fields["query_start_loc"][: n + 1] = np.arange(n + 1)
        fields["query_start_loc"][n + 1 :] = n
        fields["seq_lens"][:n] = self.context
        fields["logits_indices"][:n] = rows
        fields["rows"][:n] = rows
        fields["needs_sample"][:n] = 1
        return buffer

    def lower(self, variant: str, params: Any) -> jax.stages.Lowered:
        settled, donated = (name in variant for name in ("settled", "ids"))
        bound: Any = partial(bind, self.model)
        backend: Any = self.backend
        step = make_step(bound, self.bucket, self.layout, backend, self.config.num_heads)

        def run(params: Any, kv_cache: jax.Array, state: DeviceState, buffer: jax.Array, *old_ids: jax.Array) -> Any:
            if settled:  # a copy that XLA cannot see through: one kernel reads the argument, the rest read the copy
                buffer = jax.lax.optimization_barrier(buffer ^ buffer[len(HEADER)])
            output, kv_cache, state = step(params, kv_cache, state, buffer)
            ids = output.token_ids
            if donated:
                ids = jnp.where(old_ids[0] == -1, old_ids[0], ids)
            return ids, kv_cache, state

        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        pool = jax.ShapeDtypeStruct(self.spec.shape(self.num_blocks), self.spec.dtype)
        ids = [jax.ShapeDtypeStruct((self.bucket.R,), jnp.int32)] if donated else []
        donate = (1, 2, 4) if donated else (1, 2)
        plan = jax.ShapeDtypeStruct((self.layout.size,), jnp.int32)
        return jax.jit(run, donate_argnums=donate).lower(shapes, pool, DeviceState.shapes(self.limits), plan, *ids)


VARIANTS: dict[str, dict[str, Any]] = {
    "as served": {},
    "settled plan": {},
    "settled plan, donated ids": {},
    "plan and ids in fixed places": {},
    "settled plan, rematerialised": {"xla_disable_hlo_passes": ""},
    "no graph": {"xla_gpu_enable_command_buffer": ""},
}


LOGGED = ["as served", "settled plan", "plan and ids in fixed places"]
RING = {"settled plan, donated ids": 3, "plan and ids in fixed places": 1}


def compile_all(setup: Setup, params: Any, names: list[str]) -> dict[str, jax.stages.Compiled]:
    """Lower in order, compile in threads."""
    options = compiler_options(jax.devices()[0].platform)
    with ThreadPoolExecutor(8) as pool:
        futures = {}
        for name in names:
            lowered = setup.lower(name, params)
            chosen = {**options, **VARIANTS[name]} if options else {}
            futures[name] = pool.submit(lowered.compile, compiler_options={k: v for k, v in chosen.items() if v != ""
                                        or k == "xla_gpu_enable_command_buffer"})  # fmt: skip
        return {name: future.result() for name, future in futures.items()}


class Runner:
    """Dispatches a program again and again, as the engine does: donated pool and rows, ids copied to the host.

    ring: buffers of ids, donated in turn; 1: also the plan is written into one buffer by a program of its own before
    the step, and the ids are copied by another behind it, so that no address in the step's graph ever changes.
    """

    def __init__(self, program: Callable[..., Any], setup: Setup, params: Any, kv_cache: jax.Array, ring: int) -> None:
        self.program, self.params, self.kv_cache, self.state = program, params, kv_cache, setup.state()
        self.buffer = setup.buffer()
        self.ring = [jnp.full((setup.bucket.R,), 0, jnp.int32) for _ in range(ring)]
        self.plan = jnp.zeros_like(self.buffer) if ring == 1 else None
        self.write = jax.jit(lambda old, new: new, donate_argnums=0, keep_unused=True)
        self.copy = jax.jit(jnp.copy)

    def __call__(self) -> jax.Array:
        old = [self.ring.pop(0)] if self.ring else []
        plan: Any = self.buffer.copy()
        if self.plan is not None:
            plan = self.plan = self.write(self.plan, plan)
        out = self.program(self.params, self.kv_cache, self.state, plan, *old)
        ids, self.kv_cache, self.state = out
        if old:
            self.ring.append(ids)
        if self.plan is not None:
            ids = self.copy(ids)
        ids.copy_to_host_async()
        return ids


def measure(run: Runner) -> dict[str, Any]:
    """Microseconds of a dispatch (idle, busy) and of a step."""
    for _ in range(4):  # graphs are made in the second run
        ids = run()
    ids.block_until_ready()
    idle, busy = [], []
    for _ in range(12):
        begin = time.perf_counter()
        ids = run()
        middle = time.perf_counter()
        ids = run()
        end = time.perf_counter()
        np.asarray(ids)
        idle.append(middle - begin)
        busy.append(end - middle)
    begin = time.perf_counter()
    pending = []
    for _ in range(REPEATS):  # two in flight
        pending.append(run())
        if len(pending) == 2:
            np.asarray(pending.pop(0))
    last = np.asarray(pending.pop())
    step = (time.perf_counter() - begin) / REPEATS
    us = {"idle_us": np.median(idle) * 1e6, "busy_us": np.median(busy) * 1e6, "step_us": step * 1e6}
    return {name: round(float(value), 1) for name, value in us.items()} | {"ids": last[:8].tolist()}


def call_paths(params: Any) -> dict[str, float]:
    """Microseconds to call a program that does nothing with these arguments: compiled ahead, and by jit's own cache."""
    # As weights lay once: an array a layer of norms.
    split = {name: tuple(leaf) if leaf.ndim == 2 and len(leaf) < 100 else leaf for name, leaf in params.items()}
    buffer = np.zeros(640, np.int32)
    result = {}
    for name, args in (("an array a layer", split), ("stacked", params)):
        jitted = jax.jit(lambda p, b: b + 1, keep_unused=True)
        compiled = jitted.lower(args, buffer).compile()
        flat = jax.tree.leaves(args)
        flat_jit = jax.jit(lambda *a: a[-1] + 1, keep_unused=True)
        flat_compiled = flat_jit.lower(*flat, buffer).compile()
        for path, call in {
            "Compiled": partial(compiled, args, buffer), "jit": partial(jitted, args, buffer),
            "Compiled, flat": partial(flat_compiled, *flat, buffer),
        }.items():  # fmt: skip
            call().block_until_ready()
            times = []
            for _ in range(60):
                begin = time.perf_counter()
                out = call()
                times.append(time.perf_counter() - begin)
                out.block_until_ready()
            result[f"{path}, {name} ({len(flat) + 1})"] = round(float(np.median(times)) * 1e6, 1)
    return result


def model_config(name: str) -> ModelConfig:
    if name != "tiny":
        return resolve(workloads.write_config(name)).config
    return ModelConfig.from_hf(workloads.MODELS["qwen3-0.6b"] | TINY | {"torch_dtype": "float32"})


def run_variants(args: argparse.Namespace, names: list[str], rows: int, context: int) -> dict[str, Any]:
    config = model_config(args.model)
    num_blocks = args.num_blocks if jax.devices()[0].platform == "gpu" else 300
    setup = Setup(config, rows, context, num_blocks)
    params = setup.params()
    programs = compile_all(setup, params, names)
    kv_cache = setup.spec.allocate(num_blocks)
    results: dict[str, Any] = {}
    for name in names:
        run = Runner(programs[name], setup, params, kv_cache, RING.get(name, 0))
        results[name] = measure(run)
        kv_cache = run.kv_cache
        print(
            f"  {rows} x {context} {name:34}" + str({k: v for k, v in results[name].items() if k != "ids"}), flush=True
        )
    first = results[names[0]]["ids"]
    assert all(r["ids"] == first for r in results.values()), f"variants disagree: {results}"
    if rows == args.rows[0]:
        results["call paths"] = call_paths(params)
        print(f"  call paths, us: {results['call paths']}", flush=True)
    return results


def child(args: argparse.Namespace, names: list[str], sizes: list[tuple[int, int]], env: dict[str, str]) -> Any:
    """Run variants in a process of their own, which has the device to itself; its results and its log."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": args.cache} | env
    command = [sys.executable, __file__, "--model", args.model, "--num-blocks", str(args.num_blocks)]
    command += ["--rows", *(str(r) for r, _ in sizes), "--context", *(str(c) for _, c in sizes), "--variants", *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    *lines, last = done.stdout.splitlines() or [""]
    print("\n".join(lines), flush=True)
    if done.returncode:
        print(done.stderr[-3000:], flush=True)
        return {"error": done.stderr[-800:]}, done.stderr
    return json.loads(last), done.stderr


def graph_updates(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Some variants in a child whose XLA logs every update of a graph."""
    flags = os.environ.get("XLA_FLAGS", "") + (f" --xla_gpu_command_buffer_update_mode={mode}" if mode else "")
    env = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3", "XLA_FLAGS": flags}
    result, log = child(args, LOGGED, [(args.rows[0], args.context[0])], env)
    micros = [int(m) for m in UPDATED.findall(log)]
    changed = [tuple(map(int, m)) for m in CHANGED.findall(log)]
    for i, name in enumerate(LOGGED):  # the log has them one after the other
        part = slice(i * len(micros) // len(LOGGED) + 8, (i + 1) * len(micros) // len(LOGGED))
        result[f"{name}, updates"] = {
            "num": len(micros[part]),
            "median_us": float(np.median(micros[part])) if micros[part] else None,
            "commands, changed buffers": changed[part][-3:],
        }
    result["log"] = [line[-170:] for line in log.splitlines() if "command buffer" in line][-6:]
    print(f"graph updates, mode {mode or 'default'}: {json.dumps(result, indent=1)}", flush=True)
    return result


def main() -> None:
    """Parse the command line and print the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*workloads.MODELS, "tiny"], default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[384, 800])
    parser.add_argument("--num-blocks", type=int, default=30_000)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="in this process, without XLA's log")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = list(zip(args.rows, args.context, strict=True))
    if args.variants:
        results = {}
        for i, (rows, context) in enumerate(sizes):
            results[f"{rows}x{context}"] = run_variants(args, args.variants if i == 0 else LOGGED, rows, context)
        print(json.dumps(results | {"device": jax.devices()[0].device_kind}))
        return
    is_gpu = find_device() == "gpu"
    with tempfile.TemporaryDirectory() as args.cache:
        results, _ = child(args, list(VARIANTS) if is_gpu else list(VARIANTS)[:5], sizes, {})
        if is_gpu:
            for mode in ("", "SKIP_TEMP"):
                results[f"graph updates {mode}".strip()] = graph_updates(args, mode)
    if args.out:
        records.write(args.out, {"model": args.model, **results})


if __name__ == "__main__":
    main()
