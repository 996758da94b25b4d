"""Layers of a decode step of few rows run as the kernels of few rows, on a GPU that has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.models.registry import get_model_class
from jaxvllm.weights.dummy import dummy_params
from pallas_kernels import tuning
from tests.models.test_models import config_of
from tests.pallas_kernels.test_mosaic_lowering import KERNEL

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "dtype": "bfloat16", "sliding_window": None}
ROWS = 8
MANY_ROWS = tuning.MAX_PREFERRED_ROWS + 64  # whose products are XLA's
NO_SOFT_CAP = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


def lowered_step(architecture: str, num_rows: int) -> str:
    """Two layers and what surrounds them."""
    config = config_of(architecture, num_hidden_layers=2, **SIZES, **NO_SOFT_CAP)
    model = get_model_class(architecture)(config, unroll_layers=True)

    def forward(params, ids, kv_cache, metadata):
        metadata = metadata.with_work(config.num_heads, kv_cache)
        bound = bind(model, params)
        attended, kv_cache = bound(ids, ids, kv_cache, metadata)
        return bound.compute_logits(attended, metadata.backend), kv_cache

    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in param_specs(model).items()}
    cache = jax.ShapeDtypeStruct((2, 11, 2, config.num_kv_heads, 16, config.head_dim), jnp.bfloat16)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    arrays = (ints(num_rows), ints(num_rows, 5), ints(num_rows), ints(num_rows + 1), ints(), ints(), ints())
    metadata = AttentionMetadata(*arrays, kind="decode", backend="mosaic_gpu")
    traced = jax.jit(forward, donate_argnums=2).trace(params, ints(num_rows), cache, metadata)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


# Kernels: the write is a part of attention in the small bucket.
ATTENTION_OF_FEW, ATTENTION = 1, 2


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "OPTForCausalLM"])
def test_few_rows_run_as_kernels_and_many_rows_as_xla_makes_them(architecture):
    """The layers are lowered once, so these are of one: qkv, attention's output, the feed-forward."""
    assert len(KERNEL.findall(lowered_step(architecture, ROWS))) == ATTENTION_OF_FEW + 3
    assert len(KERNEL.findall(lowered_step(architecture, MANY_ROWS))) == ATTENTION


def test_a_layer_of_llama_ends_with_the_first_product_of_the_next():
    """All as one kernel; that of the first layer's own product, which no layer before has done, is one more."""
    assert len(KERNEL.findall(lowered_step("Qwen3ForCausalLM", ROWS))) == 1 + ATTENTION_OF_FEW + 1
    assert len(KERNEL.findall(lowered_step("Qwen3ForCausalLM", MANY_ROWS))) == ATTENTION


def test_a_bound_on_the_rows_decides_how_far_kernels_serve(monkeypatch):
    """Of more than 8 rows chains alone: a layer's end with the next one's beginning, which are one kernel."""
    monkeypatch.setattr(tuning, "MAX_PREFERRED_ROWS", 2 * ROWS)
    assert len(KERNEL.findall(lowered_step("Qwen3ForCausalLM", 2 * ROWS))) == ATTENTION + 1
    # The feed-forward, between norms of its own: qkv and attention's output are products by themselves.
    assert len(KERNEL.findall(lowered_step("Gemma3ForCausalLM", 2 * ROWS))) == ATTENTION + 1
    assert len(KERNEL.findall(lowered_step("Qwen3ForCausalLM", 4 * ROWS))) == ATTENTION


def test_kernels_take_the_weights_of_all_layers_and_only_xla_gets_slices():
    """A slice handed to a kernel costs the host time in every step."""
    assert "dynamic_slice" not in lowered_step("Qwen3ForCausalLM", ROWS)
    assert "dynamic_slice" in lowered_step("Qwen3ForCausalLM", MANY_ROWS)


@pytest.mark.parametrize("num_rows", [ROWS, 2 * ROWS])
def test_a_step_through_the_kernels_is_the_step_of_the_reference(num_rows, monkeypatch):
    monkeypatch.setattr(tuning, "MAX_PREFERRED_ROWS", num_rows)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = config_of("Qwen3ForCausalLM", **{**SIZES, **sizes, "num_hidden_layers": 2})
    model = get_model_class("Qwen3ForCausalLM")(config, unroll_layers=True)
    params = dummy_params(param_specs(model))
    lens, slots = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    lens[:3], slots[:3] = [5, 16, 31], [16 + 4, 32 + 15, 64 + 14]
    tables = np.zeros((num_rows, 2), np.int32)
    tables[:3] = [[1, 0], [2, 0], [3, 4]]
    starts = np.minimum(np.arange(num_rows + 1), 3).astype(np.int32)
    shape = (2, 5, 2, config.num_kv_heads, 16, config.head_dim)
    cache = np.asarray(jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))

    def run(backend):
        count = np.int32(3)
        metadata = AttentionMetadata(slots, tables, lens, starts, count, count, count, "decode", backend)

        def forward(params, ids, kv_cache, metadata):
            metadata = metadata.with_work(config.num_heads, kv_cache)
            bound = bind(model, params)
            return bound.compute_logits(bound(ids, lens, kv_cache, metadata)[0], backend)

        ids = np.arange(num_rows, dtype=np.int32) + 3
        return np.asarray(jax.jit(forward)(params, ids, cache, metadata)[:3], np.float32)

    got, want = run("mosaic_gpu_interpret"), run("reference")
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
