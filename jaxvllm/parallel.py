"""The mesh that a model is spread over, and where its arrays lie on it. One device is a mesh of one."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tp"  # splits heads, ffn and vocabulary: see layers.parameter.SHARDING_RULES
_KV_HEADS_AXIS = 3  # of the pool [L, num_blocks, 2, num_kv_heads, block_size, head_dim]


def make_mesh(devices: Sequence[jax.Device], tensor_parallel_size: int = 1) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """A mesh of the first tensor_parallel_size devices.

    Raises: ValueError if there are fewer.
    """
    if len(devices) < tensor_parallel_size:
        raise ValueError(
            f"{tensor_parallel_size=} needs that many devices, but JAX has {len(devices)}: lower it, or, where JAX "
            "runs on a CPU in this process already, leave multiprocess=False out, so that the engine starts its own."
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TENSOR_AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def kv_cache_sharding(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
    """The KV pool split by kv heads, as the projections are; whole on every device where they do not divide."""
    return _split_by_kv_heads(mesh, num_kv_heads, _KV_HEADS_AXIS)


def heads_sharding(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
    """What attention gives, [T, N * H], split as the pool is."""
    return _split_by_kv_heads(mesh, num_kv_heads, 1)


def _split_by_kv_heads(mesh: Mesh, num_kv_heads: int, axis: int) -> NamedSharding:
    if num_kv_heads % mesh.shape[TENSOR_AXIS]:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, TENSOR_AXIS))
