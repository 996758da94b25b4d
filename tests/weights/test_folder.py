"""Which files of a folder count, and what damage to them says."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.weights.folder import open_folder

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.q", "model.layers.1.q", "lm_head.weight"]
    return {name: rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16) for name in names}


def write_shards(folder: Path, *, index: bool = True) -> dict[str, np.ndarray]:
    arrays = tensors()
    names = list(arrays)
    parts = {SHARDS[0]: names[:3], SHARDS[1]: names[3:]}
    for file, part in parts.items():
        save_file({name: arrays[name] for name in part}, folder / file)
    if index:
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return arrays


def assert_reads(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    checkpoint = open_folder(folder)
    infos = checkpoint.tensors()
    assert set(infos) == set(arrays)
    for name, array in arrays.items():
        assert (infos[name].shape, infos[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(checkpoint.read(name), array)


def test_single_file_is_read_in_bfloat16(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    assert_reads(tmp_path, tensors())


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_with_and_without_an_index(tmp_path, index):
    assert_reads(tmp_path, write_shards(tmp_path, index=index))


@pytest.mark.parametrize("index", [True, False])
def test_stray_files_beside_shards_are_ignored(tmp_path, index):
    arrays = write_shards(tmp_path, index=index)
    save_file({"model.layers.0.q": np.full((3, 5), 7.0, np.float32)}, tmp_path / "old.safetensors")
    save_file({"layers.0.attention.wq": np.ones(2, np.float32)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    assert_reads(tmp_path, arrays)


def test_index_decides_which_copy_of_a_tensor_counts(tmp_path):
    arrays = write_shards(tmp_path)
    second = {name: arrays[name] for name in list(arrays)[3:]}
    save_file({**second, "model.norm.weight": np.full((3, 5), 7.0, np.float32)}, tmp_path / SHARDS[1])
    assert_reads(tmp_path, arrays)


def test_two_copies_without_an_index_are_an_error_that_names_both_files(tmp_path):
    write_shards(tmp_path, index=False)
    save_file(tensors(), tmp_path / SHARDS[1])
    with pytest.raises(ValueError, match=rf"model\.embed_tokens\.weight.*{SHARDS[0]}.*{SHARDS[1]}"):
        open_folder(tmp_path)


def test_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ValueError, match=rf"{SHARDS[1]}: missing"):
        open_folder(tmp_path)


def test_missing_shard_without_an_index_is_noticed(tmp_path):
    write_shards(tmp_path, index=False)
    (tmp_path / SHARDS[0]).unlink()
    with pytest.raises(ValueError, match="shard 1 of 2 is missing"):
        open_folder(tmp_path)


def test_tensor_that_only_the_index_has_is_named_with_its_file(tmp_path):
    write_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.q"] = SHARDS[0]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{SHARDS[0]}: tensor 'model\.layers\.9\.q'"):
        open_folder(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, -10])
def test_truncated_file_is_named(tmp_path, keep):
    write_shards(tmp_path)
    path = tmp_path / SHARDS[1]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"{SHARDS[1]}: damaged or cut short"):
        open_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}'])
def test_broken_index_is_named(tmp_path, text):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: broken index"):
        open_folder(tmp_path)


def test_index_cannot_point_outside_the_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(), "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="broken index"):
        open_folder(folder)


def test_unsupported_dtype_is_named_with_its_tensor(tmp_path):
    save_file({"w": np.zeros(4, ml_dtypes.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'w' has dtype F8_E4M3"):
        open_folder(tmp_path)


def test_folder_without_weights_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"no weights found \(looked for model\.safetensors.*pytorch_model\.bin"):
        open_folder(tmp_path)
