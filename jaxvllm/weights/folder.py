"""A Hugging Face folder's weights as one Checkpoint: which files count, and which file a tensor is read from."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxvllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxvllm.weights.pytorch_file import PytorchFile
from jaxvllm.weights.safetensors_file import SafetensorsFile


@dataclass(frozen=True)
class _Format:
    """How one kind of weights file is named."""

    stem: str
    suffix: str
    open: Callable[[Path], Checkpoint]

    @property
    def single(self) -> str:
        return self.stem + self.suffix

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"


_FORMATS = (_Format("model", ".safetensors", SafetensorsFile), _Format("pytorch_model", ".bin", PytorchFile))


class FolderCheckpoint:
    """Tensors from several files of a folder.

    Args:
      folder: for messages.
      owners: tensor name -> the open file it is read from.
    """

    def __init__(self, folder: Path, owners: Mapping[str, Checkpoint]) -> None:
        self._folder = folder
        self._owners = owners
        infos = {owner: owner.tensors() for owner in set(owners.values())}
        self._infos = {name: infos[owner][name] for name, owner in owners.items()}

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor that belongs to the model."""
        return dict(self._infos)

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        return self._owners[name].read(name)


def open_folder(folder: Path) -> FolderCheckpoint:
    """Open the weights of a folder: safetensors if it has any, else pytorch_model.bin.

    An index file is the authority on what is read from where; other files beside it are not looked at.

    Raises: ValueError that names a missing, damaged or doubtful file or tensor.
    """
    for kind in _FORMATS:
        index = folder / kind.index
        if index.exists():
            return _open_indexed(folder, index, kind)
        files = _files_without_index(folder, kind)
        if files:
            return _open_all(folder, files, kind)
    looked_for = " or ".join(name for kind in _FORMATS for name in (kind.single, kind.index))
    raise ValueError(f"{folder}: no weights found (looked for {looked_for}); download them into the folder")


def _open_indexed(folder: Path, index: Path, kind: _Format) -> FolderCheckpoint:
    """Read each tensor from the file that the index assigns it to, and from no other."""
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
            raise ValueError("a weight_map value is no plain file name")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: broken index ({error!r}); download the file again") from error
    opened = {}
    for file_name in sorted(set(weight_map.values())):
        if not (folder / file_name).exists():
            raise ValueError(f"{folder / file_name}: missing, though {index.name} lists it; download it")
        opened[file_name] = kind.open(folder / file_name)
    names = {file_name: opened[file_name].tensors().keys() for file_name in opened}
    for tensor_name, file_name in weight_map.items():
        if tensor_name not in names[file_name]:
            raise ValueError(
                f"{folder / file_name}: tensor {tensor_name!r} is not in this file, though {index.name} says so; "
                "download both again"
            )
    return FolderCheckpoint(folder, {tensor: opened[file_name] for tensor, file_name in weight_map.items()})


def _files_without_index(folder: Path, kind: _Format) -> list[Path]:
    """The one file of that kind, or the numbered shards, or whatever has the suffix."""
    if (folder / kind.single).exists():
        return [folder / kind.single]
    shards = [path for path in sorted(folder.glob(f"*{kind.suffix}")) if _shard_number(path)]
    if shards:
        present = {_shard_number(path) for path in shards}
        total = max(number[1] for number in present if number)
        for i in range(1, total + 1):
            if (i, total) not in present:
                raise ValueError(f"{folder}: shard {i} of {total} is missing beside {shards[0].name}; download it")
        return shards
    # consolidated.* is the same model once more, under other names. .bin alone may be anything (training state).
    every = [path for path in sorted(folder.glob(f"*{kind.suffix}")) if not path.name.startswith("consolidated")]
    return every if kind.suffix == ".safetensors" else []


def _shard_number(path: Path) -> tuple[int, int] | None:
    """(2, 5) for model-00002-of-00005.safetensors."""
    match = re.search(r"-(\d+)-of-(\d+)$", path.stem)
    return (int(match[1]), int(match[2])) if match else None


def _open_all(folder: Path, files: list[Path], kind: _Format) -> FolderCheckpoint:
    """Read all files; a tensor that two of them hold is an error, since nothing says which one counts."""
    owners: dict[str, Checkpoint] = {}
    for file in (kind.open(path) for path in files):
        for name in file.tensors():
            if name in owners:
                raise ValueError(
                    f"{folder}: tensor {name!r} is in {owners[name].path.name} and in {file.path.name}, and "
                    f"there is no {kind.index}; remove the file that does not belong there"
                )
            owners[name] = file
    return FolderCheckpoint(folder, owners)
