"""JAX's allocator of GPU memory (tsl/framework/bfc_allocator.cc), played, and steps that allocate."""

import random
from typing import Protocol

KIB, MIB = 1 << 10, 1 << 20
# Of steps of 256 and of 2,048 tokens of Qwen3-0.6B: bytes of the plan, of the workspace and of the logits.
STEPS = (12 * KIB, 30 * MIB, 148 * MIB), (99 * KIB, 90 * MIB, 148 * MIB)
UNIT = 256
MAX_UNUSED = 128 << 20  # of a piece that is not split


class Allocator(Protocol):
    """A device's memory."""

    def allocate(self, num_bytes: int) -> int:
        """The address of a buffer."""
        ...

    def free(self, address: int) -> None:
        """Give a buffer back."""
        ...


class PlayedAllocator:
    """Best fit over one region; what is free next to each other is one piece."""

    def __init__(self, num_bytes: int) -> None:
        self._free = {0: num_bytes}  # address -> bytes
        self._taken: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int:
        """The address of a buffer: the smallest piece that has room, the first of equals."""
        wanted = max(-(-num_bytes // UNIT) * UNIT, UNIT)
        size, address = min((size, address) for address, size in self._free.items() if size >= wanted)
        del self._free[address]
        if size >= 2 * wanted or size - wanted >= MAX_UNUSED:
            self._free[address + wanted] = size - wanted
            size = wanted
        self._taken[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a buffer back."""
        size = self._taken.pop(address)
        for before, num_bytes in self._free.items():
            if before + num_bytes == address:
                del self._free[before]
                address, size = before, num_bytes + size
                break
        size += self._free.pop(address + size, 0)
        self._free[address] = size


def addresses_of_steps(allocator: Allocator, seed: int) -> list[set[tuple[int, int]]]:
    """Where workspace and logits of each of STEPS lay, while plans and ids lived on for as long as it took."""
    rng, addresses = random.Random(seed), [set(), set()]
    held: list[tuple[int, int]] = []  # until which step, and what
    for step in range(100):
        for item in [item for item in held if item[0] <= step]:
            held.remove(item)
            allocator.free(item[1])
        kind = int(rng.random() < 0.2)
        plan, workspace, logits = STEPS[kind]
        held.append((step + rng.randint(1, 3), allocator.allocate(plan)))
        large = allocator.allocate(workspace), allocator.allocate(logits)
        held.append((step + rng.randint(1, 3), allocator.allocate(KIB)))
        addresses[kind].add(large)
        for address in large:
            allocator.free(address)
    return addresses
