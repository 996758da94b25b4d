"""T-tiny as files: its tensors under checkpoint names, and its config."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.engine.dense import tensor_shapes
from tests.tiny_config import T_TINY

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = (
    T_TINY[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
    )
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tiny_tensors() -> dict[str, np.ndarray]:
    """Weights N(0, 0.08), float32, under Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(T_TINY)
    # Norms are drawn too: ones would hide a norm that is not loaded.
    return {name: (rng.normal(len(shape) == 1, 0.08, shape)).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], **config: object) -> Path:
    """One safetensors file and its config; a config value of None leaves the key out."""
    folder.mkdir(exist_ok=True)
    write_config(folder, **config)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_config(folder: Path, **changes: object) -> None:
    config = {key: value for key, value in {**T_TINY, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, np.ndarray]], weight_map: Mapping[str, str]) -> Path:
    """Shards and an index file; no index if `weight_map` is empty."""
    folder.mkdir()
    write_config(folder)
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name)
    if weight_map:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(weight_map)}))
    return folder
