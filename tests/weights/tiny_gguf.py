"""Writes small GGUF files with the gguf package."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

Q = GGMLQuantizationType
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 96, 160, 2, 4, 2, 24, 11


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors of a tiny llama under GGUF names, q and k as they come (not permuted)."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), "output.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray | tuple[np.ndarray, Q]],
    *,
    arch: str = "llama",
    metadata: dict[str, object] | None = None,
) -> Path:
    """Write tensors (float32, or raw bytes with their type) and the header of a tiny model of that architecture.

    metadata: extra keys, and replacements; None removes one.
    """
    writer = GGUFWriter(path, arch)
    header: dict[str, object] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 250000.0,
        **(metadata or {}),
    }
    for key, value in header.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)  # the key, and where the tensors start
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, Q.F32)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(array: np.ndarray, kind: Q) -> tuple[np.ndarray, Q]:
    """An array as the bytes of a type that the package can write."""
    return quantize(array, kind), kind
