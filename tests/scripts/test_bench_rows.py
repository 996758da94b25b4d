"""What the layers are made of that bench_rows times."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import prefers_matmul_kernel, tuning
from pallas_kernels.arg_specs import LAYER_SHAPES, layer_stages
from tests.scripts.load import load


@pytest.mark.parametrize("shape", LAYER_SHAPES, ids=lambda shape: shape.name)
def test_kernels_are_timed_beyond_the_bounds_up_to_which_the_engine_takes_them(shape, monkeypatch):
    for name in ("MAX_PREFERRED_ROWS", "MAX_PREFERRED_WEIGHTS_OF_ROWS", "MIN_PREFERRED_ROWS"):
        monkeypatch.setattr(tuning, name, getattr(tuning, name))  # put back afterwards
    load("bench_rows").take_all_kernels()
    stages = layer_stages(shape)
    end = tuple(stages[name] for name in ("o", "gate_up", "down", "qkv"))
    for num_rows in (16, 256, 512):
        x = jax.ShapeDtypeStruct((num_rows, shape.attended), jnp.bfloat16)
        assert prefers_matmul_kernel(x, end, "mosaic_gpu")
