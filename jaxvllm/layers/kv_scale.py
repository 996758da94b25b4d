"""The scales of keys and values in an 8-bit cache, as checkpoints that were calibrated for one carry them."""

from functools import partial

import numpy as np
from flax import nnx

from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec, declare


def declare_kv_scale(prefix: str) -> nnx.Param:
    """f32[2]: the cache holds key / scale[0] and value / scale[1].

    One number a layer each, under the names that vLLM knows: `prefix`.k_scale, or below attn, or below k_proj (as
    k_scale, or as output_scale in older files of compressed-tensors), or one kv_scale for both. A key's scale alone is
    the value's too. Without any it is 1.
    """
    k_names, v_names = (
        tuple(
            f"{prefix}.{name}"
            for name in (f"{x}_scale", f"attn.{x}_scale", f"{x}_proj.{x}_scale", f"{x}_proj.output_scale")
        )
        for x in "kv"
    )
    both = f"{prefix}.kv_scale"
    options = {"default": 1.0}
    sources = (
        CheckpointTensor(k_names[0], (), (0, ...), partial(_checked, "k"), (*k_names[1:], both), **options),
        CheckpointTensor(v_names[0], (), (1, ...), partial(_checked, "v"), (*v_names[1:], both, *k_names), **options),
    )
    return declare(ParamSpec((2,), np.dtype(np.float32), (None,), sources, "ones"))


def _checked(name: str, scale: np.ndarray) -> np.ndarray:
    """The number itself. Raises ValueError if it is none that keys or values can be divided by."""
    value = float(scale.reshape(-1)[0])
    if not 0 < value < np.inf:
        raise ValueError(f"a {name}_scale is {value}, expected a positive number")
    return np.asarray(value, np.float32)
