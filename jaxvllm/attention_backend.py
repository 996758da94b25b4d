"""Which implementation of the attention ops an engine uses, decided once and logged with the reason."""

import logging

import jax

from jaxvllm.kv_cache import cache_dtype_of
from jaxvllm.model_config import ModelConfig
from pallas_kernels import Backend, unsupported_reason
from scheduler.batch import BatchLimits

logger = logging.getLogger(__name__)

HOPPER = "9.0"


def choose_backend(
    requested: str | None,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    config: ModelConfig,
    limits: BatchLimits,
    cache_dtype: str = "auto",
) -> Backend:
    """The backend for a model on a device: the Mosaic GPU kernels where they can serve it, else the XLA reference.

    Args:
      requested: "mosaic_gpu" or "reference", or None to choose.
      cache_dtype: of the KV cache; "auto" is the model's.

    Raises:
      ValueError: no such backend.
      NotImplementedError: "mosaic_gpu" was requested and cannot serve this model on this device.
    """
    if requested not in (None, "mosaic_gpu", "reference"):
        raise ValueError(f"attention_backend={requested!r} must be 'mosaic_gpu' or 'reference', or left out.")
    if requested == "reference":
        reason = "requested"
    else:
        reason = _no_kernels(device, config, limits, cache_dtype)
        if reason is None:
            logger.info("Attention backend: mosaic_gpu (Pallas kernels, %s)", device.device_kind)
            return "mosaic_gpu"
        if requested is not None:
            raise NotImplementedError(f"attention_backend={requested!r} cannot be used: {reason}; leave it out.")
    logger.info("Attention backend: reference (pure XLA): %s", reason)
    return "reference"


def _no_kernels(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    config: ModelConfig,
    limits: BatchLimits,
    cache_dtype: str,
) -> str | None:
    """Why the Mosaic kernels cannot be used, None if they can."""
    if device.platform != "gpu":
        return f"the kernels need an NVIDIA GPU, this is a {device.platform.upper()}"
    capability = getattr(device, "compute_capability", "unknown")
    if capability != HOPPER:
        return f"the kernels need compute capability {HOPPER}, this GPU has {capability}"
    return unsupported_reason(
        dtype=config.dtype,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        block_size=limits.block_size,
        cache_dtype=cache_dtype_of(config.dtype, cache_dtype),
    )
