"""The pool of KV blocks: who is free, how many hold each block, and which full blocks are known by their hash."""

from collections.abc import Iterable, Iterator, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Reference counts, the free list and the prefix cache over num_blocks blocks, as columns indexed by block id.

    The free list is doubly linked through two columns with the null block, which is never free, as its sentinel: its
    successor is the next block to hand out (the least recently used), its predecessor the last one freed. A free block
    keeps its hash until it is handed out again, so a later request can still hit it.

    Attributes:
      ref_counts: requests that hold each block; 0 = free.
      block_hashes: digest under which each block can be found, or None.
      num_free_blocks: length of the free list.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.ref_counts[NULL_BLOCK] = 1
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self.num_free_blocks = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        # A hash has one block nearly always; equal blocks computed twice are kept in the order they became known.
        self._block_of_hash: dict[bytes, int | list[int]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def free_block_ids(self) -> list[int]:
        """The free list in the order in which blocks will be handed out."""
        order = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            order.append(block)
            block = self._next[block]
        return order

    def known_blocks(self) -> Iterator[tuple[bytes, list[int]]]:
        """Each hash of the prefix cache with the blocks found under it, the one that a hit takes first."""
        for block_hash, found in self._block_of_hash.items():
            yield block_hash, [found] if isinstance(found, int) else found

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out the least recently used free blocks, each with one reference and no hash."""
        assert num_blocks <= self.num_free_blocks
        block_ids = []
        block = self._next[NULL_BLOCK]
        for _ in range(num_blocks):
            block_ids.append(block)
            if self.block_hashes[block] is not None:
                self.forget(block)
            self.ref_counts[block] = 1
            block = self._next[block]
        self._next[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.num_free_blocks -= num_blocks
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each; a free one leaves the free list and keeps its hash."""
        for block in block_ids:
            if self.ref_counts[block] == 0:
                before, after = self._prev[block], self._next[block]
                self._next[before] = after
                self._prev[after] = before
                self.num_free_blocks -= 1
            self.ref_counts[block] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each, in order; those without any join the end of the free list."""
        for block in block_ids:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                last = self._prev[NULL_BLOCK]
                self._next[last] = block
                self._prev[block] = last
                self._next[block] = NULL_BLOCK
                self._prev[NULL_BLOCK] = block
                self.num_free_blocks += 1

    def longest_hit(self, hashes: Sequence[bytes], max_blocks: int) -> list[int]:
        """Blocks that hold the longest known prefix of `hashes`, at most max_blocks of them."""
        hit: list[int] = []
        for index in range(max_blocks):
            found = self._block_of_hash.get(hashes[index])
            if found is None:
                break
            hit.append(found if isinstance(found, int) else found[0])
        return hit

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others find a block by its hash. The step that fills it must be certain to run."""
        assert self.block_hashes[block] is None
        self.block_hashes[block] = block_hash
        known = self._block_of_hash.get(block_hash)
        if known is None:
            self._block_of_hash[block_hash] = block
        elif isinstance(known, int):
            self._block_of_hash[block_hash] = [known, block]
        else:
            known.append(block)

    def forget(self, block: int) -> None:
        """Take a block's hash away: nobody finds it any more. Its holders keep it."""
        block_hash = self.block_hashes[block]
        assert block_hash is not None
        self.block_hashes[block] = None
        known = self._block_of_hash[block_hash]
        if isinstance(known, int):
            del self._block_of_hash[block_hash]
            return
        known.remove(block)
        if len(known) == 1:
            self._block_of_hash[block_hash] = known[0]

    def forget_all(self) -> bool:
        """Empty the prefix cache; False, and no change, while any block is held."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self._block_of_hash.clear()
        self.block_hashes = [None] * self.num_blocks
        return True
