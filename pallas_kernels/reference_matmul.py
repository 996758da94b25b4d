"""What matmul_stages and act_and_mul mean, in plain XLA.

Letters: T tokens  K inputs  N outputs
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.layer_slice import LayerArray, as_array
from pallas_kernels.reference_rope_write import rms_norm

# As the config files of Hugging Face call them.
Activation = Literal["silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class MatmulStage:
    """One product of a chain: y = activation(norm(x) @ weight^T + bias), and what is added or multiplied.

    With a weight [2, N, K] the first half is a gate: y = activation(gate) * other.
    """

    weight: LayerArray  # [N, K], or [2, N, K]
    norm_weight: LayerArray | None = None  # [K]; RMSNorm of the input
    bias: LayerArray | None = None  # [N], or [2, N]
    eps: float = field(default=0.0, metadata={"static": True})  # of the norm
    unit_offset: bool = field(default=False, metadata={"static": True})  # the norm's factor is 1 + weight
    activation: Activation | None = field(default=None, metadata={"static": True})
    adds_residual: bool = field(default=False, metadata={"static": True})  # y += residual, and y is the residual then

    @property
    def is_gated(self) -> bool:
        """Whether the weight holds a gate."""
        return self.weight.ndim == 3

    @property
    def ways(self) -> int:
        """Weight rows of an output: 2 with a gate."""
        return 2 if self.is_gated else 1


def activate(name: Activation | None, x: jax.Array) -> jax.Array:
    """Apply an activation by name; None is the identity."""
    if name is None:
        return x
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name != "gelu")


def act_and_mul(gate_up: jax.Array, activation: Activation | None) -> jax.Array:
    """See ops.act_and_mul."""
    return activate(activation, gate_up[:, 0]) * gate_up[:, 1]


def norm(x: jax.Array, stage: MatmulStage) -> jax.Array:
    """The norm of a stage's input, [T, K]."""
    if stage.norm_weight is None:
        return x
    return rms_norm(x, stage.norm_weight, eps=stage.eps, unit_offset=stage.unit_offset)


def gate(gate_up: jax.Array, stage: MatmulStage) -> jax.Array:
    """The activation of a stage and its gate, [T, 2, N] -> [T, N]."""
    return act_and_mul(gate_up, stage.activation)


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    *,
    norm: Callable[[jax.Array, MatmulStage], jax.Array] = norm,
    gate: Callable[[jax.Array, MatmulStage], jax.Array] = gate,
) -> tuple[jax.Array, ...]:
    """See ops.matmul_stages. With other functions for the norm and the gate of a stage these are no XLA."""
    results = []
    for stage in stages:
        x = norm(x, stage)
        y = jnp.einsum("tk,...nk->t...n", x, as_array(stage.weight))
        y = y if stage.bias is None else y + as_array(stage.bias)
        x = gate(y, stage) if stage.is_gated else activate(stage.activation, y)
        if stage.adds_residual:
            assert residual is not None
            x = residual = residual + x
        results.append(x)
    return tuple(results)
