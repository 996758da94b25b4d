"""Feed-forward layers. Einsum letters: T tokens  D hidden  F ffn"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.layers.linear import Linear
from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec, declare
from jaxvllm.model_config import ModelConfig


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation that a Hugging Face config calls `name`.

    Raises: ValueError for a name that is not known.
    """
    known = {
        "silu": jax.nn.silu,
        "relu": jax.nn.relu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_new": partial(jax.nn.gelu, approximate=True),
        "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    }
    if name not in known:
        raise ValueError(f"hidden_act {name!r} is not supported; supported are {', '.join(sorted(known))}")
    return known[name]


class GateUpProjection(nnx.Module):
    """[T, D] -> [T, 2, F]: gate and up of a gated MLP in one matmul."""

    def __init__(self, config: ModelConfig, prefix: str, *, fused_name: str | None = None):
        """`prefix`: of gate_proj, up_proj; `fused_name`: of one tensor that has gate above up instead."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        dtype, axes, names = jnp.dtype(config.dtype), (None, "ffn", None), ("gate_proj", "up_proj")
        if fused_name is None:
            sources = tuple(
                CheckpointTensor(f"{prefix}.{name}.weight", (ffn, hidden), (i,)) for i, name in enumerate(names)
            )
        else:
            split = partial(np.reshape, shape=(2, ffn, hidden))
            sources = (CheckpointTensor(fused_name, (2 * ffn, hidden), convert=split),)
        self.weight = declare(ParamSpec((2, ffn, hidden), dtype, axes, sources))
        biases = tuple(
            CheckpointTensor(f"{prefix}.{name}.bias", (ffn,), (i,)) for i, name in enumerate(names)
        )
        bias_spec = ParamSpec((2, ffn), dtype, axes[:-1], biases, "zeros")
        self.bias = declare(bias_spec) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Project."""
        out = jnp.einsum("td,ifd->tif", x, self.weight.get_value())
        return out if self.bias is None else out + self.bias.get_value()


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, prefix: str, *, fused_name: str | None = None):
        """`prefix`: of gate_proj, up_proj, down_proj; `fused_name`: see GateUpProjection."""
        self.gate_up_proj = GateUpProjection(config, prefix, fused_name=fused_name)
        self.down_proj = Linear(
            config.intermediate_size,
            config.hidden_size,
            f"{prefix}.down_proj",
            axes=(None, "ffn"),
            dtype=config.dtype,
            bias=config.mlp_bias,
        )
        self.hidden_act = config.hidden_act
        activation(config.hidden_act)  # an unknown name is an error now, not at the first step

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate_up = self.gate_up_proj(x)
        return self.down_proj(activation(self.hidden_act)(gate_up[:, 0]) * gate_up[:, 1])
