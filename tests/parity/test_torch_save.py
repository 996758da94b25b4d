"""What torch.save writes is read bit for bit without torch."""

import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from jaxvllm.weights.folder import open_folder
from jaxvllm.weights.pytorch_file import PytorchFile


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float32).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_modules_state_dict_is_read_bit_for_bit(tmp_path, dtype):
    torch.manual_seed(0)
    state = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5)).to(dtype).state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    checkpoint = open_folder(tmp_path)
    assert {name: info.shape for name, info in checkpoint.tensors().items()} == {
        name: tuple(value.shape) for name, value in state.items()
    }
    for name, value in state.items():
        read = checkpoint.read(name)
        assert str(read.dtype) == str(dtype).removeprefix("torch.")
        np.testing.assert_array_equal(read.astype(np.float32), as_numpy(value))


def test_views_parameters_and_shared_storages_are_read(tmp_path):
    base = torch.arange(60, dtype=torch.float32).reshape(4, 15)
    state = OrderedDict(
        transposed=base.T,
        part=base[1:3, 2:11:4],
        parameter=torch.nn.Parameter(base[2]),
        empty=base[:, :0],
        scalar=base[3, 3],
    )
    torch.save(state, tmp_path / "m.bin")
    file = PytorchFile(tmp_path / "m.bin")
    for name, value in state.items():
        np.testing.assert_array_equal(file.read(name), as_numpy(value))


def test_shards_follow_their_index(tmp_path):
    shards = {
        "pytorch_model-00001-of-00002.bin": {"a": torch.ones(3)},
        "pytorch_model-00002-of-00002.bin": {"b": torch.zeros(2)},
    }
    for name, state in shards.items():
        torch.save(state, tmp_path / name)
    weight_map = {tensor: name for name, state in shards.items() for tensor in state}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(open_folder(tmp_path).tensors()) == {"a", "b"}


def test_a_whole_pickled_module_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.bin")
    with pytest.raises(ValueError, match=r"refused: it names torch\.nn"):
        PytorchFile(tmp_path / "m.bin")


def test_the_format_before_1_6_is_refused_by_name(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"PyTorch before 1\.6"):
        PytorchFile(tmp_path / "m.bin")


def test_a_truncated_file_is_named(tmp_path):
    torch.save({"a": torch.ones(3000)}, tmp_path / "cut.bin")
    data = (tmp_path / "cut.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cut\.bin: damaged"):
        PytorchFile(tmp_path / "cut.bin")


def test_tensors_read_in_many_threads_are_right(tmp_path):
    state = {f"t{i}": torch.full((997,), i, dtype=torch.float32) for i in range(60)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    file = PytorchFile(tmp_path / "pytorch_model.bin")
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda i: file.read(f"t{i % 60}"), range(1200)))
    assert all((array == i % 60).all() for i, array in enumerate(arrays))
