"""Dummy weights (load_format="dummy"): every declared parameter drawn on the device, none read."""

import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.layers.parameter import ParamSpec

# Small enough that activations stay finite through many layers, large enough that logits differ.
_STD = 0.02


def dummy_params(
    specs: Mapping[str, ParamSpec],
    *,
    seed: int = 0,
    dtype: np.dtype | None = None,
    sharding: Callable[[ParamSpec], jax.sharding.Sharding | None] = lambda spec: None,
) -> dict[str, jax.Array]:
    """Draw every parameter as its declaration says: normal with a standard deviation of 0.02, ones, or zeros.

    Args:
      specs: parameter name -> declaration.
      seed: the same seed gives the same weights, parameter by parameter.
      dtype: of all parameters; None takes each declaration's own.
      sharding: where a parameter goes; None for the default device.
    """
    params = {}
    for name, spec in specs.items():
        # rbg bits cost next to nothing to compile and to draw; threefry on 8 billion numbers takes seconds.
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), zlib.crc32(name.encode()))
        draw = jax.jit(_draw, static_argnums=(0, 1, 2), out_shardings=sharding(spec))
        params[name] = draw(spec.shape, np.dtype(dtype if dtype is not None else spec.dtype), spec.init, key)
    return params


def _draw(shape: tuple[int, ...], dtype: np.dtype, init: str, key: jax.Array) -> jax.Array:
    if init != "normal":
        return jnp.full(shape, {"ones": 1, "zeros": 0}[init], dtype)
    if len(shape) < 3:
        return _normal(key, shape, dtype)
    # Row by row of the leading axis: the random bits of a whole stacked parameter would take twice its memory.
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda k: _normal(k, shape[1:], dtype), keys)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * _STD).astype(dtype)
