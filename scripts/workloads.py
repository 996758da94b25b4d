"""The request sets and model shapes that engines are compared on; seeded, so every engine gets the same tokens."""

import json
import tempfile
from pathlib import Path

import numpy as np

MODELS: dict[str, dict] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
}

KINDS = ("latency1", "mixed256", "decode64", "prefill", "throughput1k")


def write_config(name: str, root: Path | None = None) -> Path:
    """Write the config.json of a benchmark shape into a folder and return the folder."""
    folder = (root or Path(tempfile.gettempdir())) / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return folder


def workload(kind: str) -> tuple[list[list[int]], list[int]]:
    """The prompts (token ids) and output lengths of one workload.

    latency1: one request, 128 in, 256 out. mixed256: 256 requests, both lengths uniform in 100..1024 (the set of
    nano-vllm's benchmark). decode64: 64 x 2048 in, 256 out. prefill: 32 x 8192 in, 1 out. throughput1k: 1000 x 1024
    in, 128 out.
    """
    rng = np.random.default_rng(0)

    def tokens(n: int) -> list[int]:
        return rng.integers(10, 100000, n).tolist()

    if kind == "mixed256":
        prompts = [tokens(int(rng.integers(100, 1025))) for _ in range(256)]
        return prompts, [int(x) for x in rng.integers(100, 1025, 256)]
    num_requests, num_in, num_out = {
        "latency1": (1, 128, 256),
        "decode64": (64, 2048, 256),
        "prefill": (32, 8192, 1),
        "throughput1k": (1000, 1024, 128),
    }[kind]
    return [tokens(num_in) for _ in range(num_requests)], [num_out] * num_requests
