"""Gemma 2: norms around both halves of a layer, soft caps, a window in every second layer, scaled embeddings."""

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
from jaxvllm.models.llama import LAYER_PREFIX


class GemmaDecoderLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), norms with weight 1 + w."""

    def __init__(self, config: ModelConfig, *, qk_norm: bool = False):
        """`qk_norm`: norm each query and key head.

        Raises: NotImplementedError for embedding models, whose attention looks both ways.
        """
        if config.hf.get("use_bidirectional_attention"):
            raise NotImplementedError("use_bidirectional_attention=true (an embedding model) is not supported")
        norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=config.dtype, unit_offset=True)
        hidden, prefix = config.hidden_size, f"{LAYER_PREFIX}.self_attn"
        self.input_layernorm = norm(hidden, f"{LAYER_PREFIX}.input_layernorm.weight")
        self.post_attention_layernorm = norm(hidden, f"{LAYER_PREFIX}.post_attention_layernorm.weight")
        self.pre_feedforward_layernorm = norm(hidden, f"{LAYER_PREFIX}.pre_feedforward_layernorm.weight")
        self.post_feedforward_layernorm = norm(hidden, f"{LAYER_PREFIX}.post_feedforward_layernorm.weight")
        self.self_attn = Attention(
            config,
            prefix,
            QKVProjection(config, prefix),
            OutputProjection(config, f"{prefix}.o_proj", bias=config.attention_output_bias),
            q_norm=norm(config.head_dim, f"{prefix}.q_norm.weight") if qk_norm else None,
            k_norm=norm(config.head_dim, f"{prefix}.k_norm.weight") if qk_norm else None,
            scale=config.hf.get("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=config.attention_soft_cap,
        )
        self.mlp = GatedMLP(config, f"{LAYER_PREFIX}.mlp")

    def attend(self, hidden: Hidden, kv_cache: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """See run_layers."""
        qkv = context.products.project(hidden.x, (self.self_attn.qkv_proj.stage(norm=self.input_layernorm),))
        return self.self_attn(qkv, kv_cache, context)

    def finish(self, heads: jax.Array, residual: jax.Array, products: Products) -> Hidden:
        """See run_layers."""
        projected = products.project(heads, (self.self_attn.o_proj.stage(),))
        x = residual + self.post_attention_layernorm(projected)
        fed = products.project(x, self.mlp.stages(norm=self.pre_feedforward_layernorm))
        return Hidden(x + self.post_feedforward_layernorm(fed))


class Gemma2ForCausalLM(CausalLM):
    """See the module."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        super().__init__(
            config,
            GemmaDecoderLayer(config),
            unit_offset_norm=True,
            embedding_scale=config.hidden_size**0.5,
            logit_soft_cap=config.logit_soft_cap,
            unroll_layers=unroll_layers,
        )
