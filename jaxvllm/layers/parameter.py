"""A weight is declared once: shape, dtype, logical axes, where a checkpoint keeps it, how a dummy is drawn."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# A weight on the device: all layers stacked, or one array a layer.
Weight = jax.Array | tuple[jax.Array, ...]

_SMALL_BYTES = 64 * 1024

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

    @property
    def is_small(self) -> bool:
        """Whether each layer of an unrolled model on a GPU gets an array of its own; see unstack_small."""
        if self.num_layers is None:
            return False
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize <= _SMALL_BYTES

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


def unstack_small(params: Mapping[str, jax.Array], specs: Mapping[str, ParamSpec]) -> dict[str, Weight]:
    """Give each layer its own array of the small stacked parameters (norms, biases); the others stay as they are.

    For unrolled layers on a GPU: a static slice of a small weight is fused into the kernel that uses it, which makes
    that kernel another one to compile in every layer. Without the slice the layers share it.
    """
    return {name: tuple(array) if specs[name].is_small else array for name, array in params.items()}


def param_shapes(specs: Mapping[str, ParamSpec], mesh: jax.sharding.Mesh, *, unstack: bool) -> dict[str, Any]:
    """The weights' shapes and places before they are there, in the form that `unstack_small` gives them if asked."""

    def shape(spec: ParamSpec) -> Any:
        sharding = spec.sharding(mesh)
        if not (unstack and spec.is_small):
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)
        of_layer = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
        return (jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype, sharding=of_layer),) * spec.shape[0]

    return {name: shape(spec) for name, spec in specs.items()}


def bind[M: nnx.Module](model: M, params: Mapping[str, Weight]) -> M:
    """A copy of `model` whose weights are `params`, arrays or tracers: call it where the step is traced.

    Args:
      model: as built, without values; not changed.
      params: for every name in param_specs(model) an array, or a tuple of one a layer (see unstack_small).

    Raises: KeyError for a name that is missing.
    """

    def value(path: tuple) -> jax.Array:
        weight = params[".".join(map(str, path))]
        # A slice of the stack is the layer's own array again: XLA removes both.
        return jnp.stack(weight) if isinstance(weight, tuple) else weight

    graphdef, state = nnx.split(model, nnx.Param)
    bound = [(path, param.replace(value(path))) for path, param in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(bound))
