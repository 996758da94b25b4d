"""A weight is declared once: shape, dtype, logical axes, where a checkpoint keeps it, how a dummy is drawn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

# A weight on the device, all layers of it stacked: each array more is 2 to 3 us of the host's time in every step.
Weight = jax.Array

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
      other_names: under which some checkpoints keep it; the first that is there counts.
      default: what fills the part where a checkpoint has none of them; None if it must have one.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple = (...,)
    convert: Callable[[np.ndarray], np.ndarray] = lambda x: x
    other_names: tuple[str, ...] = ()
    default: float | None = None


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

    def sharding(self, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> jax.sharding.NamedSharding:
        """Where the weight lies on a mesh with a "tp" axis: split by partition_spec where that divides evenly.

        A dimension that the mesh does not divide (a vocabulary of odd size) is kept whole on every device.
        """
        parts = [
            part if part and size % mesh.shape[part] == 0 else None
            for size, part in zip(self.shape, self.partition_spec(), strict=True)
        ]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))


def declare(spec: ParamSpec) -> nnx.Param:
    """An NNX parameter without a value yet: a ShapeDtypeStruct that carries its spec."""
    return nnx.Param(jax.ShapeDtypeStruct(spec.shape, spec.dtype), spec=spec)


def stack_layers(layer: nnx.Module, num_layers: int) -> nnx.Module:
    """Give every parameter of `layer`, which has no values yet, a leading layer axis; changes and returns `layer`."""
    for _, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Param):
            spec = node.spec.stacked(num_layers)
            node.set_value(jax.ShapeDtypeStruct(spec.shape, spec.dtype))
            node.set_metadata(spec=spec)
    return layer


def param_specs(model: nnx.Module) -> dict[str, ParamSpec]:
    """All weights of a model by path, e.g. "layers.self_attn.qkv_proj.weight"."""
    return {".".join(map(str, path)): param.spec for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def param_shapes(specs: Mapping[str, ParamSpec], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The weights' shapes and places before they are there."""
    return {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=spec.sharding(mesh)) for name, spec in specs.items()
    }


def bind[M: nnx.Module](model: M, params: Mapping[str, Weight]) -> M:
    """A copy of `model` whose weights are `params`, arrays or tracers: call it where the step is traced.

    Args:
      model: as built, without values; not changed.
      params: for every name in param_specs(model) an array.

    Raises: KeyError for a name that is missing.
    """

    graphdef, state = nnx.split(model, nnx.Param)
    bound = [(path, param.replace(params[".".join(map(str, path))])) for path, param in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(bound))
