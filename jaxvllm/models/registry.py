"""From the class name in config.json to the model that serves it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxvllm.models.causal_lm import CausalLM
from jaxvllm.models.gemma2 import Gemma2ForCausalLM
from jaxvllm.models.gemma3 import Gemma3ForCausalLM
from jaxvllm.models.llama import LlamaForCausalLM
from jaxvllm.models.mistral import MistralForCausalLM
from jaxvllm.models.opt import OPTForCausalLM
from jaxvllm.models.phi3 import Phi3ForCausalLM
from jaxvllm.models.qwen2 import Qwen2ForCausalLM
from jaxvllm.models.qwen3 import Qwen3ForCausalLM

Model = CausalLM | OPTForCausalLM
ModelClass = Callable[..., Model]

MODELS: Mapping[str, ModelClass] = MappingProxyType(
    {
        "Gemma2ForCausalLM": Gemma2ForCausalLM,
        "Gemma3ForCausalLM": Gemma3ForCausalLM,
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "OPTForCausalLM": OPTForCausalLM,
        "Phi3ForCausalLM": Phi3ForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
    }
)


def get_model_class(architecture: str) -> ModelClass:
    """The model of an architecture, built as cls(config, unroll_layers=None).

    Raises: ValueError that lists what is supported.
    """
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported are {', '.join(MODELS)}")
    return MODELS[architecture]
