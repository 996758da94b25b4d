"""Scales of an 8-bit KV cache: where checkpoints keep them, what is 1 without them, and that the layers use them."""

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.executor import with_cache_dtype
from jaxvllm.layers.kv_scale import declare_kv_scale
from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.llama import LlamaForCausalLM
from jaxvllm.weights.load import load_params
from tests.parity.paged_driver import PagedDriver
from tests.tiny_config import T_TINY
from tests.weights.test_load import DictCheckpoint
from tests.weights.tiny_llama import HEAD_DIM, KV_HEADS, LAYERS, tiny_tensors

FP8 = jnp.float8_e4m3fn
PREFIX = "model.layers.{layer}.self_attn"
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


def load_scales(num_layers: int, **stored: np.ndarray | float) -> np.ndarray:
    """What the layers get of tensors whose names here have "__" for "."."""
    arrays = {f"model.layers.{name.replace('__', '.')}": np.array(x, np.float32) for name, x in stored.items()}
    specs = {"kv_scale": declare_kv_scale(PREFIX).spec.stacked(num_layers)}
    return np.asarray(load_params(specs, DictCheckpoint(arrays))["kv_scale"])


def test_scales_are_found_under_every_name_that_checkpoints_use(caplog):
    names = {
        "0__self_attn__k_scale": 0.25,
        "0__self_attn__v_scale": 3,
        "1__self_attn__attn__k_scale": [5],
        "1__self_attn__attn__v_scale": [7],
        "2__self_attn__k_proj__k_scale": 11,
        "2__self_attn__v_proj__v_scale": 13,
        "3__self_attn__k_proj__output_scale": 17,
        "3__self_attn__v_proj__output_scale": 19,
        "4__self_attn__kv_scale": 23,
        "5__self_attn__k_scale": 29,
    }
    want = [[0.25, 3], [5, 7], [11, 13], [17, 19], [23, 23], [29, 29]]
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(load_scales(6, **names), np.float32(want))
    assert not caplog.records


def test_a_layer_without_scales_gets_1_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        scales = load_scales(2, **{"0__self_attn__k_scale": 2, "0__self_attn__v_scale": 3})
    np.testing.assert_array_equal(scales, [[2, 3], [1, 1]])
    assert "no model.layers.1.self_attn.k_scale, model.layers.1.self_attn.v_scale" in caplog.text
    assert "scales are 1 there, accuracy may suffer" in caplog.text


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0, "a k_scale is 0.0, expected a positive number"),
        (-1, "a k_scale is -1.0"),
        (np.nan, "a k_scale is nan"),
        ([1, 2], r"model.layers.0.self_attn.k_scale is \[2\], expected \[\]"),
    ],
)
def test_a_scale_that_is_no_positive_number_is_an_error(scale, message):
    with pytest.raises(ValueError, match=message):
        load_scales(1, **{"0__self_attn__k_scale": scale, "0__self_attn__v_scale": 1})


def test_scales_in_a_checkpoint_are_no_error_where_the_cache_is_not_of_8_bits():
    arrays = tiny_tensors() | {f"model.layers.0.self_attn.{x}_scale": np.float32(2) for x in "qkv"}
    config = ModelConfig.from_hf(T_TINY)
    load_params(param_specs(LlamaForCausalLM(config)), DictCheckpoint(arrays))


@pytest.mark.parametrize(
    ("quantization", "asked", "got"),
    [
        (None, "auto", ("auto", False)),
        (None, "float8_e4m3fn", ("float8_e4m3fn", True)),
        (KV_ONLY, "auto", ("float8_e4m3fn", True)),
        (KV_ONLY, "float8_e4m3fn", ("float8_e4m3fn", True)),
    ],
)
def test_a_checkpoint_made_for_an_8_bit_cache_gets_one(quantization, asked, got):
    config = ModelConfig.from_hf({**T_TINY, "quantization_config": quantization})
    model_config, cache_dtype = with_cache_dtype(config, asked)
    assert (cache_dtype, model_config.has_kv_scales) == got


@pytest.mark.parametrize("unroll_layers", [False, True])
def test_keys_and_values_too_large_for_8_bits_are_right_with_their_scales(unroll_layers):
    """Keys times c and queries over c are the same model, as are values and the output's weights: bit for bit if the
    scales take out c, a power of two, again."""
    tensors, large = tiny_tensors(), tiny_tensors()
    for i in range(LAYERS):
        attention, k_factor, v_factor = f"model.layers.{i}.self_attn", 2.0 ** (9 + i), 2.0 ** (11 + i)
        for name, factor in (("k", k_factor), ("q", 1 / k_factor), ("v", v_factor), ("o", 1 / v_factor)):
            large[f"{attention}.{name}_proj.weight"] *= np.float32(factor)
        large[f"{attention}.k_scale"], large[f"{attention}.v_scale"] = np.float32(k_factor), np.float32(v_factor)
    prompt = np.random.default_rng(1).integers(0, T_TINY["vocab_size"], 40)

    def logits(arrays: dict[str, np.ndarray], *, has_kv_scales: bool, dtype=FP8) -> np.ndarray:
        config = dataclasses.replace(ModelConfig.from_hf(T_TINY), has_kv_scales=has_kv_scales)
        model = LlamaForCausalLM(config, unroll_layers=unroll_layers)
        params = load_params(param_specs(model), DictCheckpoint(arrays))
        driver = PagedDriver(model, config, params, put_cache=lambda x: jnp.asarray(x, dtype))
        assert driver.kv_cache.shape[-3::2] == (KV_HEADS, HEAD_DIM)
        return driver.prefill(driver.add(prompt), chunk=23)

    want = logits(tensors, has_kv_scales=False)
    np.testing.assert_allclose(logits(large, has_kv_scales=True), want, atol=1e-5, rtol=1e-5)
    assert np.abs(logits(large, has_kv_scales=False) - want).max() > 0.1
    exact = logits(large, has_kv_scales=False, dtype=jnp.float32)
    np.testing.assert_allclose(exact, logits(tensors, has_kv_scales=False, dtype=jnp.float32), atol=1e-5, rtol=1e-5)
