"""A GGUF file's metadata as the dicts that Hugging Face keeps in config.json and generation_config.json."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxvllm.weights.gguf_checkpoint import ROPE_DIVISORS
from jaxvllm.weights.gguf_reader import GGUFFile

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_CONTROL_TOKEN = 3
# Control tokens that end a turn in one chat format or another (llama.cpp keeps the same kind of list): files name one
# eos id only, and a model that says another of these would run on to max_tokens.
_END_OF_TURN_TOKENS = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
)
_SAMPLING_KEYS: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The config dict of the model in a GGUF file, for ModelConfig.from_hf.

    Raises: ValueError if the architecture is not supported or a key is missing, naming it.
    """
    metadata = file.metadata
    arch = str(metadata.get("general.architecture"))
    if arch not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get(f"{arch}.expert_count"):
        raise ValueError(f"{file.path}: mixture-of-experts models are not supported in GGUF files")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor 'token_embd.weight' is missing; download the file again")

    def required(key: str) -> Any:
        if f"{arch}.{key}" not in metadata:
            raise ValueError(f"{file.path}: metadata key {arch}.{key} is missing; convert the model to GGUF again")
        return metadata[f"{arch}.{key}"]

    num_heads = required("attention.head_count")
    head_dim = metadata.get(f"{arch}.attention.key_length")
    rotated = metadata.get(f"{arch}.rope.dimension_count")
    is_whole = num_heads * rotated == required("embedding_length") if rotated and not head_dim else rotated == head_dim
    if rotated is not None and not is_whole:
        raise ValueError(
            f"{file.path}: {arch}.rope.dimension_count ({rotated}) is not the size of a head, which is not supported; "
            "use the model's safetensors"
        )
    window = metadata.get(f"{arch}.attention.sliding_window")
    # llama.cpp files Mistral under llama.
    architecture = "MistralForCausalLM" if arch == "llama" and window else _ARCHITECTURES[arch]
    return {
        "architectures": [architecture],
        "model_type": arch,
        "hidden_size": required("embedding_length"),
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": required("context_length"),
        "rms_norm_eps": _short(required("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": window,
        "is_causal": metadata.get(f"{arch}.attention.causal"),
        "rope_parameters": _rope_parameters(file, arch),
        "dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _rope_parameters(file: GGUFFile, arch: str) -> dict[str, Any]:
    """transformers' "rope_parameters"; rope_freqs.weight becomes "frequency_divisors"."""
    metadata = file.metadata
    unsupported = [name for name in file.tensors if re.fullmatch(r"rope_factors_(long|short)\.weight", name)]
    if unsupported:
        raise ValueError(f"{file.path}: rope scaling by {unsupported[0]!r} (longrope) is not supported")
    # Files of 2023 say scale_linear, and a factor without a type is linear: llama.cpp's rules. A factor of 0 is none.
    factor = metadata.get(f"{arch}.rope.scaling.factor", metadata.get(f"{arch}.rope.scale_linear")) or None
    kind = metadata.get(f"{arch}.rope.scaling.type", "none" if factor is None else "linear")
    parameters: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": _short(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "factor": factor,
        "original_max_position_embeddings": metadata.get(f"{arch}.rope.scaling.original_context_length"),
        "attention_factor": metadata.get(f"{arch}.rope.scaling.attn_factor"),
        "beta_fast": metadata.get(f"{arch}.rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.get(f"{arch}.rope.scaling.yarn_beta_slow"),
    }
    if ROPE_DIVISORS in file.tensors:
        parameters["frequency_divisors"] = file.read(ROPE_DIVISORS).reshape(-1).tolist()
    return {key: value for key, value in parameters.items() if value is not None}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The generation config: every id that ends a turn, and the sampling defaults if the file has any."""
    metadata = file.metadata
    named = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = [metadata[key] for key in named if key in metadata]
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    ids += [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL_TOKEN and token in _END_OF_TURN_TOKENS
    ]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ids))}
    config |= {name: _short(metadata[key]) for key, name in _SAMPLING_KEYS.items() if key in metadata}
    return config


def _short(value: float) -> float:
    """A float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(np.format_float_positional(np.float32(value))) if isinstance(value, float) else value
