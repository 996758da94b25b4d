"""SafetensorsFile: one .safetensors file as a Checkpoint."""

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
    """An open file; the tensors stay on disk until they are read.

    Raises: ValueError that names the file if it is cut short or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged or cut short ({error}); download it again") from error

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor in the file."""
        infos = {}
        for name in self._file.keys():  # noqa: SIM118 - safe_open is no mapping
            view = self._file.get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise ValueError(
                    f"{self._path}: tensor {name!r} has dtype {view.get_dtype()}, which is not supported; supported "
                    f"are {', '.join(_DTYPES)}"
                )
            infos[name] = TensorInfo(tuple(view.get_shape()), _DTYPES[view.get_dtype()])
        return infos

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        return self._file.get_tensor(name)
