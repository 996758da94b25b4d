"""Tiny random transformers models, and ours with the same weights."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from flax import nnx

from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.registry import get_model_class
from jaxvllm.weights.checkpoint import TensorInfo
from jaxvllm.weights.load import load_params
from tests.parity.paged_driver import PagedDriver

# Operations this small are 30 times slower while threads wait for each other, as on a busy machine.
torch.set_num_threads(1)

# Unequal, mostly prime: a swapped axis cannot pass.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


class StateDictCheckpoint:
    """A torch state_dict as a Checkpoint."""

    path = Path("state_dict")

    def __init__(self, state_dict: dict[str, torch.Tensor]):
        self._arrays = {name: tensor.detach().float().numpy() for name, tensor in state_dict.items()}

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(array.shape, array.dtype) for name, array in self._arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]


@dataclass(frozen=True)
class TinyModel:
    """One random model on both sides."""

    torch_model: torch.nn.Module
    config: ModelConfig
    model: nnx.Module
    params: dict[str, jax.Array]

    def driver(self, **options) -> PagedDriver:
        return PagedDriver(self.model, self.config, self.params, **options)

    def expected_logits(self, token_ids: list[int]) -> np.ndarray:
        """f32[T, V] of transformers, one forward without a cache."""
        with torch.no_grad():
            return self.torch_model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens of transformers' own greedy generation, past any end-of-sequence token."""
        out = self.torch_model.generate(
            torch.tensor([token_ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        return out[0, len(token_ids) :].tolist()


@cache
def tiny_model(config_class: str, seed: int = 0, unroll_layers: bool | None = None, **changes) -> TinyModel:
    """Build transformers' model from a config and a seed, and ours from its config.json and state_dict.

    Args:
      changes: fields of the config, over SIZES; None removes one, a frozenset of items stands for a dict.

    All weights are redrawn: what transformers starts at 0 or 1 (biases, norms) would hide mistakes.
    """
    torch.manual_seed(seed)
    changes = {key: dict(value) if isinstance(value, frozenset) else value for key, value in changes.items()}
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if value is not None}
    hf_config = getattr(transformers, config_class)(**sizes, attn_implementation="eager")
    torch_model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in torch_model.parameters():
            spread = 0.2 if parameter.ndim == 1 else 1.3 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    raw = {**hf_config.to_dict(), "architectures": [type(torch_model).__name__]}
    config = ModelConfig.from_hf(raw)
    model = get_model_class(config.architecture)(config, unroll_layers=unroll_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {name: tensor for name, tensor in torch_model.state_dict().items() if name not in tied}
    return TinyModel(torch_model, config, model, load_params(param_specs(model), StateDictCheckpoint(state)))
