"""What the scheduler and the KV manager are told: limits, policy, the size of the block pool."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a request; names and meaning as in vLLM.

    Attributes:
      num_growth_tokens: beside running requests one is admitted only if all may grow by so many tokens each, or to
        their ends, in the blocks that are free. vLLM keeps none for that (0): it admits what it soon pre-empts, and
        computes it again.

    Raises:
      ValueError: a limit is not positive, or two limits contradict each other.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0: off
    reserve_full_isl: bool = True  # admit a request only if its whole prompt fits the free blocks
    async_scheduling: bool = True
    num_growth_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy={self.policy!r} must be 'fcfs' or 'priority'.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: raise the first or lower the second."
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_model_len={self.max_model_len} when chunked prefill is off: raise it, lower "
                "max_model_len, or leave enable_chunked_prefill on."
            )
        for name in ("long_prefill_token_threshold", "num_growth_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV pool as the host sees it. Block 0 is the null block, so num_blocks - 1 can be used."""

    block_size: int = 16
    num_blocks: int = 1024
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be at least 1.")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks={self.num_blocks} must be at least 2: block 0 is the null block.")
