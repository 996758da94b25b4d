"""GGUF files: the header as plain Python, and the bytes of one tensor at a time.

The gguf package's own reader builds a NumPy object for every string of the vocabulary: 2.2 s for 49,152 tokens, paid in
both processes; this one takes 0.1 s. Types and dequantisation are the package's.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
_UNQUANTISED = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_SCALAR_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
_DEFAULT_ALIGNMENT = 32
_BLOCKS_AT_A_TIME = 8192


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies and how it is stored.

    Attributes:
      shape: row-major, the reverse of the file's order.
      offset_bytes: from the start of the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """dtype of the decoded array: its own if it is not quantised, else float32."""
        return _UNQUANTISED.get(self.type, np.dtype(np.float32))


class GGUFFile:
    """An open GGUF file; the tensors stay on disk until they are read.

    Attributes:
      metadata: every key of the header.
      tensors: by name, in file order.

    Raises: ValueError if it is no GGUF file, is cut short, or holds a tensor of an unsupported type (named before
      anything is allocated for it).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty; download it again")
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _HeaderReader(self._data, path)
        tensor_count, metadata_count = header.start()
        self.metadata: dict[str, Any] = dict(header.key_value() for _ in range(metadata_count))
        entries = [header.tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path}: general.alignment {alignment!r} must be a positive integer; the file is damaged")
        start = -(-header.position // alignment) * alignment
        self.tensors = {entry[0]: self._tensor(*entry, start) for entry in entries}

    def _tensor(self, name: str, shape: tuple[int, ...], type_number: int, offset: int, start: int) -> GGUFTensor:
        """Check one entry of the header."""
        names = {t.value: t.name for t in GGMLQuantizationType}
        if type_number not in {t.value for t in SUPPORTED_TYPES}:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {names.get(type_number, type_number)}, which is not supported; "
                f"use a file with {', '.join(t.name for t in SUPPORTED_TYPES)}"
            )
        tensor_type = GGMLQuantizationType(type_number)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if not shape or shape[-1] % block_size:
            raise ValueError(
                f"{self.path}: tensor {name!r} has shape {list(shape)}: rows must be a multiple of the "
                f"{block_size} numbers that {tensor_type.name} packs together; the file is damaged"
            )
        num_bytes = math.prod(shape) // block_size * block_bytes
        if start + offset + num_bytes > len(self._data):
            raise ValueError(
                f"{self.path}: the file ends inside tensor {name!r} ({len(self._data)} bytes, at least "
                f"{start + offset + num_bytes} needed); download it again"
            )
        return GGUFTensor(name, tensor_type, shape, start + offset, num_bytes)

    def read(self, name: str) -> np.ndarray:
        """One tensor, decoded by its own type; a read-only view of the file if it is not quantised."""
        tensor = self.tensors[name]
        if tensor.type in _UNQUANTISED:
            count = math.prod(tensor.shape)
            flat = np.frombuffer(self._data, tensor.dtype, count, tensor.offset_bytes)
            return flat.reshape(tensor.shape)
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset_bytes)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
        flat = np.empty(math.prod(tensor.shape), np.float32)
        # The package works through 16 rows at a time: short rows cost more in calls than in arithmetic, so it gets
        # one long row, and not all at once, since it needs several copies.
        for i in range(0, flat.size // block_size, _BLOCKS_AT_A_TIME):
            blocks = raw[i * block_bytes : (i + _BLOCKS_AT_A_TIME) * block_bytes]
            flat[i * block_size : (i + _BLOCKS_AT_A_TIME) * block_size] = dequantize(blocks[None], tensor.type)[0]
        return flat.reshape(tensor.shape)


class _HeaderReader:
    """A cursor over the header. Little-endian, versions 2 and 3."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def start(self) -> tuple[int, int]:
        """(number of tensors, number of metadata keys)."""
        if self._data[:4] != b"GGUF":
            raise ValueError(f"{self._path}: not a GGUF file (it does not start with 'GGUF')")
        self.position = 4
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise ValueError(f"{self._path}: GGUF version {version} is not supported; supported are 2 and 3")
        tensor_count, metadata_count = self._unpack("QQ")
        return tensor_count, metadata_count

    def key_value(self) -> tuple[str, Any]:
        """The next metadata entry."""
        return self._string(), self._value(self._unpack("I")[0])

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """The next tensor: name, row-major shape, type number, offset in bytes from the start of the data."""
        name = self._string()
        (num_dims,) = self._unpack("I")
        shape = self._unpack(f"{num_dims}Q")[::-1]
        type_number, offset = self._unpack("IQ")
        return name, shape, type_number, offset

    def _unpack(self, fmt: str) -> tuple[Any, ...]:
        fmt = "<" + fmt
        try:
            values = struct.unpack_from(fmt, self._data, self.position)
        except struct.error:
            raise ValueError(f"{self._path}: the file ends inside its header; download it again") from None
        self.position += struct.calcsize(fmt)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        (raw,) = self._unpack(f"{length}s")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self._path}: broken text in the header; download it again") from None

    def _value(self, type_number: int) -> Any:
        kind = self._kind(type_number)
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._unpack(_SCALAR_FORMATS[kind])[0]
        item_number, length = self._unpack("IQ")
        item = self._kind(item_number)
        if item in _SCALAR_FORMATS:
            return list(self._unpack(f"{length}{_SCALAR_FORMATS[item]}"))
        return [self._value(item_number) for _ in range(length)]

    def _kind(self, type_number: int) -> GGUFValueType:
        try:
            return GGUFValueType(type_number)
        except ValueError:
            raise ValueError(f"{self._path}: metadata of unknown type {type_number}; the file is damaged") from None
