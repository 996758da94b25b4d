"""Mistral: Llama with a sliding window in every layer where config.json has one."""

from jaxvllm.model_config import ModelConfig
from jaxvllm.models.causal_lm import CausalLM
from jaxvllm.models.llama import llama_layer


class MistralForCausalLM(CausalLM):
    """The window reaches attention through the layer kinds of CausalLM."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        super().__init__(config, llama_layer(config), unroll_layers=unroll_layers)
