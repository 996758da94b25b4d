"""The kernels of few rows lower for CUDA, on any machine, at the shapes of real layers. Mosaic checks layouts and the
227 KiB of shared memory while it lowers."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import MatmulStage, make_arrivals, matmul_stages
from pallas_kernels.arg_specs import LAYER_SHAPES, LayerShape, layer_stages
from tests.pallas_kernels.test_mosaic_lowering import KERNEL

CHAIN = ("o", "gate_up", "down", "qkv")


def num_kernels(stages: tuple[MatmulStage, ...], dtype: str = "bfloat16") -> int:
    like = partial(jax.ShapeDtypeStruct, dtype=dtype)
    stages = jax.tree.map(lambda x: like(x.shape), stages)
    x = like((8, stages[0].weight.shape[-1]))
    width = next((stage.weight.shape[-2] for stage in stages if stage.adds_residual), None)

    def call(x, stages, residual):
        return matmul_stages(x, stages, residual, make_arrivals("mosaic_gpu"), backend="mosaic_gpu")

    traced = jax.jit(call).trace(x, stages, None if width is None else like((8, width)))
    return len(KERNEL.findall(traced.lower(lowering_platforms=("cuda",)).as_text()))


@pytest.mark.parametrize("shape", LAYER_SHAPES, ids=lambda shape: shape.name)
def test_every_product_that_fits_lowers_to_a_kernel(shape: LayerShape):
    for name, stage in layer_stages(shape).items():
        if stage.weight.shape[-1] <= 6144:
            assert num_kernels((stage,)) == 1, name


@pytest.mark.parametrize("shape", LAYER_SHAPES[:3], ids=lambda shape: shape.name)
def test_products_that_follow_each_other_are_one_kernel(shape: LayerShape):
    stages = layer_stages(shape)
    assert num_kernels(tuple(stages[name] for name in CHAIN)) == 1


def test_products_whose_units_are_cut_differently_are_two_kernels():
    wide = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    assert num_kernels(tuple(MatmulStage(weight) for weight in wide)) == 1
    cut_by_nine = jax.ShapeDtypeStruct((576 * 8, 576), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4608), jnp.bfloat16)
    assert num_kernels(tuple(MatmulStage(weight) for weight in cut_by_nine)) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_biases_norms_with_an_offset_and_both_dtypes_lower(dtype):
    stages = layer_stages(LAYER_SHAPES[0], has_bias=True, unit_offset=True)
    assert num_kernels(tuple(stages[name] for name in CHAIN), dtype) == 1


@pytest.mark.parametrize("activation", [None, "relu", "gelu_pytorch_tanh"])
def test_the_other_activations_lower(activation):
    weight = jax.ShapeDtypeStruct((2, 256, 1024), jnp.bfloat16)
    assert num_kernels((MatmulStage(weight, activation=activation),)) == 1
