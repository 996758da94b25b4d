"""Products of few rows with what surrounds them, on every backend, against a float64 oracle."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FEW_ROWS, LayerSlice, MatmulStage, make_arrivals, matmul_stages, prefers_matmul_kernel
from pallas_kernels.arg_specs import LAYER_SHAPES, layer_stages
from pallas_kernels.matmul_sizes import make_sizes, stages_by_kernel
from pallas_kernels.tuning import H200_MATMUL

BACKENDS = ("reference", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu))
ROWS, REAL_ROWS = FEW_ROWS, 5


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype), np.float64)


@dataclass(frozen=True)
class Case:
    """Arguments as float64 that hold values of `dtype`; pad rows of x and of the residual, the last ones, are NaN."""

    x: np.ndarray
    stages: tuple[MatmulStage, ...]
    residual: np.ndarray | None
    dtype: str
    real_rows: int = REAL_ROWS

    def run(self, backend: str) -> np.ndarray:
        cast = partial(jnp.asarray, dtype=self.dtype)
        x, stages, residual = jax.tree.map(cast, (self.x, self.stages, self.residual))
        run = jax.jit(partial(matmul_stages, backend=backend))
        return np.asarray(run(x, stages, residual, make_arrivals(backend))[-1], np.float64)


class Draw:
    """Random stages of a dtype."""

    def __init__(self, dtype: str, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype

    def array(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return rounded(scale * self.rng.standard_normal(shape), self.dtype)

    def stage(self, *shape: int, has_norm: bool = False, has_bias: bool = False, **options) -> MatmulStage:
        norm = rounded(self.rng.uniform(0.3, 1.7, shape[-1]), self.dtype) if has_norm else None
        bias = self.array(*shape[:-1]) if has_bias else None
        return MatmulStage(self.array(*shape, scale=shape[-1] ** -0.5), norm, bias, eps=1e-3, **options)

    def case(self, *stages: MatmulStage, rows: int = ROWS, real_rows: int = REAL_ROWS) -> Case:
        x = self.array(rows, stages[0].weight.shape[-1])
        width = next((s.weight.shape[-2] for s in stages if s.adds_residual), None)
        residual = None if width is None else self.array(rows, width)
        x[real_rows:] = np.nan
        if residual is not None:
            residual[real_rows:] = np.nan
        return Case(x, stages, residual, self.dtype, real_rows)


ACTIVATIONS = {
    None: lambda x: x,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def expected(case: Case) -> np.ndarray:
    """Without rounding in between."""
    real = slice(case.real_rows)
    x, residual = case.x[real], None if case.residual is None else case.residual[real]
    for stage in case.stages:
        if stage.norm_weight is not None:
            factor = stage.norm_weight + (1 if stage.unit_offset else 0)
            x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + stage.eps) * factor
        y = np.einsum("tk,...nk->...tn", x, stage.weight)
        y = y if stage.bias is None else y + np.asarray(stage.bias)[..., None, :]
        act = ACTIVATIONS[stage.activation]
        x = act(y[0]) * y[1] if stage.is_gated else act(y)
        if stage.adds_residual:
            x = residual = residual + x
    return x


def assert_matches(case: Case, backend: str) -> None:
    """A stage of a kernel rounds its normed input and its result, half a unit in the last place each, 2**-9 in bfloat16
    and 2**-12 in float16; XLA rounds after the product, the bias, the activation and the gate too."""
    got, want = case.run(backend)[: case.real_rows], expected(case)
    tolerance = 2.0 ** (-7 if backend == "reference" else -8) * len(case.stages) ** 0.5
    tolerance /= 8 if case.dtype == "float16" else 1
    assert np.linalg.norm(got - want) < tolerance * np.linalg.norm(want)
    assert np.abs(got - want).max() < 3 * tolerance * np.abs(want).max()


def layer_tail(draw: Draw, hidden: int, attended: int, ffn: int, **options) -> tuple[MatmulStage, ...]:
    return (
        draw.stage(hidden, attended, adds_residual=True),
        draw.stage(2, ffn, hidden, has_norm=True, activation="silu", **options),
        draw.stage(hidden, ffn, adds_residual=True),
    )


BF16 = Draw("bfloat16")
CASES = {
    "plain": BF16.case(BF16.stage(48, 192)),
    "one segment, units that do not divide": BF16.case(BF16.stage(80, 576, has_norm=True)),
    "two segments": BF16.case(BF16.stage(32, 896, has_bias=True, activation="relu")),
    "norm of Gemma, gate, bias": BF16.case(
        BF16.stage(2, 48, 1536, has_norm=True, has_bias=True, unit_offset=True, activation="gelu_pytorch_tanh")
    ),
    "norm of one segment with an offset": BF16.case(BF16.stage(16, 320, has_norm=True, unit_offset=True)),
    "many chunks of the norm": BF16.case(BF16.stage(16, 2560, has_norm=True)),
    "all after each other": BF16.case(*layer_tail(BF16, 64, 192, 128, has_bias=True)),
    "residual twice, none at first": BF16.case(BF16.stage(64, 128), BF16.stage(64, 64, adds_residual=True)),
}
F16 = Draw("float16")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_products_match_float64_and_pads_of_nan_reach_no_other_row(name, backend):
    assert_matches(CASES[name], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16(backend):
    assert_matches(F16.case(*layer_tail(F16, 64, 128, 192)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_one_layer_are_found_among_those_of_all(backend):
    case = CASES["norm of Gemma, gate, bias"]

    def run(x, stages, layer):
        slices = jax.tree.map(lambda stack: LayerSlice(stack, layer), stages)
        return matmul_stages(x, slices, None, make_arrivals(backend), backend=backend)

    stages = jax.tree.map(lambda w: jnp.stack([jnp.nan * w, jnp.nan * w, w]).astype(case.dtype), case.stages)
    got = jax.jit(run)(jnp.asarray(case.x, case.dtype), stages, jnp.int32(2))
    np.testing.assert_array_equal(np.asarray(got[-1], np.float64)[:REAL_ROWS], case.run(backend)[:REAL_ROWS])


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_same_bits_every_time_and_whatever_lies_in_pads(backend):
    case = CASES["all after each other"]
    first = case.run(backend)[:REAL_ROWS]
    other = replace(case, x=np.nan_to_num(case.x, nan=7.0), residual=np.nan_to_num(case.residual, nan=-3.0))
    np.testing.assert_array_equal(first, other.run(backend)[:REAL_ROWS])


def test_where_shared_memory_leaves_one_slot_a_tile_is_waited_for_while_the_slot_has_it():
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = [shape((6720, 1024)), shape((1024, 6720)), shape((4096, 1024)), shape((2048, 4096))]
    stages = tuple(MatmulStage(w, None if w is weights[0] else shape(w.shape[1:])) for w in weights)
    x = shape((ROWS, 1024))
    assert prefers_matmul_kernel(x, stages, "mosaic_gpu")
    (chain,) = stages_by_kernel(stages, H200_MATMUL)
    sizes = make_sizes(x, chain, H200_MATMUL)
    assert (sizes.num_slots, sizes.in_flight) == (1, 1)
    assert make_sizes(x, chain[:2], H200_MATMUL).in_flight == H200_MATMUL.in_flight


def test_reference_takes_any_number_of_rows_and_float32():
    draw = Draw("float32")
    case = draw.case(*layer_tail(draw, 29, 17, 31), rows=13)
    np.testing.assert_allclose(case.run("reference")[:REAL_ROWS], expected(case), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (BF16.case(BF16.stage(16, 64), rows=7), "7 rows, only 8 have a kernel"),
        (BF16.case(BF16.stage(24, 64)), "64 inputs and 24 outputs, only multiples of 64 and 16"),
        (BF16.case(BF16.stage(16, 100)), "100 inputs"),
        (BF16.case(BF16.stage(16, 8192)), "8192 inputs do not fit into shared memory"),
        (BF16.case(BF16.stage(16, 64, activation="gelu")), "activation gelu"),
        (Draw("float32").case(Draw("float32").stage(16, 64)), "dtype float32, only bfloat16 and float16"),
        (BF16.case(*[BF16.stage(64, 64)] * 5), "5 stages, at most 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_a_kernel_it_says_why_and_layers_do_not_ask_for_it(case, message):
    with pytest.raises(NotImplementedError, match=f"{message}.*use backend 'reference'"):
        case.run("mosaic_gpu_interpret")
    x, stages = jax.tree.map(partial(jnp.asarray, dtype=case.dtype), (case.x, case.stages))
    assert not prefers_matmul_kernel(x, stages, "mosaic_gpu")


def test_norm_weights_of_another_dtype_have_no_kernel():
    x, weight = jnp.ones((ROWS, 64), jnp.bfloat16), jnp.ones((16, 64), jnp.bfloat16)
    stages = (MatmulStage(weight, jnp.ones(64, jnp.float32)),)
    backend = "mosaic_gpu_interpret"
    with pytest.raises(NotImplementedError, match="norm weights in float32, only those in x's bfloat16"):
        matmul_stages(x, stages, None, make_arrivals(backend), backend=backend)
    assert not prefers_matmul_kernel(x, stages, "mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(64)}, r"x has shape \(64,\), expected \[T, K\]"),
        ({"x": np.zeros((8, 63))}, r"weight of stage 0 has shape \(48, 64\), expected \[N, K\].*K = 63"),
        ({"stages": ()}, r"stages=\(\)"),
        ({"residual": np.zeros((8, 47))}, r"residual has shape \(8, 47\), expected \(8, 48\) for stage 0"),
        ({"residual": None}, r"residual has shape None, expected \(8, 48\)"),
        ({"stages": (MatmulStage(np.zeros((48, 64)), np.zeros(63)),)}, r"norm_weight of stage 0 has shape \(63,\)"),
        ({"stages": (MatmulStage(np.zeros((2, 48, 64)), bias=np.zeros(48)),)}, r"bias of stage 0 has shape \(48,\)"),
    ],
)
def test_arguments_that_disagree_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(BF16.case(BF16.stage(48, 64, adds_residual=True)), **change).run("reference")


def test_kernels_are_preferred_where_they_were_measured_to_be_faster():
    def preferred(name: str, *stages: str, num_rows: int = ROWS) -> bool:
        shape = next(shape for shape in LAYER_SHAPES if shape.name == name)
        of_layer = layer_stages(shape)
        x = jax.ShapeDtypeStruct((num_rows, of_layer[stages[0]].weight.shape[-1]), jnp.bfloat16)
        return prefers_matmul_kernel(x, tuple(of_layer[stage] for stage in stages), "mosaic_gpu")

    for name in ("qwen3-0.6b", "smollm2-135m", "qwen3-1.7b"):
        assert preferred(name, "qkv") and preferred(name, "o", "gate_up", "down"), name
    assert not preferred("llama-3.1-8b", "gate_up")
    chain = ("o", "gate_up", "down", "qkv")
    assert preferred("qwen3-0.6b", *chain, num_rows=128) and not preferred("qwen3-0.6b", *chain, num_rows=192)
    assert not preferred("qwen3-1.7b", *chain, num_rows=64) and not preferred("qwen3-0.6b", "qkv", num_rows=64)
    x = jax.ShapeDtypeStruct((ROWS, 1024), jnp.bfloat16)
    assert not prefers_matmul_kernel(x, (layer_stages(LAYER_SHAPES[0])["qkv"],), "reference")
