"""Norms and gates of many rows, alone and around XLA's products, on every backend, against a float64 oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LayerSlice, MatmulStage, act_and_mul, make_arrivals, prefers_matmul_kernel, rms_norm
from pallas_kernels.arg_specs import LAYER_SHAPES, layer_stages
from pallas_kernels.ops import matmul_stages
from tests.pallas_kernels.test_matmul_stages import BACKENDS, Draw, assert_matches, layer_tail, rounded
from tests.pallas_kernels.test_mosaic_lowering import KERNEL

KERNELS = BACKENDS[1:]
PAD_ROWS = 2


def assert_same_but_for_last_bits(got: jax.Array, want: np.ndarray) -> None:
    """Nearly all elements as float64 rounded once or twice, the rest off by a last bit; NaN in the pads alone."""
    smallest = 2.0**-24 if got.dtype == jnp.float16 else 1e-37
    got = np.asarray(got, np.float64)
    assert np.isnan(got[-PAD_ROWS:]).all()
    error = np.abs(got[:-PAD_ROWS] - want)
    assert (error <= 2.0**-7 * np.abs(want) + smallest).all()
    assert np.mean(error > smallest) < 0.01


def draw_rows(*shape: int, dtype: str = "bfloat16") -> np.ndarray:
    x = rounded(3 * np.random.default_rng(shape[0]).standard_normal(shape), dtype)
    x[-PAD_ROWS:] = np.nan
    return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "dtype"), [((13, 256), "bfloat16"), ((7, 2048), "float16"), ((5, 2304), "bfloat16")])
def test_norms_match_float64_whatever_the_pads_hold(shape, dtype, backend):
    x, weight = draw_rows(*shape, dtype=dtype), rounded(np.random.default_rng(0).uniform(0.3, 1.7, shape[1]), dtype)
    stack = jnp.asarray(np.stack([np.nan * weight, weight, np.nan * weight]), dtype)

    def run(x, stack, layer):
        return rms_norm(x, LayerSlice(stack, layer), eps=1e-3, backend=backend)

    got = jax.jit(run)(jnp.asarray(x, dtype), stack, jnp.int32(1))
    real = x[:-PAD_ROWS]
    factor = 1 / np.sqrt(np.mean(real**2, axis=1, keepdims=True) + 1e-3)
    assert_same_but_for_last_bits(got, rounded(rounded(real * factor, dtype) * weight, dtype))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("shape", "activation", "dtype"),
    [((7, 2, 768), "silu", "bfloat16"), ((5, 2, 896), "gelu_pytorch_tanh", "float16")],
)
def test_gates_match_float64_whatever_the_pads_hold(shape, activation, dtype, backend):
    x = draw_rows(*shape, dtype=dtype)
    x[0, 0, :4] = (-88, -30, 60, 0)
    got = jax.jit(partial(act_and_mul, activation=activation, backend=backend))(jnp.asarray(x, dtype))
    gate, up = x[:-PAD_ROWS, 0], x[:-PAD_ROWS, 1]
    # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), where nothing cancels.
    y = gate if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        want = rounded(gate / (1 + np.exp(-y)) * up, dtype)
    assert_same_but_for_last_bits(got, want)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("options", [{}, {"has_bias": True, "unit_offset": True}])
def test_products_of_many_rows_have_kernels_around_them(options, backend):
    draw = Draw("bfloat16")
    case = draw.case(*layer_tail(draw, 128, 192, 256, **options), rows=13)
    assert_matches(case, backend)


def num_kernels(stages: tuple[MatmulStage, ...], rows: int) -> int:
    x = jax.ShapeDtypeStruct((rows, stages[0].weight.shape[-1]), jnp.bfloat16)
    residual = jax.ShapeDtypeStruct((rows, stages[-1].weight.shape[-2]), jnp.bfloat16)

    def call(x, stages, residual):
        return matmul_stages(x, stages, residual, make_arrivals("mosaic_gpu"), backend="mosaic_gpu")

    text = jax.jit(call).trace(x, stages, residual).lower(lowering_platforms=("cuda",)).as_text()
    return len(KERNEL.findall(text))


@pytest.mark.parametrize("shape", LAYER_SHAPES, ids=lambda shape: shape.name)
def test_the_norm_and_the_gate_of_a_layer_lower_to_kernels(shape):
    stages = layer_stages(shape)
    tail = (stages["o"], stages["gate_up"], stages["down"])
    # 576 columns have no norm kernel.
    assert num_kernels(tail, rows=509) == (1 if shape.name == "smollm2-135m" else 2)


def test_kernels_are_preferred_where_they_were_measured_to_be_faster():
    def prefers(*stages: MatmulStage, rows: int = 2048) -> bool:
        x = jax.ShapeDtypeStruct((rows, stages[0].weight.shape[-1]), jnp.bfloat16)
        return prefers_matmul_kernel(x, stages, "mosaic_gpu")

    qwen, smol = (layer_stages(LAYER_SHAPES[i]) for i in (0, 1))
    assert prefers(qwen["qkv"]) and prefers(smol["gate_up"])
    assert not prefers(qwen["qkv"], rows=256), "no faster in a step"
    assert not prefers(qwen["o"]), "neither norm nor gate"
    assert not prefers(smol["qkv"]), "576 columns"
    assert not prefers(layer_stages(LAYER_SHAPES[0], unit_offset=True)["qkv"]), "XLA norms twice at once"
    assert not prefers(layer_stages(LAYER_SHAPES[0], jnp.float32)["qkv"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(jnp.ones((8, 576), jnp.bfloat16), jnp.ones(576), eps=0, backend=KERNELS[0]), "576 columns"),
        (lambda: rms_norm(jnp.ones((8, 128)), jnp.ones(128), eps=0, backend=KERNELS[0]), "dtype float32"),
        (lambda: rms_norm(jnp.ones((3, 128), jnp.bfloat16), jnp.ones(128), eps=0, backend=KERNELS[0]), "3 rows"),
        (lambda: act_and_mul(jnp.ones((8, 2, 128), jnp.bfloat16), "relu", backend=KERNELS[0]), "activation relu"),
    ],
)
def test_without_a_kernel_it_says_why(call, message):
    with pytest.raises(NotImplementedError, match=f"no kernel for {message}.*use backend 'reference'"):
        call()


def test_shapes_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"weight has shape \(5,\), expected \(7,\)"):
        rms_norm(jnp.ones((3, 7)), jnp.ones(5), eps=0)
    with pytest.raises(ValueError, match=r"gate_up has shape \(3, 7\), expected \[T, 2, F\]"):
        act_and_mul(jnp.ones((3, 7)), "silu")
