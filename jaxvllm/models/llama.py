"""Llama (1 to 3.x), SmolLM2 and everything else of that shape."""

import jax
from flax import nnx

from jaxvllm.layers.attention import Attention
from jaxvllm.layers.linear import OutputProjection, QKVProjection
from jaxvllm.layers.mlp import GatedMLP
from jaxvllm.layers.norm import RMSNorm
from jaxvllm.layers.run_layers import LayerContext
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.causal_lm import CausalLM

LAYER_PREFIX = "model.layers.{layer}"


class LlamaDecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP):
        """The two norms are declared here; attention and mlp bring the names of their own weights."""
        options = {"eps": config.rms_norm_eps, "dtype": config.dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, f"{LAYER_PREFIX}.input_layernorm.weight", **options)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, f"{LAYER_PREFIX}.post_attention_layernorm.weight", **options
        )
        self.mlp = mlp

    def __call__(self, x: jax.Array, kv_cache: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """[T, D] -> [T, D], and the cache; the cache given is consumed."""
        attended, kv_cache = self.self_attn(self.input_layernorm(x), kv_cache, context)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv_cache


class LlamaForCausalLM(CausalLM):
    """Also Mistral, Qwen2: what differs there (sliding window, biases) is in the config."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        prefix = f"{LAYER_PREFIX}.self_attn"
        attention = Attention(
            config,
            QKVProjection(config, prefix),
            OutputProjection(config, f"{prefix}.o_proj", bias=config.attention_output_bias),
        )
        layer = LlamaDecoderLayer(config, attention, GatedMLP(config, f"{LAYER_PREFIX}.mlp"))
        norm = RMSNorm(config.hidden_size, "model.norm.weight", eps=config.rms_norm_eps, dtype=config.dtype)
        super().__init__(config, layer, norm, unroll_layers=unroll_layers)
