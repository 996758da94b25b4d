"""Models that cannot be served: Engine raises ValueError with the file, what is wrong and what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxvllm import Engine
from jaxvllm.executor import DeviceExecutor
from tests.engine.conftest import write_model
from tests.weights import tiny_gguf
from tests.weights.test_gguf import raw_bytes
from tests.weights.tiny_llama import HEAD, tiny_tensors, write_folder


def folder_with(folder: Path, leave_out: str = "", **config: object) -> Path:
    """A whole model but for one tensor and what is changed in its config."""
    tensors = {name: value for name, value in tiny_tensors().items() if name != leave_out}
    write_model(folder)
    return write_folder(folder, tensors, max_position_embeddings=64, **config)


def overwritten(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    folder_with(folder)
    path = folder / name
    path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    return folder


def gguf_with(folder: Path, **metadata: object) -> Path:
    tensors = tiny_gguf.llama_tensors()
    arch = str(metadata.pop("arch", "llama"))
    if kind := metadata.pop("kind", None):
        tensors["blk.0.ffn_up.weight"] = raw_bytes(kind, 160, 256)
    return tiny_gguf.write_gguf(folder / "m.gguf", tensors, arch=arch, metadata={**metadata})


SUPPORTED = "supported are .*LlamaForCausalLM.*Qwen3ForCausalLM"
BAD_MODELS = {
    "no such model": (lambda f: f / "nowhere", r"nowhere' was not found: .*correct the path"),
    "empty folder": (lambda f: f, r"not a model folder \(looked for config\.json\); give"),
    "broken config.json": (
        lambda f: overwritten(f, "config.json", lambda data: data[:-9]),
        r"config\.json: broken JSON .*download the file again",
    ),
    "unknown architecture": (lambda f: folder_with(f, architectures=["MambaForCausalLM"]), f"Mamba.*{SUPPORTED}"),
    "unknown architecture with other fields": (
        lambda f: overwritten(f, "config.json", lambda _: b'{"architectures": ["XForCausalLM"], "n_embd": 7}'),
        f"XForCausalLM is not supported; {SUPPORTED}",
    ),
    "no architecture": (lambda f: folder_with(f, architectures=None), f"must list the model's class.*{SUPPORTED}"),
    "missing field": (lambda f: folder_with(f, hidden_size=None), r'field "hidden_size" is missing; add it'),
    "wrong field": (lambda f: folder_with(f, num_hidden_layers="two"), r'"num_hidden_layers".*got \'two\'; correct'),
    "heads that do not divide": (lambda f: folder_with(f, num_key_value_heads=3), r"\(4\) must be a multiple .* \(3\)"),
    "unknown activation": (lambda f: folder_with(f, hidden_act="swish2"), r"hidden_act 'swish2' is not supported"),
    "quantised weights": (
        lambda f: folder_with(f, quantization_config={"quant_method": "awq"}),
        r"quantised \(awq\).*use the model's unquantised",
    ),
    "truncated safetensors": (
        lambda f: overwritten(f, "model.safetensors", lambda data: data[:-5]),
        r"model\.safetensors: damaged or cut short .*download it again",
    ),
    "no weights": (lambda f: write_model(f), r"no weights found \(looked for model\.safetensors"),
    "missing tensor": (lambda f: folder_with(f, HEAD), r"missing: lm_head\.weight .*tie_word_embeddings"),
    "mis-shaped tensors": (
        lambda f: folder_with(f, intermediate_size=112),
        r"wrong shape: .*mlp\.down_proj\.weight is \[64, 128\], expected \[64, 112\]",
    ),
    "broken tokenizer": (
        lambda f: overwritten(f, "tokenizer.json", lambda data: data[:99]),
        r"the tokenizer cannot be read .*download",
    ),
    "broken generation config": (
        lambda f: overwritten(f, "generation_config.json", lambda _: b"{"),
        r"generation_config\.json: broken JSON",
    ),
    "unknown GGUF architecture": (
        lambda f: gguf_with(f, arch="mamba"),
        "'mamba' is not supported; supported are llama",
    ),
    "unsupported GGUF type": (
        lambda f: gguf_with(f, kind=tiny_gguf.Q.IQ4_NL),
        r"'blk\.0\.ffn_up\.weight' has type IQ4_NL, .*use a file with F32",
    ),
    "unsupported GGUF tokenizer": (
        lambda f: gguf_with(f, **{"tokenizer.ggml.model": "bert"}),
        r"tokenizer.*'bert'.*supported",
    ),
    "a file that is no model": (lambda f: overwritten(f, "README.md", lambda _: b"hi") / "README.md", r"README\.md"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_model_that_cannot_be_served_is_a_value_error_that_says_why(tmp_path, name):
    make, message = BAD_MODELS[name]
    with pytest.raises(ValueError, match=message):
        Engine(make(tmp_path), device="cpu", multiprocess=False)


def test_what_only_the_core_process_finds_is_the_same_error(tmp_path):
    make, message = BAD_MODELS["truncated safetensors"]
    with pytest.raises(ValueError, match=message) as caught:
        Engine(make(tmp_path), device="cpu", multiprocess=True)
    assert type(caught.value) is ValueError


def test_a_pool_too_small_for_the_longest_request_names_sizes_and_remedy(tmp_path, monkeypatch):
    folder = folder_with(tmp_path)
    with pytest.raises(ValueError, match=r"room for \d+ tokens.*max_model_len=64 needs .*lower max_model_len"):
        Engine(folder, device="cpu", multiprocess=False, kv_cache_memory_bytes=30_000)
    monkeypatch.setattr(DeviceExecutor, "initialize", lambda *_: pytest.fail("a number that is given needs no start"))
    with pytest.raises(ValueError, match=r"max_model_len=64 .* 48 tokens .*at most 48, .*num_gpu_blocks_override"):
        Engine(folder, device="cpu", multiprocess=False, num_gpu_blocks_override=4)


def test_a_device_that_is_not_there_is_an_error_that_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"device='gpu' was asked for, but JAX runs on 'cpu': install .* cuda12"):
        Engine(folder_with(tmp_path), device="gpu", multiprocess=False, compile_ahead=False)
