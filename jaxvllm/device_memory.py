"""A GPU's memory: what of it is free, whether that is in one piece, and where small buffers go."""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxvllm.device_probe import driver_free_bytes

logger = logging.getLogger(__name__)

GIB = 1024**3
# Bytes and number of the places for what a step brings or leaves: plans take 3 to 750 KiB, ids 4 bytes a row, a call's
# masks up to 1.2 MiB, and three steps are under way at most. 29 MiB, and as much between them.
SMALL_PLACES = (16 << 10, 32), (256 << 10, 16), (2 << 20, 12)


def free_device_bytes(device: jax.Device) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes of the device's memory pool that nothing holds yet; None where the backend does not say (CPU).

    The pool's limit is the share of the card that JAX was started with.

    Raises: ValueError if others hold so much of the card that the pool cannot grow to its limit.
    """
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    left = driver_free_bytes(device.local_hardware_id or 0)
    if left is not None and "pool_bytes" in stats:
        _check_share(stats["bytes_limit"], stats["pool_bytes"] + left)
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _check_share(limit: int, available: int) -> None:
    """Refuse a share that is not there: JAX would start with less, and fail when the engine needs the rest."""
    if available < limit:
        raise ValueError(
            f"gpu_memory_utilization stands for {limit / GIB:.2f} GiB, but only {available / GIB:.2f} GiB of the GPU's "
            "memory are free: lower gpu_memory_utilization, or end what else runs on the GPU."
        )


def with_room(params: dict[str, jax.Array], devices: list[jax.Device], num_bytes: int) -> dict[str, jax.Array]:  # pyright: ignore[reportInvalidTypeForm]
    """The weights, moved side by side if `num_bytes` do not fit beside them in one piece.

    While weights are loaded the compiler tries products on the device, and where its buffers were there are holes
    between the weights: 6 GiB of 119 for Llama-3.1-8B on one H200, where the KV pool then found no room.

    Args:
      params: CONSUMED if they are moved, through the host's memory.
      devices: that hold them.
      num_bytes: on each device.
    """
    if all(_has_piece(device.memory_stats(), num_bytes) for device in devices):
        return params
    start = time.perf_counter()
    held = {name: (np.asarray(param), param.sharding) for name, param in params.items()}
    for param in params.values():
        param.delete()
    moved = {name: jax.device_put(array, sharding) for name, (array, sharding) in held.items()}
    jax.block_until_ready(moved)
    logger.info("Weights moved together in %.1f s, for the KV cache to fit in one piece", time.perf_counter() - start)
    return moved


def _has_piece(stats: dict[str, Any] | None, num_bytes: int) -> bool:
    """Whether so many bytes are free in one piece; taken for granted where the pool is not allocated as a whole."""
    if not stats or stats.get("pool_bytes", 0) < stats.get("bytes_limit", 1):
        return True
    return stats["largest_free_block_bytes"] >= num_bytes


def small_places(sharding: jax.sharding.Sharding) -> list[jax.Array]:
    """Take care that small buffers do not move large ones: what is returned has to be kept as long as steps run.

    A step's workspace is allocated anew each time. If its address is another one, XLA enters it into each kernel of
    the step's CUDA graph, which takes the host 2.5 ms: 256 requests of Qwen3-0.6B took 3.4 ms and not 2.3 (one H200).
    JAX's allocator takes the smallest free piece that is large enough. Where all that is free is one large piece, plans
    and ids are put at its beginning, in front of the workspace, and move it as they come and go.

    Args:
      sharding: over the devices of the steps, replicated.
    """
    return leave_places(lambda size: jax.device_put(np.zeros(size, np.uint8), sharding), lambda buffer: buffer.delete())


def leave_places[Buffer](allocate: Callable[[int], Buffer], free: Callable[[Buffer], None]) -> list[Buffer]:
    """Allocate SMALL_PLACES side by side and free every other one; those between keep them apart and are returned."""
    kept: list[Buffer] = []
    for size, count in SMALL_PLACES:
        buffers = [allocate(size) for _ in range(2 * count + 1)]
        kept += buffers[::2]
        for buffer in buffers[1::2]:
            free(buffer)
    return kept
