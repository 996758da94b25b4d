"""RMSNorm and silu-and-mul inside whole steps: as XLA makes them, and as the Pallas kernels of row_kernels.py.

    PYTHONPATH=. python scripts/bench_rows.py --out rows.json

All layers of a model for the tokens of a decode step and of two prefill steps, without the sampler: with XLA's
operations, with the norm's kernel in the place of its own, and with silu-and-mul's. Times are wall clock over many
queued steps. The hidden states of the variants are compared.
"""

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
import row_kernels
import workloads
from kernel_rows import Requests, seconds_a_call

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.compile_cache import compiler_options
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.weights.dummy import dummy_params
from pallas_kernels import FEW_ROWS, Kind, MatmulStage, as_array, reference_matmul

BLOCK_SIZE = 16
VARIANTS = ("xla", "norm", "silu")


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


STEPS = (Step("decode", 256, 800, 1), Step("mixed", 1, 2048, 2048), Step("mixed", 8, 2048, 2048))


def stages_with(variant: str, plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """reference_matmul.matmul_stages with a kernel for the norm, or for the activation, of each stage that has one."""

    def matmul_stages(x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None) -> jax.Array:
        for stage in stages:
            if stage.norm_weight is not None and variant == "norm":
                x = row_kernels.rms_norm(x, as_array(stage.norm_weight), eps=stage.eps)
                stage = replace(stage, norm_weight=None)
            if stage.is_gated and variant == "silu":
                both = MatmulStage(stage.weight.reshape(-1, stage.weight.shape[-1]), stage.norm_weight, eps=stage.eps)
                x = row_kernels.silu_and_mul(plain(x, (both,), None).reshape(len(x), 2, -1))
            else:
                x = plain(x, (stage,), residual)
            residual = x if stage.adds_residual else residual
        return x

    return matmul_stages


def step_arguments(step: Step, requests: Requests) -> tuple[np.ndarray, np.ndarray, AttentionMetadata]:
    """Token ids, positions and metadata."""
    position = np.concatenate([np.arange(step.num_keys - step.new, step.num_keys)] * step.num_requests).astype(np.int32)
    row = np.repeat(np.arange(step.num_requests), step.new)
    slots = requests.tables[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    num_decodes = np.int32(step.num_requests if step.kind == "decode" else 0)
    counts = (num_decodes, np.int32(step.num_requests), np.int32(step.num_tokens))
    arrays = (slots.astype(np.int32), requests.tables, requests.lens, requests.starts, *counts)
    ids = np.random.default_rng(0).integers(10, 1000, step.num_tokens).astype(np.int32)
    return ids, position, AttentionMetadata(*arrays, kind=step.kind, backend="mosaic_gpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.MODELS, default="qwen3-0.6b")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = resolve(workloads.write_config(args.model)).config
    model = get_model_class(config.architecture)(config, unroll_layers=True)
    specs = param_specs(model)
    params = dummy_params(specs)
    requests = [
        Requests(np.full(s.num_requests, s.num_keys, np.int32), np.full(s.num_requests, s.new, np.int32), BLOCK_SIZE)
        for s in STEPS
    ]
    num_blocks = max(r.num_blocks for r in requests)
    cache_shape = (config.num_layers, num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    plain = reference_matmul.matmul_stages

    def forward(kv_cache: jax.Array, params: Any, ids: jax.Array, positions: jax.Array, metadata: Any) -> tuple:
        metadata = metadata.with_work(config.num_heads, kv_cache)
        hidden, kv_cache = bind(model, params)(ids, positions, kv_cache, metadata)
        return kv_cache, hidden

    cache = jax.ShapeDtypeStruct(cache_shape, jnp.bfloat16)
    arguments = [step_arguments(step, of_step) for step, of_step in zip(STEPS, requests, strict=True)]
    jobs = {}
    with ThreadPoolExecutor(len(STEPS) * len(VARIANTS)) as pool:
        for variant in VARIANTS:
            reference_matmul.matmul_stages = plain if variant == "xla" else stages_with(variant, plain)
            for step, of_step in zip(STEPS, arguments, strict=True):
                assert step.num_tokens > FEW_ROWS, "few rows have kernels of their own"
                lowered = jax.jit(partial(forward), donate_argnums=0).lower(cache, params, *of_step)
                jobs[step, variant] = pool.submit(lowered.compile, compiler_options("gpu"))
                jax.clear_caches()  # else the layer that was traced for another variant is taken again
    kv_cache = jnp.zeros(cache_shape, jnp.bfloat16)
    rows = []
    for step, of_step in zip(STEPS, arguments, strict=True):
        row: dict[str, Any] = {"step": f"{step.kind} {step.num_requests} x {step.num_keys}", "tokens": step.num_tokens}
        hidden = {}
        for variant in VARIANTS:
            compiled = jobs[step, variant].result()
            rest = (params, *jax.tree.map(jnp.asarray, of_step))
            kv_cache, last = compiled(kv_cache, *rest)
            hidden[variant] = np.asarray(last, np.float32)
            seconds, kv_cache = timed(compiled, kv_cache, rest)
            row[f"{variant}_ms"] = round(1e3 * seconds, 4)
        size = np.linalg.norm(hidden["xla"])
        row |= {f"{v}_difference": float(np.linalg.norm(hidden[v] - hidden["xla"]) / size) for v in VARIANTS[1:]}
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


def timed(compiled: Any, kv_cache: jax.Array, rest: tuple) -> tuple[float, jax.Array]:
    """Seconds a step, and the cache again, which each step donates and returns."""
    latest = kv_cache

    def step() -> jax.Array:
        nonlocal latest
        latest, hidden = compiled(latest, *rest)
        return hidden

    return seconds_a_call(step, ()), latest


if __name__ == "__main__":
    main()
