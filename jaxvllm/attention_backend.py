"""Which implementation of the attention ops an engine uses, decided once and logged with the reason."""

import logging

import jax

from jaxvllm.model_config import ModelConfig
from pallas_kernels import Backend
from scheduler.batch import BatchLimits

logger = logging.getLogger(__name__)


def choose_backend(requested: str | None, device: jax.Device, config: ModelConfig, limits: BatchLimits) -> Backend:
    """The backend for a model on a device.

    Args:
      requested: a backend by name, or None to choose.

    Raises:
      ValueError: no such backend.
    """
    if requested not in (None, "reference"):
        raise ValueError(f"attention_backend={requested!r} must be 'reference', or left out to be chosen.")
    logger.info("Attention backend: reference (pure XLA)")
    return "reference"
