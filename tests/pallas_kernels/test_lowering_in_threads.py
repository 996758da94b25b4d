"""Kernels that several threads lower at once are the kernels that one thread lowers.

Mosaic keeps in a global variable that one thread of the card has been chosen, and chooses none where it is set.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import make_arrivals, matmul_stages
from pallas_kernels.arg_specs import HEAD_SHAPES, LAYER_SHAPES, Bucket, layer_function, layer_specs, layer_stages


def lower_attention(num_rows: int) -> None:
    heads, bucket = HEAD_SHAPES[0], Bucket("decode", num_rows, num_rows)
    traced = jax.jit(layer_function(heads, bucket)).trace(*layer_specs(heads, bucket))
    traced.lower(lowering_platforms=("cuda",))


def lower_products(num_rows: int) -> None:
    stages = layer_stages(LAYER_SHAPES[0])
    chain = tuple(stages[name] for name in ("o", "gate_up", "down", "qkv"))
    x, residual = (
        jax.ShapeDtypeStruct((num_rows, width), jnp.bfloat16)
        for width in (chain[0].weight.shape[-1], LAYER_SHAPES[0].hidden)
    )

    def call(x, stages, residual):
        return matmul_stages(x, stages, residual, make_arrivals("mosaic_gpu"), backend="mosaic_gpu")

    jax.jit(call).trace(x, chain, residual).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("lower", [lower_attention, lower_products])
@pytest.mark.parametrize("num_rows", [8, 64])
def test_one_thread_is_chosen_even_while_another_thread_of_the_host_has_chosen_one(lower, num_rows, monkeypatch):
    num_chosen = 0

    def counted(*args, **kwargs):
        nonlocal num_chosen
        num_chosen += 1
        return choose(*args, **kwargs)

    choose = utils.single_thread_predicate
    monkeypatch.setattr(utils, "single_thread_predicate", counted)
    lower(num_rows)
    num_alone, num_chosen = num_chosen, 0
    monkeypatch.setattr(utils, "_ONCE_PER", utils.ThreadSubset.BLOCK)
    lower(num_rows)
    assert num_chosen == num_alone > 0
