"""Files as they occur in the wild (cases D01, D02, D11, D12): the right logits, or an error that says why not."""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize

from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import MODELS, get_model_class
from jaxvllm.weights.gguf_checkpoint import hf_name, unpermute_rows
from jaxvllm.weights.load import load_params
from tests.engine.dense import dense_logits
from tests.parity.paged_driver import PagedDriver
from tests.tiny_config import T_TINY
from tests.weights import tiny_gguf, tiny_llama
from tests.weights.test_gguf import permute_rows, raw_bytes
from tests.weights.tiny_llama import EMBEDDING, HEAD, tiny_tensors, write_folder, write_shards

IDS = np.random.default_rng(5).integers(0, tiny_llama.VOCAB, 23).tolist()
TENSORS = tiny_tensors()
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@cache
def driver_of(config) -> PagedDriver:
    """One compiled program a config; `hf` does not count in its comparison."""
    return PagedDriver(get_model_class(config.architecture)(config), config, {}, num_tokens=len(IDS))


def params_of(path: Path) -> dict[str, jax.Array]:
    source = resolve(path, supported=MODELS)
    specs = param_specs(get_model_class(source.config.architecture)(source.config))
    params = load_params(specs, source.open_checkpoint(), dtype=np.dtype(np.float32))
    assert params.keys() == specs.keys()
    return params


def logits_of(path: Path) -> np.ndarray:
    """f32[T, V] of a folder or file, loaded as an engine loads it."""
    driver = driver_of(dataclasses.replace(resolve(path).config, dtype="float32"))
    driver.params = params_of(path)
    logits = driver.prefill(driver.add(IDS))
    driver.free = list(range(96, 0, -1))
    return logits


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=tolerance)


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in TENSORS.items() if name not in names}


@pytest.mark.parametrize(
    ("tie", "stored", "head"),
    [
        (True, without(HEAD), TENSORS[EMBEDDING]),
        (True, TENSORS, TENSORS[EMBEDDING]),
        (False, TENSORS, TENSORS[HEAD]),
        (True, {**without(HEAD, EMBEDDING), HEAD: TENSORS[EMBEDDING]}, TENSORS[EMBEDDING]),
    ],
    ids=["tied", "tied, another head stored", "untied", "tied, the head alone stored"],
)
def test_d01_logits_come_from_the_head_that_the_config_means(tmp_path, tie, stored, head):
    got = logits_of(write_folder(tmp_path / "m", stored, tie_word_embeddings=tie))
    assert_close(got, dense_logits(T_TINY, {**TENSORS, HEAD: head}, IDS))


@pytest.mark.parametrize("tie", [False, None])
def test_d01_a_head_that_is_not_there_is_an_error_that_names_it(tmp_path, tie):
    folder = write_folder(tmp_path / "m", without(HEAD), tie_word_embeddings=tie)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        logits_of(folder)


def split() -> tuple[dict[str, dict[str, np.ndarray]], dict[str, str]]:
    """Two shards, and the index's weight_map."""
    weight_map = {name: SECOND if i % 2 else FIRST for i, name in enumerate(sorted(TENSORS))}
    assert weight_map["model.norm.weight"] == FIRST
    shards = {file: {n: TENSORS[n] for n in weight_map if weight_map[n] == file} for file in (FIRST, SECOND)}
    return shards, weight_map


def test_d02_shards_give_the_logits_of_one_file_whatever_lies_beside_them(tmp_path):
    expected = dense_logits(T_TINY, TENSORS, IDS)
    shards, weight_map = split()
    stray = {name: value + 1 for name, value in TENSORS.items() if ".layers.0." in name}
    other_copy = {**shards[SECOND], "model.norm.weight": np.full(tiny_llama.HIDDEN, 7, np.float32)}
    variants = {
        "plain": (shards, weight_map),
        "a stray file": ({**shards, "old.safetensors": stray}, weight_map),
        "another copy in shard 2": ({**shards, SECOND: other_copy}, weight_map),
        "the same under other names": ({**shards, "consolidated.safetensors": {"tok": np.ones(3)}}, weight_map),
        "no index": (shards, {}),
    }
    for name, (files, index) in variants.items():
        assert_close(logits_of(write_shards(tmp_path / name, files, index)), expected)


def test_d02_a_shard_or_tensor_that_is_missing_or_cut_is_named(tmp_path):
    shards, weight_map = split()
    folder = write_shards(tmp_path / "absent", {FIRST: shards[FIRST]}, weight_map)
    with pytest.raises(ValueError, match=f"{SECOND}: missing"):
        logits_of(folder)
    folder = write_shards(tmp_path / "ghost", shards, {**weight_map, "model.ghost.weight": FIRST})
    with pytest.raises(ValueError, match=rf"{FIRST}: tensor 'model\.ghost\.weight' is not in this file"):
        logits_of(folder)
    folder = write_shards(tmp_path / "cut", shards, weight_map)
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"{SECOND}: damaged or cut short"):
        logits_of(folder)


def gguf_tensors(arch: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """T-tiny under Hugging Face's names, and as a GGUF file of an architecture stores it."""
    tensors = dict(TENSORS)
    if arch == "qwen2":
        rng = np.random.default_rng(1)
        for i in range(tiny_llama.LAYERS):
            for part in "qkv":
                shape = TENSORS[f"model.layers.{i}.self_attn.{part}_proj.weight"].shape[:1]
                tensors[f"model.layers.{i}.self_attn.{part}_proj.bias"] = rng.normal(0, 0.3, shape).astype(np.float32)
    names = [*tiny_gguf.llama_tensors(), *(f"blk.{i}.attn_{p}.bias" for i in range(tiny_llama.LAYERS) for p in "qkv")]
    stored = {name: tensors[hf_name(name)] for name in names if hf_name(name) in tensors}
    for name in stored:
        if arch == "llama" and ("attn_q." in name or "attn_k." in name):
            heads = tiny_llama.HEADS if "attn_q." in name else tiny_llama.KV_HEADS
            stored[name] = permute_rows(stored[name], heads)
    assert len(stored) == len(tensors)
    return tensors, stored


def gguf_header(arch: str, **changes: object) -> dict[str, object]:
    return {
        f"{arch}.embedding_length": tiny_llama.HIDDEN,
        f"{arch}.feed_forward_length": tiny_llama.FFN,
        f"{arch}.attention.key_length": tiny_llama.HEAD_DIM,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.context_length": 8192,
        **changes,
    }


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_d11_logits_of_a_gguf_file_in_f32_equal_those_of_safetensors(tmp_path, arch):
    tensors, stored = gguf_tensors(arch)
    gguf = tiny_gguf.write_gguf(tmp_path / "m.gguf", stored, arch=arch, metadata=gguf_header(arch))
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[arch]
    folder = write_folder(tmp_path / "m", tensors, architectures=[architecture])
    got, expected = params_of(gguf), params_of(folder)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    if arch == "llama":
        assert_close(logits_of(gguf), logits_of(folder), tolerance=1e-5)
        assert_close(logits_of(gguf), dense_logits(T_TINY, TENSORS, IDS))


D12_KINDS = {
    "token_embd": Q.Q8_0,
    "blk.0.ffn_down": Q.Q4_K,
    "blk.1.ffn_down": Q.Q6_K,
    "blk.0.ffn_gate": Q.F16,
    "blk.1.ffn_gate": Q.BF16,
    "blk.0.ffn_up": Q.Q4_0,
    "blk.1.ffn_up": Q.Q5_1,
}


def d12_stored() -> dict[str, tuple[np.ndarray, Q]]:
    """hidden 288, ffn 512: rows that some types do not fit, so that one file mixes many."""
    hidden, ffn = 288, 512
    rng = np.random.default_rng(2)
    stored = {}
    for name, tensor in tiny_gguf.llama_tensors().items():
        stem = name.removesuffix(".weight")
        rows = {"attn_k": 144, "attn_v": 144, "ffn_gate": ffn, "ffn_up": ffn, "token_embd": tiny_gguf.VOCAB}
        rows = rows.get(stem.rpartition(".")[2], hidden)
        columns = ffn if "ffn_down" in stem else hidden
        kind = D12_KINDS.get(stem, Q.Q5_0 if "attn_" in stem else Q.F32)
        if tensor.ndim == 1:
            stored[name] = rng.normal(1, 0.1, hidden).astype(np.float32), Q.F32
        elif kind.name.endswith("_K"):
            stored[name] = raw_bytes(kind, rows, columns)
        else:
            stored[name] = tiny_gguf.quantised(rng.normal(0, 0.08, (rows, columns)).astype(np.float32), kind)
    del stored["output.weight"]
    return stored


def test_d12_each_tensor_of_a_mixed_file_is_decoded_by_its_own_type(tmp_path):
    stored = d12_stored()
    header = {"llama.embedding_length": 288, "llama.feed_forward_length": 512, "general.alignment": 64}
    gguf = tiny_gguf.write_gguf(tmp_path / "m.gguf", stored, metadata={**header, "general.file_type": 2})
    decoded = {name: dequantize(data, kind).astype(np.float32) for name, (data, kind) in stored.items()}
    for name in decoded:
        for part, heads in (("attn_q.", tiny_gguf.HEADS), ("attn_k.", tiny_gguf.KV_HEADS)):
            decoded[name] = unpermute_rows(decoded[name], heads) if part in name else decoded[name]
    tensors = {hf_name(name): value for name, value in decoded.items()}
    sizes = {"hidden_size": 288, "intermediate_size": 512, "head_dim": 72, "vocab_size": tiny_gguf.VOCAB}
    expected = params_of(write_folder(tmp_path / "m", tensors, tie_word_embeddings=True, **sizes))
    got = params_of(gguf)
    assert got.keys() == expected.keys() and not any("lm_head" in name for name in got)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)

    stored["blk.0.ffn_down.weight"] = raw_bytes(Q.Q2_K, 288, 512)
    bad = tiny_gguf.write_gguf(tmp_path / "bad.gguf", stored, metadata=header)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_down\.weight.*Q2_K"):
        resolve(bad)
