"""Qwen3 (dense): Llama with an RMSNorm over each query and key head before the rotation."""

from jaxvllm.model_config import ModelConfig
from jaxvllm.models.causal_lm import CausalLM
from jaxvllm.models.llama import llama_layer


class Qwen3ForCausalLM(CausalLM):
    """See the module."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        super().__init__(config, llama_layer(config, qk_norm=True), unroll_layers=unroll_layers)
