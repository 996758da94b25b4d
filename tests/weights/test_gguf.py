"""GGUF files: each tensor by its own type, rows of q and k put back, damage and unknown types named."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, dequantize

from jaxvllm.model_config import ModelConfig
from jaxvllm.weights import gguf_config
from jaxvllm.weights.gguf_checkpoint import GGUFCheckpoint, unpermute_rows
from jaxvllm.weights.gguf_reader import SUPPORTED_TYPES, GGUFFile
from tests.weights.tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, Q, llama_tensors, quantised, write_gguf


def config_of(file: GGUFFile) -> ModelConfig:
    return ModelConfig.from_hf(gguf_config.hf_config(file), origin=str(file.path))


def raw_bytes(kind: Q, rows: int, columns: int) -> tuple[np.ndarray, Q]:
    """Random blocks of a type that the package reads but cannot write."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(int(kind)).integers(0, 60, (rows, columns // block * block_bytes), np.uint8)
    return data, kind


@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_each_type_decodes_as_the_gguf_package_does(tmp_path, kind):
    columns, rows = 512, 3
    if kind.name.endswith("_K"):
        data, _ = raw_bytes(kind, rows, columns)
    else:
        data, _ = quantised(np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32), kind)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", {"pad": np.ones(7, np.float32), "odd.weight": (data, kind)}))
    checkpoint = GGUFCheckpoint(file)
    info = checkpoint.tensors()["odd.weight"]
    value = checkpoint.read("odd.weight")
    assert info.shape == value.shape == (rows, columns)
    assert info.dtype == value.dtype
    np.testing.assert_array_equal(value.astype(np.float32), dequantize(data, kind))


def test_a_tensor_of_many_blocks_decodes_the_same(tmp_path):
    data, kind = quantised(np.random.default_rng(1).standard_normal((331, 800)).astype(np.float32), Q.Q4_0)
    assert data.size // GGML_QUANT_SIZES[kind][1] > 8192
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", {"w": (data, kind)}))
    np.testing.assert_array_equal(file.read("w"), dequantize(data, kind))


def test_one_file_mixes_types_and_general_file_type_is_not_trusted(tmp_path):
    rng = np.random.default_rng(2)
    values = {name: rng.standard_normal((5, 512)).astype(np.float32) for name in ("a", "b", "c")}
    kinds = {"a": Q.Q5_0, "b": Q.BF16, "c": Q.Q4_1}
    stored = {name: quantised(values[name], kinds[name]) for name in values}
    stored["k"] = raw_bytes(Q.Q6_K, 5, 512)
    path = write_gguf(tmp_path / "m.gguf", stored, metadata={"general.file_type": 2, "general.alignment": 64})
    file = GGUFFile(path)
    for name, (data, kind) in stored.items():
        np.testing.assert_array_equal(file.read(name).astype(np.float32), dequantize(data, kind))


def test_rows_of_each_head_return_to_the_order_of_hugging_face():
    stored_order = np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15])
    np.testing.assert_array_equal(unpermute_rows(stored_order[:, None], 2)[:, 0], np.arange(16))


def permute_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does."""
    return array.reshape(num_heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_only_llama_files_have_permuted_q_and_k_biases_too(tmp_path, arch):
    plain = llama_tensors()
    rng = np.random.default_rng(3)
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        plain[f"blk.0.attn_{part}.bias"] = rng.standard_normal(heads * HEAD_DIM).astype(np.float32)
    stored = dict(plain)
    if arch == "llama":
        for name in plain:
            for part, heads in (("attn_q.", HEADS), ("attn_k.", KV_HEADS)):
                if part in name:
                    stored[name] = permute_rows(plain[name], heads)
    checkpoint = GGUFCheckpoint(GGUFFile(write_gguf(tmp_path / "m.gguf", stored, arch=arch)))
    for part in "qkv":
        for suffix in ("weight", "bias"):
            value = checkpoint.read(f"model.layers.0.self_attn.{part}_proj.{suffix}")
            np.testing.assert_array_equal(value, plain[f"blk.0.attn_{part}.{suffix}"])


def test_quantised_rows_are_reordered_whole(tmp_path):
    tensors = llama_tensors()
    name = "blk.1.attn_k.weight"
    data, kind = quantised(tensors[name], Q.Q8_0)
    checkpoint = GGUFCheckpoint(GGUFFile(write_gguf(tmp_path / "m.gguf", {**tensors, name: (data, kind)})))
    expected = unpermute_rows(dequantize(data, kind), KV_HEADS)
    np.testing.assert_array_equal(checkpoint.read("model.layers.1.self_attn.k_proj.weight"), expected)


def test_names_and_shapes_are_those_of_hugging_face(tmp_path):
    checkpoint = GGUFCheckpoint(GGUFFile(write_gguf(tmp_path / "m.gguf", llama_tensors())))
    infos = checkpoint.tensors()
    assert infos["model.embed_tokens.weight"].shape == (VOCAB, HIDDEN)
    assert infos["model.layers.1.self_attn.q_proj.weight"].shape == (HEADS * HEAD_DIM, HIDDEN)
    assert {"lm_head.weight", "model.norm.weight", "model.layers.0.post_attention_layernorm.weight"} <= set(infos)
    assert len(infos) == 3 + 2 * 9


@pytest.mark.parametrize("has_output", [True, False])
def test_config_is_read_from_the_metadata_and_a_file_without_output_is_tied(tmp_path, has_output):
    tensors = llama_tensors()
    if not has_output:
        del tensors["output.weight"]
    config = config_of(GGUFFile(write_gguf(tmp_path / "m.gguf", tensors)))
    assert (config.architecture, config.num_layers, config.vocab_size) == ("LlamaForCausalLM", 2, VOCAB)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.rms_norm_eps, config.rope.theta, config.max_position_embeddings) == (1e-5, 250000.0, 512)
    assert config.tie_word_embeddings is not has_output
    assert not config.attention_bias


def test_head_dim_of_the_metadata_wins_over_the_quotient(tmp_path):
    metadata = {"qwen3.attention.key_length": 32}
    config = config_of(GGUFFile(write_gguf(tmp_path / "m.gguf", llama_tensors(), arch="qwen3", metadata=metadata)))
    assert (config.architecture, config.head_dim) == ("Qwen3ForCausalLM", 32)


def test_rope_freqs_tensor_becomes_divisors_and_is_no_weight(tmp_path):
    divisors = np.array([1.0, 1.0, 1.572335, 6.351787, *[16.0] * 8], np.float32)
    tensors = {**llama_tensors(), "rope_freqs.weight": divisors}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", tensors))
    rope = config_of(file).rope
    assert rope.type == "default"
    np.testing.assert_array_equal(np.float32(rope.frequency_divisors), divisors)
    assert "rope_freqs.weight" not in GGUFCheckpoint(file).tensors()


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_scaling_of_the_metadata_reaches_the_config(tmp_path, metadata):
    rope = config_of(GGUFFile(write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=metadata))).rope
    assert (rope.type, rope.factor) == ("linear", 4.0)


def test_bands_of_yarn_reach_the_config(tmp_path):
    bands = {"yarn_beta_fast": 24.0, "yarn_beta_slow": 2.0, "original_context_length": 128}
    metadata = {f"qwen3.rope.scaling.{key}": value for key, value in {"type": "yarn", "factor": 4.0, **bands}.items()}
    rope = config_of(GGUFFile(write_gguf(tmp_path / "m.gguf", llama_tensors(), arch="qwen3", metadata=metadata))).rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert (rope.beta_fast, rope.beta_slow) == (24.0, 2.0)


def test_qwen2_biases_are_seen(tmp_path):
    tensors = {**llama_tensors(), "blk.0.attn_q.bias": np.zeros(HEADS * HEAD_DIM, np.float32)}
    config = config_of(GGUFFile(write_gguf(tmp_path / "m.gguf", tensors, arch="qwen2")))
    assert (config.architecture, config.attention_bias) == ("Qwen2ForCausalLM", True)
    assert not config.attention_output_bias


def test_attention_that_looks_both_ways_is_refused(tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata={"llama.attention.causal": False}))
    with pytest.raises(ValueError, match="is_causal=false"):
        config_of(file)


@pytest.mark.parametrize("kind", [Q.IQ4_NL, Q.Q2_K])
def test_unsupported_type_is_named_with_its_tensor_before_anything_is_read(tmp_path, kind):
    path = write_gguf(tmp_path / "m.gguf", {**llama_tensors(), "blk.1.ffn_up.weight": raw_bytes(kind, 2, 256)})
    with pytest.raises(ValueError, match=rf"blk\.1\.ffn_up\.weight.*{kind.name}.*use a file with F32"):
        GGUFFile(path)


def test_type_number_unknown_to_the_package_is_named_with_its_tensor(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"strange": (np.zeros((2, 18), np.uint8), Q.Q4_0)})
    data = bytearray(path.read_bytes())
    entry = data.index(b"strange") + len("strange") + 4 + 2 * 8
    assert data[entry] == Q.Q4_0
    data[entry] = 250
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"strange.*type 250"):
        GGUFFile(path)


@pytest.mark.parametrize("keep", [0, 3, 12, 200, -10])
def test_truncated_file_is_an_error_that_names_it(tmp_path, keep):
    path = write_gguf(tmp_path / "cut.gguf", llama_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        GGUFFile(path)


def test_damaged_length_is_an_error_not_an_allocation(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_tensors())
    data = bytearray(path.read_bytes())
    data[24:32] = (2**62).to_bytes(8, "little")  # length of the first key
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("metadata", "arch", "message"),
    [
        ({}, "gptj", "'gptj' is not supported; supported are llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "llama", "mixture-of-experts"),
        ({"qwen3.rope.dimension_count": 12}, "qwen3", r"qwen3\.rope\.dimension_count \(12\) is not the size of a head"),
        ({"llama.embedding_length": None}, "llama", r"llama\.embedding_length is missing"),
    ],
)
def test_model_that_cannot_be_served_is_refused_by_name(tmp_path, metadata, arch, message):
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), arch=arch, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        gguf_config.hf_config(GGUFFile(path))


def test_every_end_of_turn_token_is_collected(tmp_path):
    metadata = {
        "tokenizer.ggml.tokens": ["<|endoftext|>", "x", "<|eot_id|>", "<end>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [3, 1, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 3,
        "general.sampling.temp": 0.6,
    }
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=metadata))
    assert gguf_config.generation_config(file) == {"eos_token_id": [3, 0, 2], "temperature": 0.6}
