"""Check and time the kernels of products against XLA on one H200: single products and whole layers without attention.

    timeout 150 env PYTHONPATH=. python scripts/bench_matmul.py --out matmul.json
    timeout 580 env PYTHONPATH=. python scripts/bench_matmul.py --rows 16 64 128 256 --out row_matmul.json

The first line is about the kernels of 8 rows, the second one about those of 16 to 256; a row takes some 4 s.

Times are wall clock over many queued calls of one program that runs a chain of layers, each with weights of its own, so
that nothing stays in the L2 cache; with the compiler options of the engine it is one CUDA graph, as a step is. Between
two products lies what feeds one's result to the next, the same for all variants. Every variant is checked against
float64 before it is timed, with NaN in pad rows, and has to give the same bits twice.
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
import records

from jaxvllm.compile_cache import compiler_options
from pallas_kernels import FEW_ROWS
from pallas_kernels.arg_specs import LAYER_SHAPES, LayerShape
from pallas_kernels.common import zero_arrivals
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.reference_matmul import matmul_stages as reference_stages
from pallas_kernels.row_matmul import matmul_stages as row_stages
from pallas_kernels.skinny_matmul import matmul_stages
from pallas_kernels.tuning import H200_MATMUL, H200_ROW_MATMUL

MAX_RELATIVE_ERROR = 1e-2
Params = dict[str, Any]
Layer = Callable[[jax.Array, jax.Array, Params, jax.Array], tuple[jax.Array, jax.Array]]
# Of x, stages, residual and arrivals.
Run = Callable[..., tuple[jax.Array, ...]]


MODELS = {shape.name: shape for shape in LAYER_SHAPES}
# In the order of a kernel: the last one is the next layer's.
LAYER = ("o", "gate_up", "down", "qkv")
# More weights than the L2 cache holds, and few enough to compile fast.
NUM_LAYERS = {"qwen3-0.6b": 8, "smollm2-135m": 30, "qwen3-1.7b": 6, "llama-3.1-8b": 4}


def make_params(shape: LayerShape) -> Params:
    """Weights [L, out, in], stacked by layer; norms one array a layer, as the engine keeps them."""

    def draw(seed: int, *sizes: int) -> jax.Array:
        scale = sizes[-1] ** -0.5
        make = jax.jit(lambda key: jax.random.normal(key, (NUM_LAYERS[shape.name], *sizes), jnp.bfloat16) * scale)
        return make(jax.random.key(seed))

    norm = jax.random.uniform(jax.random.key(9), (2, NUM_LAYERS[shape.name], shape.hidden), jnp.bfloat16, 0.5, 1.5)
    return {
        "qkv": draw(0, shape.qkv, shape.hidden),
        "o": draw(1, shape.hidden, shape.attended),
        "gate_up": draw(2, 2, shape.ffn, shape.hidden),
        "down": draw(3, shape.hidden, shape.ffn),
        "norm": list(norm[0]),
        "post_norm": list(norm[1]),
    }


def stages_of(params: Params) -> dict[str, MatmulStage]:
    norm = partial(MatmulStage, eps=1e-6)
    return {
        "qkv": norm(params["qkv"], norm_weight=params["norm"]),
        "o": MatmulStage(params["o"], adds_residual=True),
        "gate_up": norm(params["gate_up"], norm_weight=params["post_norm"], activation="silu"),
        "down": MatmulStage(params["down"], adds_residual=True),
    }


def layer_xla(x: jax.Array, attended: jax.Array, params: Params, arrivals: jax.Array) -> tuple:
    """What XLA makes of it."""
    stages = stages_of(params)
    *_, x, qkv = reference_stages(attended, tuple(stages[name] for name in LAYER), x)
    return x, qkv


def layer_kernels(
    x: jax.Array, attended: jax.Array, params: Params, arrivals: jax.Array, *, run: Run, splits: int
) -> tuple:
    """One call for attention's end, the feed-forward and the norm and qkv behind it; or `splits` calls more."""
    stages = stages_of(params)
    tail, qkv = tuple(stages[name] for name in LAYER[:-1]), (stages["qkv"],)
    if splits == 0:
        *_, x, out = run(attended, (*tail, *qkv), x, arrivals)
        return x, out
    x = run(attended, tail, x, arrivals)[-1]
    return x, run(x, qkv, None, arrivals)[-1]


def chain_of_layers(layer: Layer, shape: LayerShape, x: jax.Array, params: Params) -> jax.Array:
    """All layers; a slice of each layer's qkv stands for attention."""
    arrivals = zero_arrivals()
    one = jax.jit(layer)
    attended = jnp.tile(x, (1, -(-shape.attended // shape.hidden)))[:, : shape.attended]
    for i in range(NUM_LAYERS[shape.name]):
        x, qkv = one(x, attended, jax.tree.map(lambda w, i=i: w[i], params, is_leaf=_is_leaf), arrivals)
        attended = jax.lax.optimization_barrier(qkv[:, : shape.attended])
    return x


def _is_leaf(node: Any) -> bool:
    return not isinstance(node, dict)


def chain_of_one(name: str, run: Run, shape: LayerShape, x: jax.Array, params: Params) -> jax.Array:
    """One of the four products in every layer; its result, cut or repeated, is the next one's input."""
    arrivals = zero_arrivals()
    one = jax.jit(run)
    inputs = params[name].shape[-1]
    residual = x
    x = jnp.tile(x, (1, -(-inputs // x.shape[1])))[:, :inputs]
    for i in range(NUM_LAYERS[shape.name]):
        stage = stages_of(jax.tree.map(lambda w, i=i: w[i], params, is_leaf=_is_leaf))[name]
        out = one(x, (stage,), residual if stage.adds_residual else None, arrivals)[-1]
        x = jax.lax.optimization_barrier(jnp.tile(out, (1, -(-inputs // out.shape[1])))[:, :inputs])
    return x


def run_xla(x: jax.Array, stages: tuple, residual: jax.Array | None, arrivals: jax.Array) -> tuple[jax.Array, ...]:
    return reference_stages(x, stages, residual)


def in_out(params: Params) -> Params:
    """The same weights stored [L, in, ..., out]."""
    move = jax.jit(lambda w: jnp.moveaxis(w, -1, 1))
    return {k: v if isinstance(v, list) else move(v) for k, v in params.items()}


def with_in_out(chain: Callable[[jax.Array, Params], jax.Array], x: jax.Array, params: Params) -> jax.Array:
    """A chain for weights stored [L, in, ..., out]: moving the axis back is a relabelling to XLA."""
    return chain(x, {k: v if isinstance(v, list) else jnp.moveaxis(v, 1, -1) for k, v in params.items()})


def seconds_a_call(function: Callable[..., Any], args: tuple) -> float:
    """Median over five runs of the wall clock of one call, many calls queued."""

    def queue(count: int) -> float:
        start = time.perf_counter()
        out: Any = None
        for _ in range(count):
            out = function(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    queue(2)
    count = max(3, int(0.05 / (queue(3) / 3)))
    return statistics.median(queue(count) / count for _ in range(5))


def exact(stage: MatmulStage, x: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """One stage in float64 from the bf16 inputs."""
    wide = partial(np.asarray, dtype=np.float64)
    if stage.norm_weight is not None:
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + stage.eps) * wide(stage.norm_weight)
    y = x @ np.swapaxes(wide(stage.weight), -1, -2)
    y = y[0] / (1 + np.exp(-y[0])) * y[1] if stage.is_gated else y
    return y if residual is None else y + residual


@dataclass(frozen=True)
class Check:
    """The stages of layer 1 in one call against float64; pads are NaN, then not, and the bits have to be the same.

    So they have to be when the call is made once more in the same program, with the counters that the first one left.
    """

    shape: LayerShape
    params: Params
    run: Run
    names: tuple[str, ...]
    num_rows: int

    @property
    def real_rows(self) -> int:
        """Most of them: thread blocks may share the rows."""
        return self.num_rows - 5

    def arguments(self) -> tuple[tuple[MatmulStage, ...], jax.Array, jax.Array]:
        """Stages, x and the residual."""
        of_layer = stages_of(jax.tree.map(lambda w: w[1], self.params, is_leaf=_is_leaf))
        stages = tuple(of_layer[name] for name in self.names)
        draw = np.random.default_rng(0).standard_normal
        x = jnp.asarray(draw((self.num_rows, stages[0].weight.shape[-1])), jnp.bfloat16)
        return stages, x, jnp.asarray(draw((self.num_rows, self.shape.hidden)), jnp.bfloat16)

    def _twice(self, stages: tuple[MatmulStage, ...], x: jax.Array, residual: jax.Array) -> list[jax.Array]:
        has_residual = any(stage.adds_residual for stage in stages)
        rest = (stages, residual if has_residual else None, zero_arrivals())
        first = self.run(x, *rest)[-1]
        # Finite rows stay what they are, but behind the first call: at once the two would wait for each other's SMs.
        x = x + 0 * first[:, :1]
        return [first, self.run(x, *rest)[-1]]

    def lower(self) -> Any:
        return jax.jit(self._twice).lower(*self.arguments())

    def result(self, compiled: Any) -> dict:
        """What is right."""
        stages, x, residual = self.arguments()
        real = self.real_rows

        def call(x: jax.Array, residual: jax.Array) -> np.ndarray:
            return np.asarray(compiled(stages, x, residual), np.float64)[:, :real]

        got = call(x, residual)
        poisoned = call(x.at[real:].set(jnp.nan), residual.at[real:].set(jnp.nan))
        want, stream = np.asarray(x[:real], np.float64), np.asarray(residual[:real], np.float64)
        for stage in stages:
            want = exact(stage, want, stream if stage.adds_residual else None)
            stream = want if stage.adds_residual else stream
        # Of the worst row.
        error = float((np.linalg.norm(got[0] - want, axis=1) / np.linalg.norm(want, axis=1)).max())
        bits = bool((got == poisoned).all() and (got[0] == got[1]).all())
        return {"relative_error": error, "same_bits_beside_nan": bits, "ok": error < MAX_RELATIVE_ERROR and bits}


@dataclass(frozen=True)
class Row:
    """A chain to compile and time, and what has to be right before."""

    names: dict[str, Any]
    chain: Callable[[jax.Array, Params], jax.Array]
    args: tuple[jax.Array, Params]
    num_layers: int
    num_bytes: int  # of weights a layer
    check: Check | None = None

    def lower(self) -> list[Any]:
        """The chain and the check."""
        return [jax.jit(self.chain).lower(*self.args)] + ([self.check.lower()] if self.check is not None else [])

    def measure(self, chain: Any, check: Any = None) -> dict:
        checked = {} if self.check is None else self.check.result(check)
        seconds = seconds_a_call(chain, self.args) / self.num_layers
        return {**checked, "us": round(1e6 * seconds, 2), "tb_s": round(self.num_bytes / seconds / 1e12, 2)}


def run_rows(rows: list[Row], out: Path | None) -> None:
    """Compile all, many at a time, then time one after the other. A row that fails is recorded as such."""
    results = []
    with ThreadPoolExecutor(12) as pool:
        options = compiler_options(jax.default_backend())
        lowered = [row.lower() for row in rows]
        print(f"{len(rows)} programs lowered", file=sys.stderr, flush=True)
        compiled = [
            [pool.submit(partial(one.compile, compiler_options=options)) for one in of_row] for of_row in lowered
        ]
        wait([program for of_row in compiled for program in of_row])
    for row, programs in zip(rows, compiled, strict=True):
        print(f"{row.names} ...", file=sys.stderr, flush=True)
        try:
            result = row.measure(*[program.result() for program in programs])
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        results.append({**row.names, **result})
        print(json.dumps(results[-1]), flush=True)
        if out is not None:
            records.write(out, {"rows": results})


PRODUCTS = ("qkv", "o", "gate_up", "down")
KERNELS = replace(H200_MATMUL, one_kernel=False)
ROW_KERNELS = "row kernels"
# What else may be worth trying: fields of RowMatmulConfig; scripts/bench_rows.py tells what whole steps take. More
# than 8 parts would not be resident at once.
ROW_VARIANTS = {
    "parts 1": {"max_parts": 1},
    "parts 2": {"max_parts": 2},
    "parts 4": {"max_parts": 4},
    "more parts": {"exchange_bytes": 64 * 1024},
    "fewer parts": {"exchange_bytes": 384 * 1024},
    "tokens 32": {"max_tokens": 32},
    "tokens 128": {"max_tokens": 128},
    "half tiles": {"copy_whole_tiles": False},
    "slots of 64 KiB": {"slot_bytes": 64 * 1024},
}


def row_run(variant: str) -> Run:
    """The kernels of 16 to 256 rows in a variant, "row kernels, NAME"."""
    _, _, name = variant.partition(", ")
    return partial(row_stages, config=replace(H200_ROW_MATMUL, **ROW_VARIANTS[name]) if name else H200_ROW_MATMUL)


def bytes_of(params: Params, names: tuple[str, ...] = PRODUCTS) -> int:
    return sum(params[name][0].nbytes for name in names)


def product_rows(shape: LayerShape, params: Params, names: tuple[str, ...], num_rows: int = FEW_ROWS) -> list[Row]:
    """Each product by itself, as XLA and as a kernel."""
    x = jnp.ones((num_rows, shape.hidden), jnp.bfloat16)
    swapped = in_out(params)
    run = partial(matmul_stages, config=KERNELS) if num_rows == FEW_ROWS else row_run(ROW_KERNELS)
    rows = []
    for name in names:
        xla = partial(chain_of_one, name, run_xla, shape)
        kernel = partial(chain_of_one, name, run, shape)
        checked = Check(shape, params, run, (name,), num_rows)
        variants: dict[str, tuple] = {
            "xla [in, out]": (partial(with_in_out, xla), swapped, None),
            "kernel": (kernel, params, checked),
        }
        what = name if num_rows == FEW_ROWS else f"{name}, {num_rows} rows"
        for variant, (chain, weights, checks) in variants.items():
            row = {"model": shape.name, "what": what, "variant": variant}
            rows.append(Row(row, chain, (x, weights), NUM_LAYERS[shape.name], bytes_of(params, (name,)), checks))
    return rows


def few_rows_run(variant: str) -> Run:
    """So many kernels, with so many copies in flight."""
    config = KERNELS if variant.startswith("4") else H200_MATMUL
    if "flight" in variant:
        config = replace(config, in_flight=int(variant.split()[-1]))
    return partial(matmul_stages, config=config)


def layer_rows(shape: LayerShape, params: Params, variants: tuple[str, ...], num_rows: int = FEW_ROWS) -> list[Row]:
    """Variants: what XLA makes of weights that lie either way, or kernels; see few_rows_run and row_run."""
    x = jnp.ones((num_rows, shape.hidden), jnp.bfloat16)
    rows = []
    for variant in variants:
        weights, layer, checks = params, layer_xla, None
        if not variant.startswith("xla"):
            is_few = not variant.startswith(ROW_KERNELS)
            run = few_rows_run(variant) if is_few else row_run(variant)
            splits = 1 if is_few and not variant.startswith("1") else 0
            layer = partial(layer_kernels, run=run, splits=splits)
            checks = Check(shape, params, run, LAYER[: len(LAYER) - splits], num_rows)
        chain = partial(chain_of_layers, layer, shape)
        if variant == "xla [in, out]":
            chain, weights = partial(with_in_out, chain), in_out(params)
        row = {"model": shape.name, "what": f"layer, {num_rows} rows", "variant": variant}
        rows.append(Row(row, chain, (x, weights), NUM_LAYERS[shape.name], bytes_of(params), checks))
    return rows


XLA = ("xla [in, out]", "xla [out, in]")


def plan_rows() -> list[Row]:
    """The most wanted first, but for kernels whose thread blocks wait for each other."""
    small, middle, large = (MODELS[name] for name in ("qwen3-0.6b", "qwen3-1.7b", "llama-3.1-8b"))
    params, params_middle = make_params(small), make_params(middle)
    rows = layer_rows(small, params, (*XLA, "4 kernels"))
    rows += product_rows(small, params, PRODUCTS)
    for num_rows in (64, 256, 2048, 16384):
        rows += layer_rows(small, params, XLA, num_rows)
    rows += layer_rows(MODELS["smollm2-135m"], make_params(MODELS["smollm2-135m"]), (XLA[0], "4 kernels"))
    rows += product_rows(large, make_params(large), ("qkv", "gate_up"))
    rows += layer_rows(middle, params_middle, (XLA[0], "4 kernels"))
    variants = ("1 kernel", "1 kernel, in flight 16", "1 kernel, in flight 3")
    rows += layer_rows(small, params, ("2 kernels", *variants))
    return rows + layer_rows(middle, params_middle, ("2 kernels", "1 kernel"))


def plan_row_kernels(models: list[str], sizes: list[int]) -> list[Row]:
    """Layers and single products of so many rows: what serves, and then what else may be worth trying."""
    made = [(MODELS[name], make_params(MODELS[name])) for name in models]
    rows = []
    for num_rows in sizes:
        for model in made:
            rows += layer_rows(*model, (*XLA, ROW_KERNELS), num_rows)
            rows += product_rows(*model, PRODUCTS, num_rows)
    others = tuple(f"{ROW_KERNELS}, {name}" for name in ROW_VARIANTS)
    for num_rows in sizes:
        for model in made:
            rows += layer_rows(*model, others, num_rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="time the kernels of so many rows in the place of those of 8"
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["qwen3-0.6b"], help="with --rows")
    parser.add_argument("--only", nargs="+", help='variants, such as "xla [in, out]" and "row kernels"')
    args = parser.parse_args()
    planned = plan_row_kernels(args.model, args.rows) if args.rows else plan_rows()
    run_rows([row for row in planned if not args.only or row.names["variant"] in args.only], args.out)


if __name__ == "__main__":
    main()
