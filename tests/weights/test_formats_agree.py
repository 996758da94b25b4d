"""One tiny model in every format, loaded into the real model's declared parameters: the same numbers each time."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_source import ModelSource, resolve
from jaxvllm.models.registry import MODELS, get_model_class
from jaxvllm.weights.gguf_checkpoint import hf_name
from jaxvllm.weights.load import load_params
from tests.weights.test_gguf import permute_rows
from tests.weights.tiny_gguf import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    llama_tensors,
    quantised,
    write_gguf,
)
from tests.weights.tiny_gguf import Q as Kinds

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def tensors_of(arch: str) -> dict[str, np.ndarray]:
    """The tiny model under GGUF names, rows in Hugging Face's order, with what its family adds."""
    tensors = llama_tensors()
    rng = np.random.default_rng(1)
    for i in range(LAYERS):
        if arch == "qwen2":
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                tensors[f"blk.{i}.attn_{part}.bias"] = rng.standard_normal(heads * HEAD_DIM).astype(np.float32)
        if arch == "qwen3":
            for part in "qk":
                tensors[f"blk.{i}.attn_{part}_norm.weight"] = rng.standard_normal(HEAD_DIM).astype(np.float32)
    return tensors


def write_folder(folder: Path, arch: str, tensors: dict[str, np.ndarray], **config: object) -> Path:
    folder.mkdir()
    values = {
        "architectures": [ARCHITECTURES[arch]],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        **config,
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    save_file({hf_name(name): value for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def load(source: ModelSource) -> dict[str, np.ndarray]:
    model = get_model_class(source.config.architecture)(source.config)
    params = load_params(param_specs(model), source.open_checkpoint(), dtype=np.dtype(np.float32))
    return {name: np.asarray(value) for name, value in params.items()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gguf_and_safetensors_give_the_same_parameters(tmp_path, arch):
    tensors = tensors_of(arch)
    stored = dict(tensors)
    if arch == "llama":
        for name, value in tensors.items():
            if "attn_q." in name or "attn_k." in name:
                stored[name] = permute_rows(value, HEADS if "attn_q." in name else KV_HEADS)
    gguf = write_gguf(tmp_path / "m.gguf", stored, arch=arch, metadata={f"{arch}.attention.key_length": HEAD_DIM})
    from_gguf = load(resolve(gguf, supported=MODELS))
    from_folder = load(resolve(write_folder(tmp_path / "m", arch, tensors), supported=MODELS))
    assert from_gguf.keys() == from_folder.keys()
    for name, value in from_folder.items():
        np.testing.assert_array_equal(from_gguf[name], value, err_msg=name)


def test_quantised_weights_are_near_the_original_in_every_parameter(tmp_path):
    tensors = tensors_of("qwen3")
    kinds = [Kinds.Q8_0, Kinds.F16, Kinds.BF16, Kinds.Q5_1]
    stored = {
        name: quantised(value, kinds[i % len(kinds)]) if value.ndim == 2 else value
        for i, (name, value) in enumerate(tensors.items())
    }
    gguf = write_gguf(tmp_path / "m.gguf", stored, arch="qwen3", metadata={"qwen3.attention.key_length": HEAD_DIM})
    from_gguf = load(resolve(gguf))
    for name, value in load(resolve(write_folder(tmp_path / "m", "qwen3", tensors))).items():
        assert np.abs(from_gguf[name] - value).max() < 0.2, name


def head_of(params: dict[str, np.ndarray]) -> np.ndarray | None:
    return next((value for name, value in params.items() if "lm_head" in name), None)


@pytest.mark.parametrize("stored_head", ["none", "different"])
def test_tied_model_has_no_head_of_its_own_whatever_is_stored(tmp_path, stored_head):
    tensors = tensors_of("llama")
    if stored_head == "none":
        del tensors["output.weight"]
    params = load(resolve(write_folder(tmp_path / "m", "llama", tensors, tie_word_embeddings=True)))
    assert head_of(params) is None


def test_tied_model_with_the_head_alone_embeds_with_it(tmp_path):
    tensors = tensors_of("llama")
    del tensors["token_embd.weight"]
    params = load(resolve(write_folder(tmp_path / "m", "llama", tensors, tie_word_embeddings=True)))
    np.testing.assert_array_equal(params["embed_tokens.weight"], tensors["output.weight"])


def test_untied_model_uses_the_stored_head(tmp_path):
    tensors = tensors_of("llama")
    head = head_of(load(resolve(write_folder(tmp_path / "m", "llama", tensors))))
    assert head is not None
    assert head.shape in ((VOCAB, HIDDEN), (HIDDEN, VOCAB))
    expected = tensors["output.weight"]
    np.testing.assert_array_equal(head, expected if head.shape == expected.shape else expected.T)


@pytest.mark.parametrize("tie", [False, None])
def test_llama_without_a_head_and_without_the_word_tied_is_an_error(tmp_path, tie):
    tensors = tensors_of("llama")
    del tensors["output.weight"]
    source = resolve(write_folder(tmp_path / "m", "llama", tensors, tie_word_embeddings=tie))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight.*tie_word_embeddings"):
        load(source)


def test_dropped_qwen2_bias_is_an_error_not_a_zero(tmp_path):
    tensors = tensors_of("qwen2")
    del tensors["blk.1.attn_k.bias"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.bias"):
        load(resolve(write_folder(tmp_path / "m", "qwen2", tensors)))


def test_bias_that_the_config_does_not_announce_is_an_error_not_dropped(tmp_path):
    tensors = {**tensors_of("llama"), "blk.0.attn_q.bias": np.ones(HEADS * HEAD_DIM, np.float32)}
    with pytest.raises(ValueError, match=r"not part of this model: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(resolve(write_folder(tmp_path / "m", "llama", tensors)))


def test_bfloat16_file_reaches_the_parameters_bit_for_bit(tmp_path):
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors_of("llama").items()}
    source = resolve(write_folder(tmp_path / "m", "llama", tensors, dtype="bfloat16"))
    assert source.config.dtype == "bfloat16"
    model = get_model_class(source.config.architecture)(source.config)
    params = load_params(param_specs(model), source.open_checkpoint())
    assert {str(value.dtype) for value in params.values()} == {"bfloat16"}
    embed = np.asarray(params["embed_tokens.weight"])
    np.testing.assert_array_equal(embed.view(np.uint16), tensors["token_embd.weight"].view(np.uint16))
