"""Llama (1 to 3.x), SmolLM2 and everything else of that shape."""

from functools import partial

import jax
from flax import nnx

from jaxvllm.layers.attention import Attention
from jaxvllm.layers.layer_context import Hidden, LayerContext, Products
from jaxvllm.layers.linear import OutputProjection, QKVProjection
from jaxvllm.layers.mlp import GatedMLP
from jaxvllm.layers.norm import RMSNorm
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.causal_lm import CausalLM
from pallas_kernels import MatmulStage

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

    def first_stages(self) -> tuple[MatmulStage, ...]:
        """The products that the layer begins with."""
        return (self.self_attn.qkv_proj.stage(norm=self.input_layernorm),)

    def last_stages(self) -> tuple[MatmulStage, ...]:
        """The products behind attention, which add the residual."""
        feed_forward = self.mlp.stages(norm=self.post_attention_layernorm, adds_residual=True)
        return (self.self_attn.o_proj.stage(adds_residual=True), *feed_forward)

    def attend(self, hidden: Hidden, kv_cache: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """See run_layers."""
        return self.self_attn(context.products.begin(hidden, self.first_stages()), kv_cache, context)

    def finish(self, heads: jax.Array, residual: jax.Array, products: Products) -> Hidden:
        """See run_layers."""
        return products.end(heads, self.last_stages(), residual)


def llama_layer(config: ModelConfig, *, qk_norm: bool = False) -> LlamaDecoderLayer:
    """The layer of Llama and of families that differ in biases, windows or, with `qk_norm`, in normed heads."""
    prefix = f"{LAYER_PREFIX}.self_attn"
    norm = partial(RMSNorm, config.head_dim, eps=config.rms_norm_eps, dtype=config.dtype)
    attention = Attention(
        config,
        prefix,
        QKVProjection(config, prefix),
        OutputProjection(config, f"{prefix}.o_proj", bias=config.attention_output_bias),
        q_norm=norm(f"{prefix}.q_norm.weight") if qk_norm else None,
        k_norm=norm(f"{prefix}.k_norm.weight") if qk_norm else None,
    )
    return LlamaDecoderLayer(config, attention, GatedMLP(config, f"{LAYER_PREFIX}.mlp"))


class LlamaForCausalLM(CausalLM):
    """Rope, grouped-query attention, gated SiLU, RMSNorm before each half of a layer."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        super().__init__(config, llama_layer(config), unroll_layers=unroll_layers)
