"""What matmul_stages means, in plain XLA.

Letters: T tokens  K inputs  N outputs
"""

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


def activate(name: Activation | None, x: jax.Array) -> jax.Array:
    """Apply an activation by name; None is the identity."""
    if name is None:
        return x
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name != "gelu")


def matmul_stages(x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None) -> tuple[jax.Array, ...]:
    """See ops.matmul_stages."""
    results = []
    for stage in stages:
        if stage.norm_weight is not None:
            x = rms_norm(x, as_array(stage.norm_weight), eps=stage.eps, unit_offset=stage.unit_offset)
        y = jnp.einsum("tk,...nk->t...n", x, as_array(stage.weight))
        y = y if stage.bias is None else y + as_array(stage.bias)
        x = activate(stage.activation, y[:, 0]) * y[:, 1] if stage.is_gated else activate(stage.activation, y)
        if stage.adds_residual:
            assert residual is not None
            x = residual = residual + x
        results.append(x)
    return tuple(results)
