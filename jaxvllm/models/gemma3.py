"""Gemma 3, text: Gemma 2 with normed heads instead of soft caps, and a rope of their own for windowed layers."""

from jaxvllm.model_config import ModelConfig
from jaxvllm.models.causal_lm import CausalLM
from jaxvllm.models.gemma2 import GemmaDecoderLayer


class Gemma3ForCausalLM(CausalLM):
    """The pattern of windowed layers and both ropes are in the config."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        super().__init__(
            config,
            GemmaDecoderLayer(config, qk_norm=True),
            unit_offset_norm=True,
            embedding_scale=config.hidden_size**0.5,
            logit_soft_cap=config.logit_soft_cap,
            unroll_layers=unroll_layers,
        )
