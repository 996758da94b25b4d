"""Dummy weights: the declared shapes, repeatable, and finite through a deep model."""

import jax
import ml_dtypes
import numpy as np

from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec
from jaxvllm.weights.dummy import dummy_params

BF16 = np.dtype(ml_dtypes.bfloat16)
SOURCE = (CheckpointTensor("w", (67, 31)),)
SPECS = {
    "proj": ParamSpec((67, 31), BF16, (None, None), SOURCE).stacked(3),
    "twin": ParamSpec((67, 31), BF16, (None, None), SOURCE).stacked(3),
    "norm": ParamSpec((31,), BF16, (None,), SOURCE, init="ones").stacked(3),
    "bias": ParamSpec((31,), BF16, (None,), SOURCE, init="zeros"),
}


def test_dummy_weights_follow_their_declarations():
    params = dummy_params(SPECS)
    assert {name: (p.shape, p.dtype) for name, p in params.items()} == {n: (s.shape, s.dtype) for n, s in SPECS.items()}
    values = np.asarray(params["proj"], np.float32)
    assert abs(values.std() - 0.02) < 0.002
    assert abs(values.mean()) < 0.002
    assert np.all(np.asarray(params["norm"]) == 1)
    assert np.all(np.asarray(params["bias"]) == 0)


def test_parameters_and_layers_differ_and_a_seed_repeats():
    first, again, other = dummy_params(SPECS, seed=5), dummy_params(SPECS, seed=5), dummy_params(SPECS, seed=6)
    proj = np.asarray(first["proj"])
    np.testing.assert_array_equal(proj, np.asarray(again["proj"]))
    assert not np.array_equal(proj, np.asarray(other["proj"]))
    assert not np.array_equal(proj, np.asarray(first["twin"]))
    assert not np.array_equal(proj[0], proj[1])


def test_dtype_and_sharding_are_applied():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = dummy_params({"proj": SPECS["proj"]}, dtype=np.dtype(np.float32), sharding=lambda spec: sharding)
    assert params["proj"].dtype == np.float32
    assert params["proj"].sharding == sharding
