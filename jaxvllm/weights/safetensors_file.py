"""SafetensorsFile: one .safetensors file as a Checkpoint."""

import json
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxvllm.weights.checkpoint import TensorInfo

_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsFile:
    """An open file; reading gives views of it.

    Raises: ValueError that names the file if it is cut short or no safetensors file, and the tensor if its dtype is not
      supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="numpy"):
                pass  # It checks the header and that the tensors lie in the file, side by side.
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged or cut short ({error}); download it again") from error
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (header_bytes,) = struct.unpack_from("<Q", self._data)
        header = json.loads(self._data[8 : 8 + header_bytes])
        self._infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{path}: tensor {name!r} has dtype {entry['dtype']}, which is not supported; supported are "
                    f"{', '.join(_DTYPES)}"
                )
            self._infos[name] = TensorInfo(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            self._offsets[name] = 8 + header_bytes + entry["data_offsets"][0]

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor in the file."""
        return dict(self._infos)

    def read(self, name: str) -> np.ndarray:
        """One tensor, a read-only view of the file."""
        info = self._infos[name]
        flat = np.frombuffer(self._data, info.dtype, math.prod(info.shape), self._offsets[name])
        return flat.reshape(info.shape)
