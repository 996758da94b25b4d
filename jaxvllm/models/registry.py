"""From the class name in config.json to the model that serves it.

Models are named here and imported on first use: the front end, which never imports JAX, checks names only.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxvllm.models.causal_lm import CausalLM
    from jaxvllm.models.opt import OPTForCausalLM

    Model = CausalLM | OPTForCausalLM
    ModelClass = Callable[..., Model]

# Architecture -> the module that defines a class of this name.
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma2ForCausalLM": "jaxvllm.models.gemma2",
        "Gemma3ForCausalLM": "jaxvllm.models.gemma3",
        "LlamaForCausalLM": "jaxvllm.models.llama",
        "MistralForCausalLM": "jaxvllm.models.mistral",
        "OPTForCausalLM": "jaxvllm.models.opt",
        "Phi3ForCausalLM": "jaxvllm.models.phi3",
        "Qwen2ForCausalLM": "jaxvllm.models.qwen2",
        "Qwen3ForCausalLM": "jaxvllm.models.qwen3",
    }
)


def get_model_class(architecture: str) -> "ModelClass":
    """The model of an architecture, built as cls(config, unroll_layers=None).

    Raises: ValueError that lists what is supported.
    """
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported are {', '.join(MODELS)}")
    return getattr(importlib.import_module(MODELS[architecture]), architecture)
