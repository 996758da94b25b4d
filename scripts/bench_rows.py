"""The kernels of norms and gates, or of whole products, inside steps of many rows, against what XLA makes of these.

    PYTHONPATH=. python scripts/bench_rows.py --out rows.json
    PYTHONPATH=. python scripts/bench_rows.py --decode 64 256 --variants kernels "slots of 64 KiB" --out products.json

All layers of a model for the tokens of decode steps and of prefill steps, without the sampler: as XLA makes them, and
with kernels wherever there are some, whatever the bounds in pallas_kernels/tuning.py up to which the engine takes them:
for chains of products up to 256 rows, for norms and gates above. Steps of all variants are timed in turns, many
queued at a time, so that none has a cooler card. A trace of each then tells what took how long; times of products
depend on the card's power there, more than on these kernels. The hidden states are compared with XLA's.
"""

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
import records
import workloads
from bench_matmul import ROW_VARIANTS
from kernel_measuring import Requests
from kernel_trace import trace_kernels

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.compile_cache import compiler_options
from jaxvllm.layers import layer_context
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.weights.dummy import dummy_params
from pallas_kernels import FEW_ROWS, Kind, row_matmul_sizes, tuning

BLOCK_SIZE = 16
CONTEXT = 800
# What of tuning.H200_ROW_MATMUL is otherwise. None: all is XLA's.
VARIANTS: dict[str, dict[str, Any] | None] = {"xla": None, "kernels": {}, **ROW_VARIANTS}
ROUNDS, ROUND_S = 7, 0.06
TRACED_STEPS = 3
# Two right bfloat16 results differ by 1 to 7% after the 28 layers of Qwen3-0.6B, as rounding predicts, by 7 to 10%
# after the 32 of Llama-3.1-8B.
MAX_DIFFERENCE = 0.15
Variants = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """`num_requests` requests of `num_keys` keys, of which `new` are the step's."""

    kind: Kind
    num_requests: int
    num_keys: int
    new: int

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.new

    def requests(self) -> Requests:
        lens, new = (np.full(self.num_requests, count, np.int32) for count in (self.num_keys, self.new))
        return Requests(lens, new, BLOCK_SIZE)

    def arguments(self) -> tuple[np.ndarray, np.ndarray, AttentionMetadata]:
        """Token ids, positions and metadata."""
        requests = self.requests()
        position = np.concatenate([np.arange(self.num_keys - self.new, self.num_keys)] * self.num_requests)
        row = np.repeat(np.arange(self.num_requests), self.new)
        slots = requests.tables[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        num_decodes = np.int32(self.num_requests if self.kind == "decode" else 0)
        counts = (num_decodes, np.int32(self.num_requests), np.int32(self.num_tokens))
        arrays: Any = (slots.astype(np.int32), requests.tables, requests.lens, requests.starts, *counts)
        ids = np.random.default_rng(0).integers(10, 1000, self.num_tokens).astype(np.int32)
        return ids, position.astype(np.int32), AttentionMetadata(*arrays, kind=self.kind, backend="mosaic_gpu")


PREFILLS = (
    Step("mixed", 1, 1024, 1024),
    Step("mixed", 1, 2048, 2048),
    Step("mixed", 8, 2048, 2048),
)


def take_all_kernels() -> None:
    """Have all steps take the kernels that there are, measured to be faster or not."""
    tuning.MAX_PREFERRED_ROWS, tuning.MAX_PREFERRED_WEIGHTS_OF_ROWS = row_matmul_sizes.MAX_ROWS, sys.maxsize
    tuning.MIN_PREFERRED_ROWS = 0


def compile_all(
    config: ModelConfig, params: Any, cache: jax.ShapeDtypeStruct, steps: list[Step], variants: list[str]
) -> dict[Step, Variants]:
    """The layers of every step as each variant has them: (cache, params, ids, positions, metadata) -> cache, result."""
    model = get_model_class(config.architecture)(config, unroll_layers=True)

    def forward(kv_cache: jax.Array, params: Any, ids: jax.Array, positions: jax.Array, metadata: Any) -> tuple:
        metadata = metadata.with_work(config.num_heads, kv_cache)
        attended, kv_cache = bind(model, params)(ids, positions, kv_cache, metadata)
        return kv_cache, attended.heads  # unrolled: the last layer ends there

    take_all_kernels()
    by_shape, served = layer_context.prefers_matmul_kernel, tuning.H200_ROW_MATMUL
    jobs: dict[Step, Variants] = {step: {} for step in steps}
    with ThreadPoolExecutor(len(steps) * len(variants)) as pool:
        for variant in variants:
            changes = VARIANTS[variant]
            layer_context.prefers_matmul_kernel = (lambda *_: False) if changes is None else by_shape
            tuning.H200_ROW_MATMUL = replace(served, **(changes or {}))
            for step in steps:
                assert step.num_tokens > FEW_ROWS, "few rows have kernels of their own"
                lowered = jax.jit(partial(forward), donate_argnums=0).lower(cache, params, *step.arguments())
                jobs[step][variant] = pool.submit(lowered.compile, compiler_options("gpu"))
                jax.clear_caches()  # else the layer that was traced for another variant is taken again
    return {step: {variant: job.result() for variant, job in of_step.items()} for step, of_step in jobs.items()}


def measure(step: Step, compiled: Variants, params: Any, kv_cache: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """A row of the results, and the cache again, which each step donates and returns."""
    rest = (params, *jax.tree.map(jnp.asarray, step.arguments()))

    def run(variant: str, count: int = 1) -> jax.Array:
        nonlocal kv_cache
        hidden: Any = None
        for _ in range(count):
            kv_cache, hidden = compiled[variant](kv_cache, *rest)
        return jax.block_until_ready(hidden)

    hidden = {variant: np.asarray(run(variant, 2), np.float32) for variant in compiled}
    times: dict[str, list[float]] = {variant: [] for variant in compiled}
    count = 1
    for number in range(ROUNDS + 1):
        for variant in compiled:
            start = time.perf_counter()
            run(variant, count)
            times[variant].append((time.perf_counter() - start) / count)
        if number == 0:  # says how many fill a round
            count = max(1, round(ROUND_S / times["xla"][0]))
            times = {variant: [] for variant in compiled}
    size = np.linalg.norm(hidden["xla"])
    row: dict[str, Any] = {"step": f"{step.kind} {step.num_requests} x {step.num_keys}", "tokens": step.num_tokens}
    for variant in compiled:
        difference = float(np.linalg.norm(hidden[variant] - hidden["xla"]) / size)
        row[variant] = {"ms": round(1e3 * statistics.median(times[variant]), 4)}
        row[variant] |= {"device_ms": device_ms(partial(run, variant)), "difference": difference}
    is_right = all(row[variant]["difference"] < MAX_DIFFERENCE for variant in compiled)
    return row | {"is_right": is_right}, kv_cache


def device_ms(step: Any) -> dict[str, float]:
    """What the kernels of a step took by a trace: products, attention, the KV write, and the rest."""
    total = dict.fromkeys(("products", "attention", "rope_and_write_kv", "rest"), 0.0)
    for name, kernel in trace_kernels(step, TRACED_STEPS).items():
        if name.startswith(("nvjet", "row_matmul")) or "gemm" in name:
            part = "products"
        elif name.startswith("paged_"):
            part = "attention"
        else:
            part = "rope_and_write_kv" if name.startswith("rope_and_write_kv") else "rest"
        total[part] += kernel.us / 1e3
    return {part: round(ms, 4) for part, ms in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.MODELS, default="qwen3-0.6b")
    parser.add_argument("--decode", type=int, nargs="+", help="steps of so many requests alone; default 16, 64, 256")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["kernels"], help="beside xla")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    steps = [Step("decode", num_requests, CONTEXT, 1) for num_requests in args.decode or (16, 64, 256)]
    steps += () if args.decode else PREFILLS
    variants = ["xla", *args.variants]
    config = resolve(workloads.write_config(args.model)).config
    params = dummy_params(param_specs(get_model_class(config.architecture)(config)))
    num_blocks = max(step.requests().num_blocks for step in steps)
    cache_shape = (config.num_layers, num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    compiled = compile_all(config, params, jax.ShapeDtypeStruct(cache_shape, jnp.bfloat16), steps, variants)
    kv_cache = jnp.zeros(cache_shape, jnp.bfloat16)
    rows = []
    for step, of_step in compiled.items():
        row, kv_cache = measure(step, of_step, params, kv_cache)
        rows.append(row)
        print(json.dumps(row), flush=True)
        records.write(args.out, {"model": args.model, "rows": rows})


if __name__ == "__main__":
    main()
