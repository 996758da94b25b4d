"""Cases D of the case list: what config files say reaches the logits, and what other files say ends the text."""

import dataclasses
import json
import logging

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from jaxvllm import Engine, SamplingParams
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.parameter import param_specs
from jaxvllm.layers.rope import inverse_frequencies
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.weights.gguf_checkpoint import hf_name
from jaxvllm.weights.load import load_params
from tests.engine.dense import (
    LLAMA3,
    dense_logits,
    random_tensors,
    rope_frequencies,
    successor_tensors,
    tensor_shapes,
    write_folder,
)
from tests.engine.tokenizers_fixture import k_bytes
from tests.parity.paged_driver import PagedDriver
from tests.tiny_config import T_TINY
from tests.weights.tiny_gguf import write_gguf

PROMPT = np.random.default_rng(5).integers(0, 256, 101).tolist()
QWEN2 = T_TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SMALL_ENGINE = {
    "device": "cpu", "multiprocess": False, "max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64,
    "kv_cache_memory_bytes": 1 << 20,
}  # fmt: skip


def logits_of(path, prompt: list[int], **sizes) -> np.ndarray:
    """f32[T, V] of a model folder or GGUF file, through the loader and the paged cache."""
    source = resolve(path)
    config = dataclasses.replace(source.config, dtype="float32")
    model = get_model_class(config.architecture)(config)
    params = load_params(param_specs(model), source.open_checkpoint())
    driver = PagedDriver(model, config, params, **{"num_rows": 1, "num_tokens": 101} | sizes)
    return driver.prefill(driver.add(prompt), chunk=driver.num_tokens)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("head_dim", "ratios"),
    [
        (32, dict.fromkeys(range(7), 1.0) | {7: 0.635995, 8: 0.157437} | dict.fromkeys(range(9, 16), 0.0625)),
        (64, {13: 1.0, 14: 0.635995, 15: 0.350822, 16: 0.157437, 17: 0.0625}),
    ],
)
def test_d03_llama3_frequencies_are_blended_by_the_inverse_of_the_wavelength(key, head_dim, ratios):
    scaling = {key if name == "rope_type" else name: value for name, value in LLAMA3.items()}
    config = T_TINY | {"head_dim": head_dim, "rope_theta": 250000}
    scaled, _ = inverse_frequencies(ModelConfig.from_hf(config | {"rope_scaling": scaling}).rope, head_dim)
    plain, _ = inverse_frequencies(ModelConfig.from_hf(config).rope, head_dim)
    for index, ratio in ratios.items():
        assert scaled[index] / plain[index] == pytest.approx(ratio, rel=1e-5), index


def test_d03_a_prompt_of_3000_tokens_equals_a_dense_reference_at_its_last_position(tmp_path):
    config = T_TINY | {"head_dim": 32, "rope_theta": 250000, "rope_scaling": LLAMA3}
    tensors = random_tensors(config)
    for name in tensors:  # sharper attention, so that the frequencies matter
        if "q_proj" in name or "k_proj" in name:
            tensors[name] *= 3
    prompt = np.random.default_rng(6).integers(0, 256, 3000).tolist()
    plain, scaled = (dense_logits(config | {"rope_scaling": s}, tensors, prompt[:500])[-1] for s in (None, LLAMA3))
    assert np.abs(plain - scaled).max() > 0.01, "the comparison must be able to fail"
    sizes = {"num_tokens": 1000, "block_size": 128, "num_blocks": 26}
    assert_close(
        logits_of(write_folder(tmp_path, config, tensors), prompt, **sizes)[-1],
        dense_logits(config, tensors, prompt)[-1],
    )


def test_d03_rope_freqs_of_a_gguf_file_mean_the_same(tmp_path):
    config = T_TINY | {"head_dim": 24, "rope_theta": 250000.0}
    divisors = rope_frequencies(config) / rope_frequencies(config | {"rope_scaling": LLAMA3})
    tensors = {"token_embd.weight": np.zeros((11, 96), np.float32), "rope_freqs.weight": np.float32(divisors)}
    rope = resolve(write_gguf(tmp_path / "m.gguf", tensors)).config.rope
    from_file = inverse_frequencies(rope, 24)[0]
    np.testing.assert_allclose(from_file, rope_frequencies(config | {"rope_scaling": LLAMA3}), rtol=1e-6)


NEW_ROPE = {"rope_type": "default", "rope_theta": 500000}


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 500000}, 500000.0),
        ({"rope_parameters": NEW_ROPE}, 500000.0),
        ({"rope_parameters": NEW_ROPE, "rope_theta": 10000.0}, 500000.0),
        ({"rope_scaling": None, "rope_parameters": None}, 10000.0),
    ],
)
def test_d04_rope_theta_reaches_the_model_wherever_the_file_keeps_it(changes, theta):
    rope = ModelConfig.from_hf(T_TINY | changes).rope
    expected = rope_frequencies(T_TINY | {"rope_theta": theta})
    np.testing.assert_allclose(inverse_frequencies(rope, 16)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_d04_both_spellings_of_the_dtype_are_honoured(key):
    config = {name: value for name, value in T_TINY.items() if name != "torch_dtype"}
    assert ModelConfig.from_hf(config | {key: "bfloat16"}).dtype == "bfloat16"


def test_d04_logits_follow_the_new_spelling_of_rope_theta(tmp_path):
    tensors = random_tensors(T_TINY)
    expected = dense_logits(T_TINY | {"rope_theta": 500000.0}, tensors, PROMPT)
    assert np.abs(dense_logits(T_TINY, tensors, PROMPT)[100] - expected[100]).max() > 1e-3
    folder = write_folder(tmp_path, T_TINY | {"rope_parameters": NEW_ROPE}, tensors)
    assert_close(logits_of(folder, PROMPT), expected)


def test_d06_a_stated_head_dim_wins_and_q_and_k_norms_act_on_each_head(tmp_path):
    config = T_TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 48, "head_dim": 32}
    shapes = tensor_shapes(config)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (128, 48)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (32,)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path, config, tensors)
    assert_close(logits_of(folder, PROMPT), dense_logits(config, tensors, PROMPT))
    pool = KVCacheSpec.of_model(ModelConfig.from_hf(config), 16)
    assert pool.shape(7) == (2, 7, 2, 2, 16, 32)


@pytest.mark.parametrize(
    ("changes", "head_dim", "kv_heads"),
    [({"head_dim": 32, "hidden_size": 48}, 32, 2), ({"head_dim": None}, 16, 2), ({"num_key_value_heads": None}, 16, 4)],
)
def test_d06_null_and_absent_fields_mean_their_defaults(changes, head_dim, kv_heads):
    config = ModelConfig.from_hf(T_TINY | changes)
    assert (config.head_dim, config.num_kv_heads) == (head_dim, kv_heads)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor of T_TINY's families."""
    layers = range(T_TINY["num_hidden_layers"])
    parts = [f"attn_{part}" for part in ("q", "k", "v", "output", "norm")]
    parts += [f"ffn_{part}" for part in ("gate", "up", "down", "norm")]
    stored = ["token_embd", "output_norm", "output", *(f"blk.{i}.{part}" for i in layers for part in parts)]
    names = {hf_name(f"{base}.{end}"): f"{base}.{end}" for base in stored for end in ("weight", "bias")}
    return names[name]


@pytest.mark.parametrize("kind", ["qwen2 folder", "qwen2 gguf", "llama folder with attention_bias"])
def test_d07_biases_reach_the_logits_and_nobody_misses_one(tmp_path, kind, caplog):
    config = T_TINY | {"attention_bias": True} if kind.startswith("llama") else QWEN2
    tensors = random_tensors(config)
    assert ("model.layers.0.self_attn.o_proj.bias" in tensors) == kind.startswith("llama")
    if kind == "qwen2 gguf":
        metadata = {
            "qwen2.embedding_length": 64, "qwen2.feed_forward_length": 128, "qwen2.attention.head_count": 4,
            "qwen2.attention.head_count_kv": 2, "qwen2.rope.freq_base": 10000.0,
        }  # fmt: skip
        renamed = {gguf_name(name): tensor for name, tensor in tensors.items()}
        path = write_gguf(tmp_path / "m.gguf", renamed, arch="qwen2", metadata=metadata)
    else:
        path = write_folder(tmp_path, config, tensors)
    expected = dense_logits(config, tensors, PROMPT)
    without = dense_logits(config, {name: t for name, t in tensors.items() if "bias" not in name}, PROMPT)
    assert np.sum(expected * without) / np.linalg.norm(expected) / np.linalg.norm(without) < 0.9
    with caplog.at_level(logging.INFO):
        assert_close(logits_of(path, PROMPT), expected)
    assert "o_proj" not in caplog.text


TEXTS = [
    "40719", "6.02 + 1.38", "a  b   c\n\n\td", "we're They'LL", "<eos>user\nhi<eos>", "crème № 7 — 🧭", "", "   ",
    "\u0000\u0001", "港口",
]  # fmt: skip


def gguf_metadata(original: tokenizers.Tokenizer, pre: str, **flags: bool) -> dict[str, object]:
    """What a GGUF file keeps of a byte-level BPE tokenizer of 264 tokens."""
    model = json.loads(original.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [original.id_to_token(i) for i in range(264)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [1] * 262 + [3, 4], "tokenizer.ggml.eos_token_id": 262,
        "tokenizer.ggml.bos_token_id": 262,
    } | {f"tokenizer.ggml.{name}": value for name, value in flags.items()}  # fmt: skip


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_d14_a_tokenizer_from_gguf_metadata_splits_as_the_original(pre):
    original = k_bytes()
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        original.pre_tokenizer = pre_tokenizers.Sequence([digits, original.pre_tokenizer])
    tokenizer = Tokenizer.from_gguf(gguf_metadata(original, pre), "m.gguf")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == original.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("40719")) == 5


def test_d14_bos_comes_when_the_flag_says_so_and_an_unknown_name_is_an_error():
    original = k_bytes()
    for flags, first in (({"add_bos_token": True}, [262]), ({"add_bos_token": False}, []), ({}, [])):
        assert Tokenizer.from_gguf(gguf_metadata(original, "gpt-2", **flags), "m.gguf").encode("on") == [*first, 257]
    with pytest.raises(ValueError, match="gpt-3"):
        Tokenizer.from_gguf(gguf_metadata(original, "gpt-3"), "m.gguf")


@pytest.mark.parametrize(
    ("config_eos", "generation_config", "tokenizer_eos", "stop_reason"),
    [
        (262, {"eos_token_id": [262, 70]}, "<eos>", 70),
        ([70, 90], None, None, None),
        (262, None, "F", None),
        (262, {"eos_token_id": 90}, "F", None),
    ],
)
def test_d15_every_end_token_of_the_files_ends_the_text_on_the_device(
    tmp_path, config_eos, generation_config, tokenizer_eos, stop_reason
):
    config = T_TINY | {"hidden_size": 272, "num_hidden_layers": 1, "eos_token_id": config_eos}
    files = {"generation_config": generation_config, "eos": tokenizer_eos}
    engine = Engine(write_folder(tmp_path, config, successor_tensors(config), **files), **SMALL_ENGINE)
    greedy = {"temperature": 0.0, "max_tokens": 40}
    params = [SamplingParams(**greedy), SamplingParams(**greedy, ignore_eos=True)]
    stopped, ignoring = (output.outputs[0] for output in engine.generate(["A", "A"], params, use_tqdm=False))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (
        [66, 67, 68, 69, 70],
        "stop",
        stop_reason,
    )
    assert (ignoring.token_ids, ignoring.finish_reason) == (list(range(66, 106)), "length")
