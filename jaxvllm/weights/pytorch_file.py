"""PytorchFile: one pytorch_model.bin as a Checkpoint, without torch and without running what the file says.

The file is a zip archive: data.pkl rebuilds the dict of tensors by calling named functions, and data/<key> holds the
bytes. Pickle can name any function there is, so the reader below knows a handful of names and refuses the rest.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxvllm.weights.checkpoint import TensorInfo

_STORAGE_DTYPES: Mapping[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


# What the pickle gets hold of is immutable and without a __dict__: it could set attributes on anything else.
class _StorageType(NamedTuple):
    """Stands for torch.FloatStorage and its like."""

    name: str


class _Storage(NamedTuple):
    """A run of numbers in the archive."""

    key: str
    dtype: np.dtype
    num_elements: int


class _Tensor(NamedTuple):
    """A strided view of a storage; offset and strides in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RebuildTensor:
    """Stands for torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, storage: _Storage, offset: int, shape: tuple, strides: tuple, *_: Any) -> _Tensor:
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor without a storage")
        return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


class _RebuildParameter:
    """Stands for torch._utils._rebuild_parameter."""

    __slots__ = ()

    def __call__(self, data: _Tensor, *_: Any) -> _Tensor:
        return data


_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    **{("torch", name): _StorageType(name) for name in _STORAGE_DTYPES},
}


class _Unpickler(pickle.Unpickler):
    """Resolves only the names above; what it calls makes plain records."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no plain weights file needs")
        return _ALLOWED[module_name, global_name]

    def persistent_load(self, pid: Any, /) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageType):
            raise pickle.UnpicklingError("a persistent id that is no storage")
        return _Storage(str(pid[2]), _STORAGE_DTYPES[pid[1].name], int(pid[4]))


class PytorchFile:
    """An open file; the tensors stay on disk until they are read.

    Raises: ValueError that names the file if it is damaged, too old, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # zipfile locks its reads, but skips an entry's extra field (which torch writes) relative to where another
        # thread may have left the file (CPython 3.12): wrong bytes.
        self._lock = Lock()
        try:
            self._zip = zipfile.ZipFile(path)
            # Strip "data.pkl": the folder inside the archive is named after the file it was first saved as.
            pickled = [name for name in self._zip.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
            self._prefix = pickled[0].removesuffix("data.pkl")
            with self._zip.open(pickled[0]) as file:
                state = _Unpickler(file, encoding="utf-8").load()
        except (zipfile.BadZipFile, IndexError) as error:
            raise ValueError(
                f"{path}: damaged, or written by PyTorch before 1.6; download it again, or convert it to safetensors"
            ) from error
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path}: refused: {error}; use the model's safetensors") from error
        except Exception as error:  # A damaged pickle raises whatever its first wrong opcode stumbles over.
            raise ValueError(f"{path}: damaged pickle ({error!r}); download it again") from error
        if not isinstance(state, Mapping):
            raise ValueError(
                f"{path}: holds {type(state).__name__}, not a dict of tensors; use the model's safetensors"
            )
        self._tensors = {str(name): value for name, value in dict(state).items() if isinstance(value, _Tensor)}
        self._check_byte_order()
        self._check_storages()

    def _check_byte_order(self) -> None:
        name = f"{self._prefix}byteorder"
        if name in self._zip.namelist() and self._zip.read(name) != b"little":
            raise ValueError(f"{self._path}: not little-endian; convert it to safetensors")

    def _check_storages(self) -> None:
        """Every tensor must lie inside its storage: strides are the file's word, and reading is by address."""
        sizes = {info.filename: info.file_size for info in self._zip.infolist()}
        for name, tensor in self._tensors.items():
            storage = tensor.storage
            # The comparisons below hold for what is not negative; a shape and its strides go together.
            is_plain = len(tensor.shape) == len(tensor.strides) and (
                min(tensor.offset, *tensor.shape, *tensor.strides, 0) == 0
            )
            spans = [(n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=False)]
            end = 0 if 0 in tensor.shape else tensor.offset + sum(spans) + 1
            available = sizes.get(f"{self._prefix}data/{storage.key}", -1)
            needed = storage.num_elements * storage.dtype.itemsize
            if not is_plain or end > storage.num_elements or needed > available:
                raise ValueError(f"{self._path}: tensor {name!r} lies outside its data; download the file again")

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor in the file."""
        return {name: TensorInfo(tensor.shape, tensor.storage.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor; reads its whole storage."""
        tensor = self._tensors[name]
        storage = tensor.storage
        with self._lock:
            raw = self._zip.read(f"{self._prefix}data/{storage.key}")
        flat = np.frombuffer(raw, storage.dtype, storage.num_elements)[tensor.offset :]
        strides = tuple(stride * storage.dtype.itemsize for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
