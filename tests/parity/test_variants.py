"""Options that families share: biases, tied heads, kinds of rope, OPT's and Phi's variants, unrolled layers."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxvllm.layers.rope import inverse_frequencies
from jaxvllm.models.registry import get_model_class
from pallas_kernels import reference_rope_write
from tests.parity.paged_driver import PagedDriver
from tests.parity.tiny_models import tiny_model

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(12).integers(3, 131, 37).tolist()


def rope(kind: str, **parameters) -> frozenset:
    return frozenset({"rope_type": kind, "rope_theta": 10000.0, **parameters}.items())


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=50.0,
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = rope(
    "longrope",
    short_factor=(1.0, 1.1, 1.2, 1.3, 1.5),
    long_factor=(1.0, 1.7, 2.9, 5.0, 13.0),
    original_max_position_embeddings=32,
)
OPT = {"ffn_dim": 58, "head_dim": None, "num_key_value_heads": None}

VARIANTS = {
    "tied head": ("LlamaConfig", {"tie_word_embeddings": True}),
    "all biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "linear rope": ("LlamaConfig", {"rope_parameters": rope("linear", factor=3.0)}),
    "llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "yarn rope": ("LlamaConfig", {"rope_parameters": rope("yarn", **YARN, rope_theta=500.0)}),
    "yarn rope, own factor": (
        "Qwen3Config",
        {"rope_parameters": rope("yarn", **YARN, attention_factor=1.3, beta_fast=9.0)},
    ),
    "yarn rope, mscale": ("LlamaConfig", {"rope_parameters": rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2)}),
    "one kv head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "no shared kv heads": ("LlamaConfig", {"num_key_value_heads": 6}),
    "one layer": ("LlamaConfig", {"num_hidden_layers": 1}),
    "windows in the last layers": (
        "Qwen2Config",
        {"hidden_size": 48, "head_dim": None, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "no window": ("MistralConfig", {"sliding_window": None}),
    "part of the head rotates": ("Phi3Config", {"hidden_size": 60, "head_dim": None, "partial_rotary_factor": 0.6}),
    "all of the head rotates": ("LlamaConfig", {"partial_rotary_factor": 0.5}),
    "all of the head rotates, nested": (
        "Qwen2Config",
        {
            "hidden_size": 48,
            "head_dim": None,
            "rope_parameters": rope("default", partial_rotary_factor=0.5),
        },
    ),
    "no soft caps": ("Gemma2Config", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "soft caps of Gemma 3": ("Gemma3TextConfig", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "norm after, narrow embedding": ("OPTConfig", {**OPT, "word_embed_proj_dim": 30, "do_layer_norm_before": False}),
    "norms without weights": ("OPTConfig", {**OPT, "layer_norm_elementwise_affine": False}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_in_two_chunks(variant):
    config_class, changes = VARIANTS[variant]
    tiny = tiny_model(config_class, **changes)
    driver = tiny.driver()
    logits = driver.prefill(driver.add(PROMPT), chunk=30)
    np.testing.assert_allclose(logits, tiny.expected_logits(PROMPT), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("length", [31, 37])  # of 32 tokens at most, and of more
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_that_of_the_longest_text(kind, length):
    scaling = LONG_ROPE if kind == "longrope" else rope("dynamic", factor=3.0)
    tiny = tiny_model("LlamaConfig", max_position_embeddings=32, rope_parameters=scaling)
    short, scaled = tiny.config.rope.within(31), tiny.config.rope.within(length)
    unscaled, frequencies = (inverse_frequencies(config, tiny.config.head_dim)[0] for config in (short, scaled))
    assert np.array_equal(unscaled, frequencies) == (length == 31)
    config = dataclasses.replace(tiny.config, rope=scaled)
    driver = PagedDriver(get_model_class(config.architecture)(config), config, tiny.params)
    logits = driver.prefill(driver.add(PROMPT[:length]), chunk=30)
    np.testing.assert_allclose(logits, tiny.expected_logits(PROMPT[:length]), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [("LlamaConfig", {}), ("Gemma3TextConfig", {"sliding_window": 11, "sliding_window_pattern": 2})],
)
def test_unrolled_layers_equal_scanned_ones(config_class, changes):
    logits = []
    for unroll_layers in (False, True):
        driver = tiny_model(config_class, unroll_layers=unroll_layers, **changes).driver()
        sequence = driver.add(PROMPT)
        logits.append(np.concatenate([driver.step([(sequence, 30)])[0], driver.prefill(sequence, chunk=1)]))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is():
    tiny = tiny_model("LlamaConfig")
    expected = tiny.expected_logits(PROMPT)
    config = dataclasses.replace(tiny.config, dtype="bfloat16")
    params = {name: array.astype(jnp.bfloat16) for name, array in tiny.params.items()}
    driver = PagedDriver(get_model_class(config.architecture)(config), config, params)
    error = np.sqrt(np.mean((driver.prefill(driver.add(PROMPT), chunk=30) - expected) ** 2))
    narrow = copy.deepcopy(tiny.torch_model).to(torch.bfloat16)
    with torch.no_grad():
        theirs = narrow(torch.tensor([PROMPT]), use_cache=False).logits[0].float().numpy()
    assert 0 < error < 1.1 * np.sqrt(np.mean((theirs - expected) ** 2))


def test_an_8_bit_cache_gives_what_keys_and_values_rounded_to_8_bits_give(monkeypatch):
    tiny = tiny_model("Gemma2Config", sliding_window=11)  # layers with a window and layers without
    model = get_model_class(tiny.config.architecture)(tiny.config)
    fp8 = jnp.float8_e4m3fn

    def logits(dtype) -> np.ndarray:
        driver = PagedDriver(model, tiny.config, tiny.params, put_cache=lambda x: jnp.asarray(x, dtype))
        result = driver.prefill(driver.add(PROMPT), chunk=30)
        assert driver.kv_cache.dtype == dtype
        return result

    narrow = logits(fp8)
    assert not np.allclose(narrow, tiny.expected_logits(PROMPT), atol=1e-3)
    monkeypatch.setattr(reference_rope_write, "to_cache_dtype", lambda x, dtype, scale: x.astype(fp8).astype(dtype))
    jax.clear_caches()
    np.testing.assert_allclose(narrow, logits(jnp.float32), atol=1e-5, rtol=1e-5)
