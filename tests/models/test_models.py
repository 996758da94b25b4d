"""What holds for every model without its weights: dtypes, names, where the weights lie on a mesh."""

import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.layers.layer_context import Attended
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.layers.rope import inverse_frequencies
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.registry import MODELS, get_model_class
from jaxvllm.rope_config import RopeConfig
from pallas_kernels import LayerSlice

T, R = 13, 3


def config_of(architecture: str, **changes) -> ModelConfig:
    hf = {
        "architectures": [architecture],
        "vocab_size": 131,
        "hidden_size": 42,
        "intermediate_size": 58,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
        "sliding_window": 7,
    }
    return ModelConfig.from_hf({**hf, **changes})


def metadata() -> AttentionMetadata:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    arrays = (ints(T), ints(R, 5), ints(R), ints(R + 1), ints(), ints(), ints())
    return AttentionMetadata(*arrays, kind="mixed", backend="reference")


@pytest.mark.parametrize("unroll_layers", [False, True])
@pytest.mark.parametrize("architecture", MODELS)
def test_activations_and_cache_keep_the_dtype_of_the_weights_and_logits_are_float32(architecture, unroll_layers):
    config = config_of(architecture)
    model = get_model_class(architecture)(config, unroll_layers=unroll_layers)

    def forward(params, ids, kv_cache, metadata):
        bound = bind(model, params)
        attended, kv_cache = bound(ids, ids, kv_cache, metadata)
        return attended, kv_cache, bound.compute_logits(attended.take(ids[:R]))

    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in param_specs(model).items()}
    cache = jax.ShapeDtypeStruct((3, 11, 2, config.num_kv_heads, 16, 10), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((T,), jnp.int32)
    attended, new_cache, logits = jax.eval_shape(forward, params, ids, cache, metadata())
    of_one = Attended.of_one_token(config, is_finished=not unroll_layers)
    assert jax.tree.map(lambda kept: (kept.shape, kept.dtype), attended) == jax.tree.map(
        lambda one: ((T, *one.shape), one.dtype), of_one
    )
    assert (new_cache.shape, new_cache.dtype) == (cache.shape, cache.dtype)
    assert (logits.shape, logits.dtype) == ((R, 131), jnp.float32)


def products(jaxpr) -> list[tuple[int, int]]:
    """Rows, and elements of the weight, of each product with a weight."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general" and equation.params["dimension_numbers"][1] == ((), ()):
            rows = next(size for size in equation.outvars[0].aval.shape if size in (T, R))
            [weight] = [x.aval for x in equation.invars if rows not in x.aval.shape]
            found.append((rows, weight.size))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += products(inner)
    return found


@pytest.mark.parametrize("architecture", MODELS)
def test_what_lies_behind_the_last_attention_is_computed_for_rows_with_logits_alone(architecture):
    config = config_of(architecture)
    model = get_model_class(architecture)(config, unroll_layers=True)

    def forward(params, ids, kv_cache, metadata, rows):
        bound = bind(model, params)
        attended, kv_cache = bound(ids, ids, kv_cache, metadata)
        return bound.compute_logits(attended.take(rows)), kv_cache

    specs = param_specs(model)
    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}
    cache = jax.ShapeDtypeStruct((3, 11, 2, config.num_kv_heads, 16, 10), jnp.bfloat16)
    ids, rows = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (T, R))
    found = products(jax.make_jaxpr(forward)(params, ids, cache, metadata(), rows).jaxpr)
    matrices = [name for name, spec in specs.items() if name.endswith("weight") and len(spec.shape) > 2]
    of_layer = sum(math.prod(specs[name].shape[1:]) for name in matrices)
    qkv = math.prod(specs["layers.self_attn.qkv_proj.weight"].shape[1:])
    behind = of_layer - qkv
    assert sum(size for rows, size in found if rows == T) == 3 * qkv + 2 * behind
    assert sum(size for rows, size in found if rows == R) == behind + config.vocab_size * config.hidden_size


def test_an_unknown_architecture_lists_what_is_supported():
    with pytest.raises(ValueError, match=r"'BertModel' is not supported; supported are .*LlamaForCausalLM"):
        get_model_class("BertModel")


def test_an_unknown_activation_is_an_error_when_the_model_is_built():
    with pytest.raises(ValueError, match="hidden_act 'swish2' is not supported"):
        get_model_class("LlamaForCausalLM")(config_of("LlamaForCausalLM", hidden_act="swish2"))


def test_a_dimension_that_the_mesh_does_not_divide_is_kept_whole():
    mesh = jax.sharding.AbstractMesh((2,), ("tp",))
    specs = param_specs(get_model_class("LlamaForCausalLM")(config_of("LlamaForCausalLM")))
    parts = {name: tuple(spec.sharding(mesh).spec) for name, spec in specs.items()}
    assert parts["embed_tokens.weight"] == (None, None)  # 131 rows
    assert parts["layers.self_attn.qkv_proj.weight"] == (None, "tp", None, None, None)
    assert parts["layers.self_attn.o_proj.weight"] == (None, None, "tp", None)
    assert parts["layers.mlp.gate_up_proj.weight"] == (None, None, "tp", None)
    assert parts["layers.mlp.down_proj.weight"] == (None, None, "tp")


def test_rope_divisors_of_gguf_files_divide_the_frequencies():
    divisors = (1.0, 2.0, 3.0, 5.0, 7.0)
    plain, _ = inverse_frequencies(RopeConfig(theta=500.0), 10)
    divided, _ = inverse_frequencies(RopeConfig(theta=500.0, frequency_divisors=divisors), 10)
    np.testing.assert_allclose(divided * np.array(divisors), plain, rtol=1e-6)


@pytest.mark.parametrize("is_small", [True, False])
def test_xla_does_not_know_the_layer_of_a_small_weight_and_makes_one_kernel_for_all_layers(is_small):
    width = 512 if is_small else 1 << 16
    stack = jax.ShapeDtypeStruct((3, width), jnp.float32)
    taken = jax.make_jaxpr(lambda stack: LayerSlice(stack, jnp.int32(1)).take())(stack)
    assert ("optimization_barrier" in str(taken)) == is_small
    values = np.arange(3 * width, dtype=np.float32).reshape(3, width)
    np.testing.assert_array_equal(jax.jit(lambda s: LayerSlice(s, jnp.int32(1)).take())(values), values[1])


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_attention_that_looks_both_ways_is_refused_by_name(architecture):
    config = config_of(architecture, use_bidirectional_attention=True)
    with pytest.raises(NotImplementedError, match="use_bidirectional_attention=true"):
        get_model_class(architecture)(config)
