import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.random_bits import random_bits


def test_bits_equal_those_of_jax_random_under_a_folded_key():
    seed = np.array([[0, 0], [0, 1], [2**31, 7], [2**32 - 1, 2**32 - 1]], np.uint32)
    index = np.array([0, 1, 40959, 3], np.int32)
    got = np.asarray(random_bits(jnp.asarray(seed), jnp.asarray(index), jnp.arange(1009)))
    for row in range(4):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed[row], impl="threefry2x32"), int(index[row]))
        assert np.array_equal(got[row], jax.random.bits(key, (1009,)))
