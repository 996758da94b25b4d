"""ModelConfig: what a model is made of, read from a Hugging Face config dict (old and v5 spellings)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxvllm.config_fields import ConfigFields
from jaxvllm.rope_config import RopeConfig, read_ropes

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

_DTYPES = ("bfloat16", "float16", "float32")

# What transformers takes when a key is absent, where that is not the default of Llama. A key that is absent is
# common: transformers writes only what differs from its own defaults (Gemma's tied embeddings, for one).
_LLAMA_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
_QWEN_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
# Gemma 3 caps logits only: its scores are as they are, whatever a file says, in transformers too.
_WITH_SOFT_CAPS: Mapping[str, tuple[str, ...]] = {
    "attn_logit_softcapping": ("Gemma2ForCausalLM",),
    "final_logit_softcapping": ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
}
_ARCHITECTURE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "Qwen2ForCausalLM": {**_QWEN_DEFAULTS, "attention_bias": True},
    "Qwen3ForCausalLM": {**_QWEN_DEFAULTS, "head_dim": 128},
    "Gemma2ForCausalLM": {
        **_GEMMA_DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1_000_000.0},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "OPTForCausalLM": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu",
        "attention_bias": True,
        "mlp_bias": True,
    },
}
# Other names of the same thing, in the order in which they are looked up.
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function"),
    "intermediate_size": ("intermediate_size", "ffn_dim"),
    "dtype": ("dtype", "torch_dtype"),
    "attention_bias": ("attention_bias", "enable_bias"),
    "mlp_bias": ("mlp_bias", "enable_bias"),
}
# Gemma's files may have both, and hidden_act is then a relic of the first Gemma ("gelu") that transformers ignores.
_GEMMA_SPELLINGS = {**_SPELLINGS, "hidden_act": ("hidden_activation", "hidden_act")}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of one model.

    Attributes:
      architecture: the class name in config.json, e.g. "LlamaForCausalLM".
      num_heads, num_kv_heads: query heads and key/value heads; num_kv_heads divides num_heads.
      head_dim: as stated in the file; hidden_size // num_heads only where the file and the family do not say.
      rms_norm_eps: also the epsilon of LayerNorm in families that use it.
      rope: rotary embedding of the full-attention layers (of all layers in most families).
      local_rope: of the sliding-attention layers where they have one of their own (Gemma3), else None.
      attention_bias: the q, k and v projections have a bias.
      attention_output_bias: the output projection has one.
      sliding_window: how many tokens a sliding-attention layer sees (itself included); None without such layers.
      layer_types: "full_attention" or "sliding_attention", one a layer.
      attention_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap), for the attention scores and for the logits
        (Gemma); None: as it is.
      dtype: dtype of the stored weights by the file: "bfloat16", "float16" or "float32".
      kv_cache_dtype: what the file wants keys and values kept in; None: the model's dtype.
      has_kv_scales: attention layers have scales for the cache, which is then of 8 bits.
      eos_token_ids: all that config.json lists, first one first; ModelSource.eos_ids() is what generation obeys.
      hf: the raw dict, for what one family alone needs.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    dtype: str = "float32"
    kv_cache_dtype: str | None = None
    has_kv_scales: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.layer_types:
            kind = FULL_ATTENTION if self.sliding_window is None else SLIDING_ATTENTION
            object.__setattr__(self, "layer_types", (kind,) * self.num_layers)

    @property
    def max_context(self) -> int:
        """The longest context that the model is made for: max_position_embeddings, or what its rope is scaled to.

        Source: vLLM 0.22 _get_and_verify_max_len. Files with llama3 scaling, and Gemma 3's, state the scaled length.
        """
        unscaled = {
            "dynamic": self.max_position_embeddings,
            "linear": self.max_position_embeddings,
            "yarn": self.rope.original_max_position_embeddings,
        }
        if self.rope.type not in unscaled or self.local_rope is not None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(unscaled[self.rope.type] * self.rope.factor))

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], *, supported: Collection[str] | None = None, origin: str = "config.json"
    ) -> "ModelConfig":
        """Read a Hugging Face config dict.

        Args:
          hf: the parsed config.json, or what a GGUF file's metadata was turned into.
          supported: the architectures that can be served; None does not check.
          origin: the file, for error messages.

        Raises: ValueError that names the file, the field, and what to do.
        """
        architecture = _architecture(hf, supported, origin)
        defaults = {**_LLAMA_DEFAULTS, **_ARCHITECTURE_DEFAULTS.get(architecture, {})}
        spellings = _GEMMA_SPELLINGS if architecture.startswith("Gemma") else _SPELLINGS
        fields = ConfigFields(hf, defaults, spellings, origin)
        heads = _head_sizes(fields)
        if fields.get("is_causal") is False:
            raise ValueError(f"{origin}: is_causal=false (attention that looks both ways) is not supported")
        num_layers = fields.positive_int("num_hidden_layers")
        sliding_window, layer_types = _attention_layers(fields, architecture, num_layers)
        max_positions = fields.positive_int("max_position_embeddings")
        rope, local_rope = read_ropes(
            hf,
            default_theta=defaults["rope_theta"],
            max_position_embeddings=max_positions,
            can_be_partial=architecture == "Phi3ForCausalLM",
            origin=origin,
        )
        rope.check_divisors(heads["head_dim"], origin)
        return cls(
            architecture=architecture,
            hidden_size=fields.positive_int("hidden_size"),
            intermediate_size=fields.positive_int("intermediate_size"),
            num_layers=num_layers,
            **heads,
            vocab_size=fields.positive_int("vocab_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            local_rope=local_rope if architecture == "Gemma3ForCausalLM" else None,
            tie_word_embeddings=fields.boolean("tie_word_embeddings"),
            attention_bias=fields.boolean("attention_bias"),
            attention_output_bias=architecture != "Qwen2ForCausalLM" and fields.boolean("attention_bias"),
            mlp_bias=fields.boolean("mlp_bias"),
            hidden_act=fields.text("hidden_act"),
            max_position_embeddings=max_positions,
            sliding_window=sliding_window,
            layer_types=layer_types,
            attention_soft_cap=_soft_cap(fields, architecture, "attn_logit_softcapping"),
            logit_soft_cap=_soft_cap(fields, architecture, "final_logit_softcapping"),
            dtype=_dtype(fields),
            kv_cache_dtype=_kv_cache_dtype(hf.get("quantization_config"), origin),
            has_kv_scales=False,
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=fields.token_ids("eos_token_id"),
            hf=hf,
        )


def _kv_cache_dtype(quantization: Mapping[str, Any] | None, origin: str) -> str | None:
    """What a file of compressed-tensors whose weights are not quantised says of the cache.

    Raises: ValueError if the weights are quantised, or the cache in another way than by one scale a layer.
    """
    if not quantization:
        return None
    method, scheme = quantization.get("quant_method", "unknown"), quantization.get("kv_cache_scheme")
    if method != "compressed-tensors" or quantization.get("config_groups") or not scheme:
        raise ValueError(
            f"{origin}: the weights are quantised ({method}), which is not supported; use the model's "
            "unquantised safetensors or a GGUF file"
        )
    known = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    other = {key: scheme[key] for key, value in known.items() if scheme.get(key, value) != value}
    if other:
        raise ValueError(f"{origin}: kv_cache_scheme has {other}, supported are {known}; leave kv_cache_scheme out")
    return "float8_e4m3fn"


def _architecture(hf: Mapping[str, Any], supported: Collection[str] | None, origin: str) -> str:
    """The first listed architecture that is supported."""
    names = hf.get("architectures")
    known = f" (supported are {', '.join(sorted(supported))})" if supported else ""
    if not isinstance(names, list | tuple) or not names or not all(isinstance(n, str) for n in names):
        raise ValueError(
            f'{origin}: field "architectures" must list the model\'s class, got {names!r}; '
            f'add e.g. "architectures": ["LlamaForCausalLM"]{known}'
        )
    if supported is None:
        return names[0]
    for name in names:
        if name in supported:
            return name
    raise ValueError(
        f"{origin}: architecture {', '.join(names)} is not supported; supported are {', '.join(sorted(supported))}"
    )


def _head_sizes(fields: ConfigFields) -> dict[str, int]:
    """num_heads, num_kv_heads, head_dim; null means the default, as in transformers."""
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.optional_positive_int("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f'{fields.origin}: "num_attention_heads" ({num_heads}) must be a multiple of "num_key_value_heads" '
            f"({num_kv_heads}); correct the file"
        )
    head_dim = fields.optional_positive_int("head_dim")
    if head_dim is None:
        hidden_size = fields.positive_int("hidden_size")
        if hidden_size % num_heads:
            raise ValueError(
                f'{fields.origin}: "hidden_size" ({hidden_size}) is not a multiple of "num_attention_heads" '
                f'({num_heads}) and there is no "head_dim"; add it'
            )
        head_dim = hidden_size // num_heads
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _attention_layers(fields: ConfigFields, architecture: str, num_layers: int) -> tuple[int | None, tuple[str, ...]]:
    """(sliding_window, layer_types): the file's list, else the family's rule."""
    window = fields.optional_positive_int("sliding_window")
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        # These files state a window and switch it off with another key.
        window = window if fields.get("use_sliding_window") else None
        first = fields.get("max_window_layers")
        is_sliding = [i >= first for i in range(num_layers)]
    elif architecture == "Gemma2ForCausalLM":
        is_sliding = [i % 2 == 0 for i in range(num_layers)]
    elif architecture == "Gemma3ForCausalLM":
        pattern = fields.get("sliding_window_pattern") or 6
        is_sliding = [(i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        # transformers' Llama and OPT have no window, whatever a file says.
        is_sliding = [architecture not in ("LlamaForCausalLM", "OPTForCausalLM")] * num_layers
    layer_types = tuple(SLIDING_ATTENTION if window and s else FULL_ATTENTION for s in is_sliding)
    listed = fields.get("layer_types")
    if listed is not None:
        layer_types = _listed_layer_types(listed, num_layers, window, fields.origin)
    return (window if SLIDING_ATTENTION in layer_types else None), layer_types


def _listed_layer_types(listed: Any, num_layers: int, window: int | None, origin: str) -> tuple[str, ...]:
    known = (FULL_ATTENTION, SLIDING_ATTENTION)
    if not isinstance(listed, list | tuple) or any(kind not in known for kind in listed):
        raise ValueError(f'{origin}: "layer_types" must list {" or ".join(known)} for each layer, got {listed!r}')
    if len(listed) != num_layers:
        raise ValueError(f'{origin}: "layer_types" has {len(listed)} entries for {num_layers} layers')
    if SLIDING_ATTENTION in listed and window is None:
        raise ValueError(f'{origin}: "layer_types" has sliding_attention but "sliding_window" is not set; add it')
    return tuple(listed)


def _soft_cap(fields: ConfigFields, architecture: str, key: str) -> float | None:
    """None where the file says null, and in families whose model has no caps, whatever a file says."""
    if architecture not in _WITH_SOFT_CAPS[key] or fields.get(key) is None:
        return None
    return fields.number(key)


def _dtype(fields: ConfigFields) -> str:
    name = fields.get("dtype")
    if name is None:
        return "float32"
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f'{fields.origin}: "dtype" {name!r} must be one of {", ".join(_DTYPES)}')
    return name
