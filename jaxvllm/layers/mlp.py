"""Feed-forward layers. Letters: T tokens  D hidden  F ffn"""

from functools import partial
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.layers.linear import Linear, make_stage
from jaxvllm.layers.norm import RMSNorm
from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec, declare
from jaxvllm.model_config import ModelConfig
from pallas_kernels import Activation, MatmulStage


def activation(name: str) -> Activation:
    """The activation that a Hugging Face config calls `name`.

    Raises: ValueError for a name that is not known.
    """
    known: dict[str, Activation] = {activation: activation for activation in get_args(Activation)}
    if name not in known:
        raise ValueError(f"hidden_act {name!r} is not supported; supported are {', '.join(sorted(known))}")
    return known[name]


class GateUpProjection(nnx.Module):
    """[T, D] -> [T, F]: gate and up of a gated MLP in one matmul."""

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
        biases = tuple(CheckpointTensor(f"{prefix}.{name}.bias", (ffn,), (i,)) for i, name in enumerate(names))
        bias_spec = ParamSpec((2, ffn), dtype, axes[:-1], biases, "zeros")
        self.bias = declare(bias_spec) if config.mlp_bias else None

    def stage(self, *, norm: RMSNorm | None = None, **options: Any) -> MatmulStage:
        """See make_stage; the result is [T, F], activation(gate) * up."""
        return make_stage(self.weight.get_value(), self.bias, norm=norm, **options)


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
        self.activation = activation(config.hidden_act)

    def stages(self, *, norm: RMSNorm, adds_residual: bool = False) -> tuple[MatmulStage, MatmulStage]:
        """down(act(gate(norm(x))) * up(norm(x))) for LayerContext.project, [T, D] -> [T, D]."""
        gate_up = self.gate_up_proj.stage(norm=norm, activation=self.activation)
        return gate_up, self.down_proj.stage(adds_residual=adds_residual)
