"""How many blocks the KV pool gets. The number is part of every program, so it is chosen before any is compiled."""

import logging
from dataclasses import dataclass

from jaxvllm.config import MemoryConfig
from jaxvllm.device_memory import GIB
from jaxvllm.dispatcher import MAX_STEPS_ON_DEVICE
from jaxvllm.kv_cache import KVCacheSpec, num_blocks_that_fit
from jaxvllm.model_config import ModelConfig
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, BucketPolicy

logger = logging.getLogger(__name__)

ALLOCATOR_SLACK_BYTES = 512 << 20  # what fragmentation and small buffers may take of the device's memory pool
# Of the float32 logits of a step and of its largest activations: generous, as a pool too large means to compile anew.
_LOGITS_COPIES, _ACTIVATION_COPIES = 4.5, 3
# A pool this much smaller than it might be is not worth compiling anew, which took a fifth of Llama-3.1-8B's start.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class PoolSizer:
    """Sizes the pool of one engine: from what was asked for, or from what weights and workspace leave of the device.

    Attributes:
      free_bytes: of the device, before the weights are there; None: the device does not say.
      param_bytes: of the weights, and of whatever else stays on a device beside the pool.
      policy: its buckets are the programs.
    """

    memory: MemoryConfig
    spec: KVCacheSpec
    limits: BatchLimits
    model: ModelConfig
    policy: BucketPolicy
    free_bytes: int | None
    param_bytes: int

    def guess(self) -> int:
        """The number of blocks before the compiler has said what workspace the steps need.

        Raises: ValueError if not even one request of max_model_len fits.
        """
        return self._num_blocks(self._guessed_workspace())

    def checked(self, num_blocks: int, workspace_bytes: int) -> int:
        """The guess where it stands up to what the compiler says, else a better number.

        Args:
          num_blocks: the guess.
          workspace_bytes: the most of one step so far; 0 if the compiler did not say.
        """
        if not workspace_bytes or self._is_fixed:
            return num_blocks
        exact = self._num_blocks(workspace_bytes)
        return num_blocks if (1 - _TOLERANCE) * exact <= num_blocks <= exact else exact

    def bytes_at_work(self, num_blocks: int, workspace_bytes: int) -> int:
        """What serving takes of a device beside the weights: the pool, and the workspace of as many steps as it has."""
        return num_blocks * self.spec.block_bytes + MAX_STEPS_ON_DEVICE * workspace_bytes

    @property
    def largest(self) -> BucketKey:
        """The bucket with the largest workspace: logits of its rows, activations of its tokens."""
        return max(self.policy.keys(), key=lambda key: (key.R, key.T))

    @property
    def _is_fixed(self) -> bool:
        return self.memory.num_blocks is not None or self.memory.kv_cache_bytes is not None

    def _num_blocks(self, workspace_bytes: int) -> int:
        memory = self.memory
        if memory.num_blocks is not None:
            return memory.num_blocks
        if memory.kv_cache_bytes is not None:
            return num_blocks_that_fit(self.spec, self.limits, memory.kv_cache_bytes)
        if self.free_bytes is None:
            raise RuntimeError("the device does not say how much memory is free: set kv_cache_memory_bytes.")
        # With async scheduling the workspace of a second step can be taken while the first one runs.
        taken = self.param_bytes + self.bytes_at_work(0, workspace_bytes) + ALLOCATOR_SLACK_BYTES
        return num_blocks_that_fit(self.spec, self.limits, self.free_bytes, taken)

    def _guessed_workspace(self) -> int:
        model, num_tokens, num_rows = self.model, self.largest.T, self.largest.R
        width = max(model.intermediate_size, model.num_heads * model.head_dim) + model.hidden_size
        activations = num_tokens * width * self.spec.dtype.itemsize
        logits = num_rows * model.vocab_size * 4
        return int(_LOGITS_COPIES * logits + _ACTIVATION_COPIES * activations)


def log_pool(spec: KVCacheSpec, limits: BatchLimits, num_blocks: int) -> None:
    """Say how large the pool is and how many of the longest requests it holds."""
    num_tokens = (num_blocks - 1) * spec.block_size
    logger.info("KV cache size: %s tokens (%.2f GiB)", f"{num_tokens:,}", num_blocks * spec.block_bytes / GIB)
    concurrency = (num_blocks - 1) / limits.max_blocks
    logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{limits.max_model_len:,}", concurrency)
