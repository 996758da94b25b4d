"""What every kind of weights file looks like to the loader: names, shapes, dtypes, and one tensor at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor, not read yet.

    Attributes:
      shape: as Hugging Face files state it (row-major).
      dtype: of the array that read() returns; bfloat16 is ml_dtypes'.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


class Checkpoint(Protocol):
    """Weights under their Hugging Face names."""

    @property
    def path(self) -> Path:
        """The file or folder, for error messages."""
        ...

    def tensors(self) -> dict[str, TensorInfo]:
        """Every stored tensor; reads headers only."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor with the shape and dtype that tensors() states; may be a read-only view of the file."""
        ...
