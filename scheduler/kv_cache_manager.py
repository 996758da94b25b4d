"""Which blocks hold which request's keys and values, and which blocks a new request may share."""

from collections.abc import Sequence

from scheduler.block_hash import extend_block_hashes
from scheduler.block_pool import BlockPool
from scheduler.config import CacheConfig
from scheduler.request import Request


class KVCacheManager:
    """Gives requests blocks and takes them back; the only writer of a request's four block fields."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.pool.num_usable_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Held share of the usable blocks."""
        return 1.0 - self.pool.num_free_blocks / self.pool.num_usable_blocks

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix of a waiting request; nothing is changed but its block hashes.

        At least one token is left to compute, because its logits give the next token.
        """
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return []
        self._extend_hashes(request)
        return self.pool.longest_hit(request.block_hashes, (request.num_tokens - 1) // self.block_size)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit_block_ids: Sequence[int] = (),
        *,
        full_sequence_must_fit: bool = False,
        num_reserved_blocks: int = 0,
    ) -> list[int] | None:
        """Give a request room for its next tokens and publish the blocks that they fill.

        The hashes are published before the step runs: the caller must run it, or call undo_publish.

        Args:
          request: MUTATED (block fields).
          num_new_tokens: tokens to compute in the step being built, after the hits.
          hit_block_ids: blocks found by get_computed_blocks, for a request that holds none.
          full_sequence_must_fit: give nothing unless the free blocks could hold all its known tokens.
          num_reserved_blocks: free blocks that are not for it.
        Returns: ids of the blocks appended after the hits, or None (and no change) if too few are free.
        """
        num_tokens = request.num_computed_tokens + len(hit_block_ids) * self.block_size + num_new_tokens
        num_held = len(request.block_ids) + len(hit_block_ids)
        num_free = self.pool.num_free_blocks - num_reserved_blocks
        if hit_block_ids:
            ref_counts = self.pool.ref_counts
            num_free -= sum(ref_counts[block] == 0 for block in hit_block_ids)
        if full_sequence_must_fit and self._num_blocks(request.num_tokens) - num_held > num_free:
            return None
        num_needed = max(self._num_blocks(num_tokens) - num_held, 0)
        if num_needed > num_free:
            return None

        if hit_block_ids:
            self.pool.touch(hit_block_ids)
            request.block_ids.extend(hit_block_ids)
            request.num_hashed_blocks = len(hit_block_ids)
        new_block_ids = self.pool.allocate(num_needed)
        request.block_ids.extend(new_block_ids)
        self.publish_full_blocks(request, min(num_tokens, request.num_tokens))
        return new_block_ids

    def publish_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Let others find the blocks that the first num_tokens tokens fill; tokens in flight must not be counted."""
        num_full = num_tokens // self.block_size if self.enable_prefix_caching else 0
        if num_full > request.num_hashed_blocks:
            self._extend_hashes(request)
            for index in range(request.num_hashed_blocks, num_full):
                self.pool.publish(request.block_ids[index], request.block_hashes[index])
            request.num_hashed_blocks = num_full
        self._set_ready_tokens(request)

    def undo_publish(self, request: Request) -> None:
        """Take back the hashes of blocks that only the undone step would have filled.

        Blocks in front of num_computed_tokens were filled by steps that run, and stay known.
        """
        num_filled = request.num_computed_tokens // self.block_size
        for index in range(num_filled, request.num_hashed_blocks):
            self.pool.forget(request.block_ids[index])
        request.num_hashed_blocks = min(num_filled, request.num_hashed_blocks)

    def free(self, request: Request) -> None:
        """Take all blocks back, the last one first, so that the end of a sequence is reused before its beginning."""
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_hashed_blocks = 0
        request.num_ready_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; False, and no change, while any request holds blocks."""
        return self.pool.forget_all()

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.root_digest)

    def _set_ready_tokens(self, request: Request) -> None:
        num_ready = len(request.block_ids) * self.block_size
        if self.enable_prefix_caching:
            num_ready = min(num_ready, (request.num_hashed_blocks + 1) * self.block_size - 1)
        request.num_ready_tokens = num_ready
