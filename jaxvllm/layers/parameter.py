"""A weight is declared once: shape, dtype, logical axes, where a checkpoint keeps it, how a dummy is drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np
from flax import nnx

# Logical axis -> the mesh axis that splits it. Everything else is replicated.
SHARDING_RULES = {"kv_heads": "tp", "heads": "tp", "ffn": "tp", "vocab": "tp"}


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a Hugging Face checkpoint and the part of a parameter that it fills.

    Attributes:
      name: the tensor's name; "{layer}" stands for the layer number in a parameter that is stacked by layer.
      shape: as stored in the checkpoint.
      index: where it lands in the parameter (of one layer), as an index expression for NumPy.
      convert: from the stored layout to the layout of that part; a view (transpose, reshape) where possible.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple = (...,)
    convert: Callable[[np.ndarray], np.ndarray] = lambda x: x


@dataclass(frozen=True)
class ParamSpec:
    """A declared weight.

    Attributes:
      shape, dtype: of the parameter; stacked parameters have the layer axis in front.
      axes: one logical axis name (or None) a dimension; SHARDING_RULES maps it to the mesh.
      sources: the checkpoint tensors that fill it; together they cover it exactly.
      init: how load_format="dummy" fills it.
      num_layers: length of the layer axis, None if the parameter is not stacked.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    sources: tuple[CheckpointTensor, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    num_layers: int | None = None

    def stacked(self, num_layers: int) -> "ParamSpec":
        """The same weight for all layers at once, layer axis in front."""
        return replace(self, shape=(num_layers, *self.shape), axes=(None, *self.axes), num_layers=num_layers)

    def partition_spec(self) -> jax.sharding.PartitionSpec:
        """The axes as mesh axes."""
        return jax.sharding.PartitionSpec(*(SHARDING_RULES.get(a) if a else None for a in self.axes))


def declare(spec: ParamSpec) -> nnx.Param:
    """An NNX parameter without a value yet: a ShapeDtypeStruct that carries its spec."""
    return nnx.Param(jax.ShapeDtypeStruct(spec.shape, spec.dtype), spec=spec)
