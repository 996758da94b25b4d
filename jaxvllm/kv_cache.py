"""The paged KV pool on the device: its layout, what a block costs, and how many blocks fit."""

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxvllm.device_memory import GIB
from jaxvllm.model_config import ModelConfig
from pallas_kernels import Backend, cache_head_dim
from scheduler.batch import BatchLimits

logger = logging.getLogger(__name__)


def cache_dtype_of(model_dtype: str, cache_dtype: str) -> np.dtype:
    """What keys and values are kept in: the model's dtype if `cache_dtype` is "auto"."""
    return jnp.dtype(model_dtype if cache_dtype == "auto" else cache_dtype)


@dataclass(frozen=True)
class KVCacheSpec:
    """One array [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]; axis 2 is key, value.

    A (block, key or value, head) chunk is contiguous: one copy for a kernel. Block 0 is the null block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: np.dtype

    @classmethod
    def of_model(
        cls, config: ModelConfig, block_size: int, *, cache_dtype: str = "auto", backend: Backend = "reference"
    ) -> "KVCacheSpec":
        """The pool of a model.

        Args:
          cache_dtype: "auto" is the model's dtype.
          backend: kernels want some head sizes padded.
        """
        head_dim = config.head_dim if backend == "reference" else cache_head_dim(config.head_dim)
        if head_dim != config.head_dim:
            logger.info("The KV cache pads heads of %d to %d for %s", config.head_dim, head_dim, backend)
        dtype = cache_dtype_of(config.dtype, cache_dtype)
        return cls(config.num_layers, config.num_kv_heads, head_dim, block_size, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        values = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return values * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of a pool of num_blocks."""
        return (self.num_layers, num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def allocate(self, num_blocks: int, sharding: Sharding | None = None) -> jax.Array:
        """A pool of zeros, there when this returns: that it does not fit must not end somebody's step.

        Raises: ValueError if the device has no room for it: of a size that the caller has chosen, nobody knew before.
        """
        try:
            return jnp.zeros(self.shape(num_blocks), self.dtype, device=sharding).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(
                f"the device has no room for a KV cache of {(num_blocks - 1) * self.block_size:,} tokens "
                f"({num_blocks * self.block_bytes / GIB:.2f} GiB): lower what chose its size (kv_cache_memory_bytes, "
                f"num_gpu_blocks_override, gpu_memory_utilization). {error}"
            ) from error


def num_blocks_that_fit(spec: KVCacheSpec, limits: BatchLimits, free_bytes: int, workspace_bytes: int = 0) -> int:
    """How many blocks to allocate: what fits, less at most 1% so that small differences give the same number.

    The number is part of every program: with another one, a later start would find none of them in JAX's cache.

    Args:
      spec: of the pool.
      limits: a single request of max_model_len tokens must fit.
      free_bytes: of the device, or of what the caller gives the pool.
      workspace_bytes: what else has to fit: weights, and what the programs need beside the pool.

    Raises:
      ValueError: not even one request of max_model_len fits; says how many tokens do and what to change.
    """
    pool_bytes = max(free_bytes - workspace_bytes, 0)
    num_blocks = pool_bytes // spec.block_bytes
    num_blocks = max(num_blocks - num_blocks % _granularity(num_blocks), min(num_blocks, limits.max_blocks + 1))
    num_tokens = max(num_blocks - 1, 0) * spec.block_size
    if num_blocks - 1 < limits.max_blocks:
        needed = (limits.max_blocks + 1) * spec.block_bytes
        shorter = f"lower max_model_len to at most {num_tokens}, " if num_tokens else ""
        raise ValueError(
            f"the KV cache has room for {num_tokens} tokens ({pool_bytes / GIB:.2f} GiB), but "
            f"max_model_len={limits.max_model_len} needs {needed / GIB:.2f} GiB: {shorter}raise "
            "gpu_memory_utilization (on a CPU, or where it is given: kv_cache_memory_bytes), or lower "
            "max_num_batched_tokens."
        )
    return num_blocks


def _granularity(num_blocks: int) -> int:
    """The power of two of which less than 1% is lost by rounding down."""
    return 1 << max(num_blocks.bit_length() - 8, 0)
