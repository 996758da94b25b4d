"""From the class name in config.json to the model that serves it."""

from flax import nnx

from jaxvllm.models.llama import LlamaForCausalLM

MODELS: dict[str, type[nnx.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


def get_model_class(architecture: str) -> type[nnx.Module]:
    """The model of an architecture.

    Raises: ValueError that lists what is supported.
    """
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported are {', '.join(sorted(MODELS))}")
    return MODELS[architecture]
