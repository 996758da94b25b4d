"""ModelConfig: every spelling reaches its field, absent keys mean what transformers means, errors name the field."""

import json

import pytest
import transformers

from jaxvllm.model_config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 264,
}


LONG = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "original_max_position_embeddings": 16}


def read(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes}, origin="some/config.json")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 10000.0},
    ],
)
def test_rope_theta_is_found_in_both_places_and_rope_parameters_wins(rope):
    assert read(**rope).rope.theta == 500000.0


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None, "rope_parameters": None}])
def test_rope_theta_is_10000_without_a_word_about_it(rope):
    config = read(**rope)
    assert (config.rope.theta, config.rope.type) == (10000.0, "default")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_llama3_scaling_is_read_under_every_spelling(key, kind_key):
    scaling = {
        kind_key: "llama3",
        "factor": 16,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 4096,
    }
    rope = read(**{key: scaling}).rope
    assert (rope.type, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 16.0, 1.0, 4.0)
    assert rope.original_max_position_embeddings == 4096


def test_the_original_context_beside_the_scaling_wins_as_in_transformers():
    both = {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        "original_max_position_embeddings": 128,
    }
    hf = transformers.AutoConfig.for_model("llama", **LLAMA, **json.loads(json.dumps(both)))
    hf.standardize_rope_params()
    assert hf.rope_parameters["original_max_position_embeddings"] == 128
    assert read(**both).rope.original_max_position_embeddings == 128


def test_one_kind_of_scaling_may_be_in_both_places():
    for kind in ({"rope_type": "linear"}, {}):
        rope = read(rope_scaling={"type": "linear", "factor": 8}, rope_parameters={**kind, "rope_theta": 5e5}).rope
        assert (rope.type, rope.factor, rope.theta) == ("linear", 8.0, 5e5)


def test_yarn_takes_the_models_context_where_the_original_is_not_stated():
    rope = read(rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=777).rope
    assert (rope.type, rope.original_max_position_embeddings, rope.beta_fast, rope.truncate) == (
        "yarn",
        777,
        32.0,
        True,
    )


@pytest.mark.parametrize(
    ("architecture", "scaling", "context"),
    [
        ("LlamaForCausalLM", None, 640),
        ("LlamaForCausalLM", {"rope_type": "linear", "factor": 4.0}, 2560),
        ("LlamaForCausalLM", {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512}, 2560),
        ("LlamaForCausalLM", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ("LlamaForCausalLM", {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 640),
        (
            "LlamaForCausalLM",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            640,
        ),
        ("Gemma3ForCausalLM", {"rope_type": "linear", "factor": 8.0}, 640),
    ],
)
def test_the_longest_context_is_what_the_rope_is_scaled_to(architecture, scaling, context):
    config = read(architectures=[architecture], max_position_embeddings=640, rope_scaling=scaling)
    assert config.max_context == context


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_a_part_of_the_head_rotates_in_phi3_alone(place):
    part = {"partial_rotary_factor": 0.5}
    given = part if place == "top" else {"rope_parameters": {"rope_type": "default", **part}}
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM"):
        assert read(architectures=[architecture], num_key_value_heads=2, **given).rope.partial_rotary_factor == 1.0
    assert read(architectures=["Phi3ForCausalLM"], **given).rope.partial_rotary_factor == 0.5
    with pytest.raises(
        ValueError, match=r'"partial_rotary_factor" \(0.5\) with rope scaling "linear" is not supported'
    ):
        read(rope_scaling={"rope_type": "linear", "factor": 2.0}, partial_rotary_factor=0.5)


def test_gemma3_has_a_rope_of_its_own_for_local_layers_in_both_spellings():
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 12345.0},
    }
    new = ModelConfig.from_hf({**gemma, "rope_parameters": nested})
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = ModelConfig.from_hf(
        {**gemma, "rope_theta": 2000000.0, "rope_local_base_freq": 12345.0, "rope_scaling": scaling}
    )
    for config in (new, old):
        assert (config.rope.theta, config.rope.type, config.rope.factor) == (2000000.0, "linear", 8.0)
        assert config.local_rope is not None
        assert (config.local_rope.theta, config.local_rope.type) == (12345.0, "default")
    default = ModelConfig.from_hf(gemma)
    assert default.local_rope is not None
    assert (default.rope.theta, default.local_rope.theta) == (1000000.0, 10000.0)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_dtype_is_read_in_both_spellings(key, value):
    assert read(**{key: value}).dtype == "bfloat16"


def test_head_dim_of_the_file_wins_and_null_means_the_quotient():
    assert read(hidden_size=48, head_dim=32).head_dim == 32
    assert read(hidden_size=64, head_dim=None).head_dim == 16
    assert read().head_dim == 16


def test_num_key_value_heads_defaults_to_the_number_of_heads():
    assert read().num_kv_heads == 4
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(num_key_value_heads=2).num_kv_heads == 2


def test_qwen2_has_biases_on_q_k_v_though_its_file_does_not_say_so():
    config = read(architectures=["Qwen2ForCausalLM"])
    assert (config.attention_bias, config.attention_output_bias) == (True, False)
    config = read(attention_bias=True)
    assert (config.attention_bias, config.attention_output_bias) == (True, True)


@pytest.mark.parametrize(
    ("architecture", "changes", "window", "layers"),
    [
        ("LlamaForCausalLM", {"sliding_window": 9}, None, "fff"),
        ("MistralForCausalLM", {"sliding_window": 9, "num_key_value_heads": 2}, 9, "sss"),
        ("MistralForCausalLM", {"sliding_window": None, "num_key_value_heads": 2}, None, "fff"),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, None, "fff"),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, 9, "fss"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}, 4096, "fss"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2}, 4096, "ffs"),
        ("Gemma2ForCausalLM", {"sliding_window": 9}, 9, "sfs"),
        ("Gemma3ForCausalLM", {"sliding_window": 9, "sliding_window_pattern": 2}, 9, "sfs"),
        ("Gemma3ForCausalLM", {"sliding_window": 9}, 9, "sss"),
    ],
)
def test_which_layers_have_a_window_follows_the_family(architecture, changes, window, layers):
    config = read(architectures=[architecture], **changes)
    assert config.sliding_window == window
    assert "".join(kind[0] for kind in config.layer_types) == layers


def test_listed_layer_types_win():
    listed = ["full_attention", "sliding_attention", "full_attention"]
    config = read(architectures=["Gemma2ForCausalLM"], sliding_window=9, layer_types=listed)
    assert config.layer_types == tuple(listed)


@pytest.mark.parametrize(
    ("hf_class", "architecture", "sizes"),
    [
        ("LlamaConfig", "LlamaForCausalLM", {}),
        ("MistralConfig", "MistralForCausalLM", {"num_attention_heads": 16}),
        ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2}),
        ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2}),
        ("Gemma2Config", "Gemma2ForCausalLM", {}),
        ("Gemma3TextConfig", "Gemma3ForCausalLM", {}),
        ("Phi3Config", "Phi3ForCausalLM", {}),
        ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 77}),
    ],
)
@pytest.mark.parametrize("is_stripped", [False, True])
def test_a_key_that_the_file_lacks_means_what_transformers_means(hf_class, architecture, sizes, is_stripped):
    sizes = {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "vocab_size": 264, **sizes}
    if hf_class != "OPTConfig":
        sizes["intermediate_size"] = 128
    hf = getattr(transformers, hf_class)(**sizes, architectures=[architecture])
    config = ModelConfig.from_hf(
        {**sizes, "architectures": [architecture]} if is_stripped else json.loads(hf.to_json_string())
    )
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.max_position_embeddings == hf.max_position_embeddings
    assert config.num_kv_heads == getattr(hf, "num_key_value_heads", hf.num_attention_heads)
    assert config.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert config.rms_norm_eps == getattr(hf, "rms_norm_eps", 1e-5)
    activations = ("hidden_act", "hidden_activation", "activation_function")
    assert config.hidden_act == next(getattr(hf, name) for name in activations if hasattr(hf, name))
    windowed = "sliding_attention" in (getattr(hf, "layer_types", None) or ())
    if windowed or hf_class == "MistralConfig":
        assert config.sliding_window == hf.sliding_window
    else:
        assert config.sliding_window is None
    if getattr(hf, "layer_types", None):
        assert list(config.layer_types) == hf.layer_types
    if hf_class == "Gemma3TextConfig":
        assert config.local_rope is not None
        thetas = {kind: rope["rope_theta"] for kind, rope in hf.rope_parameters.items()}
        assert thetas == {"full_attention": config.rope.theta, "sliding_attention": config.local_rope.theta}
    elif hf_class != "OPTConfig":
        assert config.rope.theta == hf.rope_parameters["rope_theta"]


def test_hidden_activation_of_gemma_wins_over_hidden_act_as_in_transformers():
    both = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    for hf_class, architecture in [("Gemma2Config", "Gemma2ForCausalLM"), ("Gemma3TextConfig", "Gemma3ForCausalLM")]:
        config = read(architectures=[architecture], **both)
        assert config.hidden_act == getattr(transformers, hf_class)(**both).hidden_activation
    assert read(**both).hidden_act == "gelu"


def test_eos_is_one_id_a_list_or_nothing():
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read(eos_token_id=[70, 90, 70]).eos_token_ids == (70, 90)
    assert read().eos_token_ids == ()


@pytest.mark.parametrize("field", [key for key in LLAMA if key != "architectures"])
@pytest.mark.parametrize("absent", [True, False])
def test_missing_field_is_named_with_its_file_and_what_to_do(field, absent):
    hf = {**LLAMA, field: None}
    if absent:
        del hf[field]
    with pytest.raises(ValueError, match=rf'some/config\.json: field "{field}".* is missing; add it'):
        ModelConfig.from_hf(hf, origin="some/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "\"hidden_size\" must be a positive integer, got '64'"),
        ({"num_hidden_layers": True}, '"num_hidden_layers" must be a positive integer, got True'),
        ({"vocab_size": -1}, '"vocab_size" must be a positive integer, got -1'),
        ({"num_attention_heads": 2.5}, '"num_attention_heads" must be a positive integer, got 2.5'),
        ({"num_key_value_heads": 3}, "must be a multiple of"),
        ({"hidden_size": 65}, 'there is no "head_dim"'),
        ({"rms_norm_eps": 0}, '"rms_norm_eps" must be a positive number, got 0'),
        ({"tie_word_embeddings": "no"}, "\"tie_word_embeddings\" must be true or false, got 'no'"),
        ({"is_causal": False}, "is_causal=false .* is not supported"),
        ({"dtype": "int8"}, "must be one of bfloat16, float16, float32"),
        ({"eos_token_id": "</s>"}, '"eos_token_id" must be a token id or a list of them'),
        ({"architectures": None}, '"architectures" must list'),
        ({"architectures": []}, '"architectures" must list'),
        ({"rope_scaling": "llama3"}, '"rope_scaling" must be an object or null'),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            "'proportional' is not supported; supported are default, dyn",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 9.0}}, '"dynamic" needs "factor"'),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "short_factor": [1.0]}}, '"longrope" needs "long_factor"'),
        (
            {"rope_scaling": {"type": "longrope", **LONG, "short_factor": 1.0}},
            '"short_factor" must be a list of numbers',
        ),
        ({"rope_scaling": {"type": "longrope", **LONG}}, "3 divisors for 8 frequencies"),
        ({"rope_scaling": {"type": "su", **LONG}}, "3 divisors for 8 frequencies"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, '"llama3" needs "low_freq_factor"'),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, 'rope field "factor" must be a number'),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            "\"rope_scaling\" says 'yarn' and \"rope_parameters\" says 'default'; move",
        ),
        ({"layer_types": ["full_attention"]}, "has 1 entries for 3 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "must list full_attention or sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, '"sliding_window" is not set'),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\), which is not supported"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}},
            r"quantised \(compressed-tensors\)",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "attn_head"},
                }
            },
            r"kv_cache_scheme has {'type': 'int', 'strategy': 'attn_head'}, supported are",
        ),
    ],
)
def test_wrong_value_is_refused_with_file_field_and_value(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        read(**changes)
    assert str(error.value).startswith("some/config.json")


def test_unknown_architecture_lists_what_is_supported():
    with pytest.raises(ValueError, match="architecture MambaForCausalLM is not supported; supported are A, B"):
        ModelConfig.from_hf({**LLAMA, "architectures": ["MambaForCausalLM"]}, supported={"B", "A"})


def test_first_supported_architecture_counts():
    hf = {**LLAMA, "architectures": ["MyOwnLlama", "LlamaForCausalLM"]}
    assert ModelConfig.from_hf(hf, supported=("LlamaForCausalLM",)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "changes", "caps"),
    [
        ("Gemma2ForCausalLM", {}, (50.0, 30.0)),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": 7}, (None, 7.0)),
        ("Gemma3ForCausalLM", {}, (None, None)),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 7.0}, (None, 7.0)),
        ("LlamaForCausalLM", {"attn_logit_softcapping": 50.0}, (None, None)),
    ],
)
def test_soft_caps_follow_the_family_where_the_file_says_nothing(architecture, changes, caps):
    config = ModelConfig.from_hf({**LLAMA, "architectures": [architecture], **changes})
    assert (config.attention_soft_cap, config.logit_soft_cap) == caps


def test_a_config_without_a_class_says_what_is_supported():
    with pytest.raises(ValueError, match=r'"architectures" must list .* got None; .*supported are A, B'):
        ModelConfig.from_hf({"model_type": "strange"}, supported={"B", "A"})
