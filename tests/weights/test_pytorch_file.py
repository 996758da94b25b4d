"""pytorch_model.bin from strangers: only tensors come out, and nothing that the file names is run.

The files here are put together by hand; tests/parity reads what torch.save writes.
"""

import collections
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxvllm.weights.pytorch_file import PytorchFile


class Evil:
    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


class Named:
    """Pickles as a global of that module and name."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Storage:
    def __init__(self, kind, key, count):
        self.pid = ("storage", Named("torch", kind), key, "cpu", count)


class Tensor:
    def __init__(self, storage, offset, shape, strides):
        self.args = (storage, offset, shape, strides, False, collections.OrderedDict())


class Writer(pickle._Pickler):  # the Python one: its dispatch can be overridden
    dispatch = pickle._Pickler.dispatch.copy()

    def persistent_id(self, obj):
        return obj.pid if isinstance(obj, Storage) else None

    def save_named(self, obj):
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())

    def save_tensor(self, obj):
        self.save(Named("torch._utils", "_rebuild_tensor_v2"))
        self.save(obj.args)
        self.write(pickle.REDUCE)

    dispatch[Named] = save_named
    dispatch[Tensor] = save_tensor


def write(path: Path, state: object, data: dict[str, bytes], *, byteorder: bytes = b"little") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            Writer(file, 2).dump(state)
        archive.writestr("archive/byteorder", byteorder)
        for key, raw in data.items():
            archive.writestr(f"archive/data/{key}", raw)
    return path


NUMBERS = np.arange(24, dtype=np.float32)


def test_views_of_one_storage_are_read_with_offset_and_strides(tmp_path):
    storage = Storage("FloatStorage", "0", 24)
    state = {"a": Tensor(storage, 4, (2, 3), (6, 2)), "b": Tensor(storage, 0, (), ()), "step": 7}
    file = PytorchFile(write(tmp_path / "m.bin", state, {"0": NUMBERS.tobytes()}))
    assert {name: info.shape for name, info in file.tensors().items()} == {"a": (2, 3), "b": ()}
    np.testing.assert_array_equal(file.read("a"), [[4, 6, 8], [10, 12, 14]])
    assert file.read("b") == 0


@pytest.mark.parametrize("function", [os.system, eval, getattr, __import__, open, pickle.loads, np.fromfile])
def test_a_file_that_names_any_other_function_is_refused_and_the_function_never_runs(tmp_path, function):
    mark = tmp_path / "ran"
    arguments = (f"touch {mark}",) if function is os.system else (str(mark), "w")
    path = write(tmp_path / "pytorch_model.bin", {"w": Evil(function, *arguments)}, {})
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin: refused: it names .*{function.__name__}"):
        PytorchFile(path)
    assert not mark.exists()


def test_a_dotted_name_does_not_reach_through_an_allowed_one(tmp_path):
    path = tmp_path / "m.bin"
    with zipfile.ZipFile(path, "w") as archive:
        # protocol 4, STACK_GLOBAL "collections" "OrderedDict.__init__.__globals__"
        archive.writestr(
            "archive/data.pkl", b"\x80\x04\x8c\x0bcollections\x8c\x20OrderedDict.__init__.__globals__\x93."
        )
    with pytest.raises(ValueError, match="refused: it names collections"):
        PytorchFile(path)


def test_a_file_cannot_change_what_the_next_file_gets(tmp_path):
    # BUILD sets attributes on whatever is on the stack: here on the allowed rebuild function.
    path = tmp_path / "m.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"ctorch._utils\n_rebuild_tensor_v2\n(S'x'\nS'y'\ndb.")
    with pytest.raises(ValueError, match=r"m\.bin"):
        PytorchFile(path)


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "num_elements"),
    [
        (20, (2, 3), (3, 1), 24),
        (0, (5, 5), (5, 1), 24),
        (-1, (2,), (1,), 24),
        (8, (3,), (-1,), 24),
        (0, (30,), (1,), 30),
    ],
)
def test_a_tensor_outside_its_data_is_refused_before_it_is_read(tmp_path, offset, shape, strides, num_elements):
    state = {"w": Tensor(Storage("FloatStorage", "0", num_elements), offset, shape, strides)}
    path = write(tmp_path / "m.bin", state, {"0": NUMBERS.tobytes()})
    with pytest.raises(ValueError, match="tensor 'w' lies outside its data"):
        PytorchFile(path)


def test_a_tensor_without_data_is_refused(tmp_path):
    state = {"w": Tensor(Storage("FloatStorage", "5", 24), 0, (24,), (1,))}
    with pytest.raises(ValueError, match="tensor 'w' lies outside its data"):
        PytorchFile(write(tmp_path / "m.bin", state, {"0": NUMBERS.tobytes()}))


def test_other_byte_order_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not little-endian"):
        PytorchFile(write(tmp_path / "m.bin", {}, {}, byteorder=b"big"))


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04 cut"])
def test_no_zip_archive_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "old.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"old\.bin: damaged, or written by PyTorch before 1\.6"):
        PytorchFile(path)


@pytest.mark.parametrize("pickled", [b"", b"\x80\x02}", b"garbage", b"\x80\x02K\x07."])
def test_damaged_or_other_pickle_is_an_error_that_names_the_file(tmp_path, pickled):
    path = tmp_path / "odd.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(ValueError, match=r"odd\.bin"):
        PytorchFile(path)
