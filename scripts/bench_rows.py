"""Residual sum with RMSNorm, and silu-and-mul: Pallas against XLA on one H200, each checked against the other.

    PYTHONPATH=. python scripts/bench_rows.py

Chains of 16 in one CUDA graph, between barriers so that XLA makes a kernel of each, over arrays of their own.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bench_matmul import seconds_a_call
from row_kernels import add_rms_norm, silu_and_mul

from jaxvllm.compile_cache import compiler_options
from pallas_kernels import rms_norm

COUNT = 16
HIDDEN, FFN = 1024, 3072


def xla_norm(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = x + residual
    return rms_norm(total, weight, eps=1e-6), total


def xla_silu(gate_up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]


def norm_chain(one, x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    for _ in range(COUNT):
        x, residual = jax.lax.optimization_barrier(one(x, residual, weight))
    return x, residual


def silu_chain(one, *gate_ups: jax.Array) -> list[jax.Array]:
    outs = []
    for gate_up in gate_ups:
        outs.append(one(gate_up))
        outs, gate_ups = jax.lax.optimization_barrier((outs, gate_ups))
    return outs


def compare(what: str, num_rows: int, chain, ones: dict, args: tuple, num_bytes: int) -> None:
    row = {"what": what, "rows": num_rows}
    results = {}
    for name, one in ones.items():
        options = compiler_options(jax.default_backend())
        compiled = jax.jit(partial(chain, jax.jit(one))).lower(*args).compile(compiler_options=options)
        first = args[:3] if what == "norm" else args[:1]
        results[name] = [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(one)(*first))]
        seconds = seconds_a_call(compiled, args) / COUNT
        row |= {f"{name}_us": round(1e6 * seconds, 2), f"{name}_tb_s": round(num_bytes / seconds / 1e12, 2)}
    errors = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(*results.values(), strict=True)]
    row["relative_difference"] = float(max(errors))
    print(json.dumps(row), flush=True)


def main() -> None:
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), COUNT + 3)
    for num_rows in (64, 256, 2048, 16384):
        x, residual = (draw(keys[i], (num_rows, HIDDEN)) for i in range(2))
        norms = {"xla": xla_norm, "pallas": partial(add_rms_norm, eps=1e-6)}
        compare("norm", num_rows, norm_chain, norms, (x, residual, draw(keys[2], (HIDDEN,))), 4 * x.nbytes)
        gate_ups = tuple(draw(key, (num_rows, 2, FFN)) for key in keys[3:])
        silus = {"xla": xla_silu, "pallas": silu_and_mul}
        compare("silu", num_rows, silu_chain, silus, gate_ups, gate_ups[0].nbytes * 3 // 2)


if __name__ == "__main__":
    main()
