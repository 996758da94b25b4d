"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from jaxvllm.model_config import ModelConfig
from jaxvllm.models.causal_lm import CausalLM
from jaxvllm.models.llama import llama_layer


class Qwen2ForCausalLM(CausalLM):
    """The biases, and which layers have a window, are in the config."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        super().__init__(config, llama_layer(config), unroll_layers=unroll_layers)
