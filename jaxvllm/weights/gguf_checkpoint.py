"""GGUFCheckpoint: a GGUF file's tensors under Hugging Face names, in Hugging Face's layout."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxvllm.weights.checkpoint import TensorInfo
from jaxvllm.weights.gguf_reader import GGUFFile

_MODEL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Goes into the config (gguf_config.py), not into the weights.
ROPE_DIVISORS = "rope_freqs.weight"
# Only this architecture stores q and k with the rows of each head in another order.
_PERMUTED_ARCHITECTURE = "llama"


class GGUFCheckpoint:
    """The Checkpoint of an open GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._names = {hf_name(name): name for name in file.tensors if name != ROPE_DIVISORS}

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor but rope_freqs; a name without a Hugging Face counterpart stays as it is."""
        stored = self._file.tensors
        return {hf: TensorInfo(stored[name].shape, stored[name].dtype) for hf, name in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor; quantised ones as float32."""
        stored_name = self._names[name]
        array = self._file.read(stored_name)
        metadata = self._file.metadata
        part = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", stored_name)
        if part is None or metadata["general.architecture"] != _PERMUTED_ARCHITECTURE:
            return array
        num_heads = metadata["llama.attention.head_count"]
        if part[1] == "k":
            num_heads = metadata.get("llama.attention.head_count_kv", num_heads)
        return unpermute_rows(array, num_heads)


def hf_name(name: str) -> str:
    """A GGUF tensor name as Hugging Face files have it, e.g. "blk.3.attn_q.weight"."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_MODEL_NAMES[stem]}.{suffix}" if stem in _MODEL_NAMES else name


def unpermute_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of each head back: llama.cpp rotates neighbouring pairs, Hugging Face rotates halves.

    Args:
      array: [num_heads * head_dim, ...] as stored; row 2 * i + j of a head belongs at j * head_dim / 2 + i.
    """
    heads = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)
