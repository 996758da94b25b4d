"""Models of the case list as folders of Hugging Face's layout, and a forward pass in plain NumPy, in float64."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.engine.conftest import write_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 16, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

Tensors = dict[str, np.ndarray]


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The checkpoint of a Llama, Qwen2 or Qwen3 config that states head_dim and num_key_value_heads."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    family, vocab = config["architectures"][0], (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": vocab, "model.norm": (hidden,), "lm_head": vocab}
    for i in range(config["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        if family == "Qwen3ForCausalLM":
            of_layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    parts = "qkv" if family == "Qwen2ForCausalLM" else "qkvo" if config.get("attention_bias") else ""
    for name in [name for name in shapes if any(f".{part}_proj." in name for part in parts)]:
        shapes[name.replace("weight", "bias")] = shapes[name][:1]
    return shapes


def random_tensors(config: dict, bias_spread: float = 2.0) -> Tensors:
    """T-tiny's weights: N(0, 0.08), norms 1 (of queries and keys: around 1), biases N(0, bias_spread)."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.normal(0, 1, shape)
        if name.endswith("bias"):
            values *= bias_spread
        elif "_norm." in name:
            values = 1 + 0.5 * values
        else:
            values = np.ones(shape) if len(shape) == 1 else 0.08 * values
        tensors[name] = values.astype(np.float32)
    return tensors


def successor_tensors(config: dict) -> Tensors:
    """T-succ: the next token is always the current one + 1, modulo the vocabulary."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1
    tensors["model.embed_tokens.weight"] = np.eye(vocab, hidden, dtype=np.float32)
    tensors["lm_head.weight"] = np.roll(np.eye(vocab, hidden, dtype=np.float32), 1, axis=0)
    return tensors


def write_folder(folder: Path, config: dict, tensors: Tensors, **files) -> Path:
    """A folder with config, weights and the K-bytes tokenizer; `files` as in write_model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, config=config, **files)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def dense_logits(config: dict, tensors: Tensors, token_ids: list[int]) -> np.ndarray:
    """f64[T, V]: no cache, no batch, no padding."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    x = w["model.embed_tokens.weight"][token_ids]
    length = len(token_ids)
    angles = np.arange(length)[:, None] * rope_frequencies(config)

    def project(layer: str, name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{layer}.{name}.weight"].T + w.get(f"{layer}.{name}.bias", 0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (project(layer, f"self_attn.{part}_proj", y).reshape(length, -1, head_dim) for part in "qkv")
        if f"{layer}.self_attn.q_norm.weight" in w:
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        q, k = _rotate(q, angles), _rotate(k, angles)
        out = np.empty((length, heads, head_dim))
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T * head_dim**-0.5
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
        x = x + project(layer, "self_attn.o_proj", out.reshape(length, -1))
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = project(layer, "mlp.gate_proj", y)
        x = x + project(layer, "mlp.down_proj", gate / (1 + np.exp(-gate)) * project(layer, "mlp.up_proj", y))
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def rope_frequencies(config: dict) -> np.ndarray:
    """f64[head_dim / 2]: plain, or scaled as Llama 3 says, by three bands of wavelength."""
    head_dim, theta = config["head_dim"], config.get("rope_theta", 10000.0)
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return plain
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)  # within the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / factor)


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
