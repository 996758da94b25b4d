"""T-tiny of the case list as files: its tensors under checkpoint names, its config, and a dense forward in NumPy."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 264, 64, 2, 4, 2, 16, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "float32",
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tiny_tensors() -> dict[str, np.ndarray]:
    """Weights N(0, 0.08), float32, under Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes = {EMBEDDING: (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), HEAD: (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        attention = {"q": (HEADS * HEAD_DIM, HIDDEN), "k": (KV_HEADS * HEAD_DIM, HIDDEN)}
        attention |= {"v": attention["k"], "o": (HIDDEN, HEADS * HEAD_DIM)}
        mlp = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
        parts = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
        parts |= {f"mlp.{name}_proj": shape for name, shape in mlp.items()}
        parts |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    # Norms are drawn too: ones would hide a norm that is not loaded.
    return {name: (rng.normal(len(shape) == 1, 0.08, shape)).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], **config: object) -> Path:
    """One safetensors file and its config; a config value of None leaves the key out."""
    folder.mkdir(exist_ok=True)
    write_config(folder, **config)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_config(folder: Path, **changes: object) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
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


def dense_logits(tensors: Mapping[str, np.ndarray], ids: list[int], head: np.ndarray) -> np.ndarray:
    """f64[T, V], without cache, batch or padding; an independent statement of what Llama computes."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = w[EMBEDDING][ids]
    n = len(ids)
    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x.reshape(n, -1, HEAD_DIM), 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    for i in range(LAYERS):
        p = f"model.layers.{i}"
        h = norm(x, f"{p}.input_layernorm.weight")
        q = rotate(h @ w[f"{p}.self_attn.q_proj.weight"].T).reshape(n, KV_HEADS, -1, HEAD_DIM)
        k = rotate(h @ w[f"{p}.self_attn.k_proj.weight"].T)
        v = (h @ w[f"{p}.self_attn.v_proj.weight"].T).reshape(n, KV_HEADS, HEAD_DIM)
        scores = np.where(np.tri(n, dtype=bool), np.einsum("tkgh,skh->kgts", q, k) / HEAD_DIM**0.5, -np.inf)
        p_ts = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("kgts,skh->tkgh", p_ts / p_ts.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + attended @ w[f"{p}.self_attn.o_proj.weight"].T
        h = norm(x, f"{p}.post_attention_layernorm.weight")
        gate, up = (h @ w[f"{p}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}.mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ head.astype(np.float64).T
