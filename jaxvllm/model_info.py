"""ModelInfo: the little that the front end must know of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.model_source import ModelSource
    from jaxvllm.tokenizer import Tokenizer

# Keys of generation_config.json that become defaults of a request, and the SamplingParams fields they set.
_GENERATION_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class ModelInfo:
    """Sizes, ends and defaults of a model.

    Attributes:
      path: the model on this machine; the core finds the same one by it.
      eos_token_id: the primary EOS, which gives no stop_reason.
      extra_eos_token_ids: further ids that end the text, as stop tokens.
      default_sampling: what the model's authors want SamplingParams to be where the caller gives none.
      max_output_tokens: the most that a server gives to any request; None: no limit but the context.
    """

    path: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | None = None
    extra_eos_token_ids: tuple[int, ...] = ()
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_output_tokens: int | None = None

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams for a caller who gives none."""
        return SamplingParams(**self.default_sampling)


def read_model_info(
    source: "ModelSource",
    tokenizer: "Tokenizer | None",
    generation_config: Mapping[str, Any],
    max_output_tokens: int | None,
) -> ModelInfo:
    """What the front end keeps of a model.

    Args:
      generation_config: the defaults to obey: the model's own, another file's, or none; see EngineArgs.
      max_output_tokens: see ModelInfo.
    """
    eos = source.eos_ids(tokenizer)
    return ModelInfo(
        path=str(source.path),
        vocab_size=source.config.vocab_size,
        max_position_embeddings=source.config.max_position_embeddings,
        eos_token_id=eos.primary,
        extra_eos_token_ids=eos.extra,
        default_sampling={
            name: generation_config[key]
            for key, name in _GENERATION_FIELDS.items()
            if generation_config.get(key) is not None
        },
        max_output_tokens=max_output_tokens,
    )
