"""Phi-3 and Phi-4: Llama whose checkpoint has qkv and gate-up merged already."""

from jaxvllm.layers.attention import Attention
from jaxvllm.layers.linear import OutputProjection, QKVProjection
from jaxvllm.layers.mlp import GatedMLP
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.causal_lm import CausalLM
from jaxvllm.models.llama import LAYER_PREFIX, LlamaDecoderLayer


class Phi3ForCausalLM(CausalLM):
    """The share of head_dim that rotates and the window are in the config."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        attention, mlp = f"{LAYER_PREFIX}.self_attn", f"{LAYER_PREFIX}.mlp"
        layer = LlamaDecoderLayer(
            config,
            Attention(
                config,
                attention,
                QKVProjection(config, attention, fused_name=f"{attention}.qkv_proj.weight"),
                OutputProjection(config, f"{attention}.o_proj", bias=False),
            ),
            GatedMLP(config, mlp, fused_name=f"{mlp}.gate_up_proj.weight"),
        )
        super().__init__(config, layer, unroll_layers=unroll_layers)
