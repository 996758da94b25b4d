"""JAX's allocator of GPU memory (tsl/framework/bfc_allocator.cc), played: which piece a buffer gets."""

UNIT = 256
MAX_UNUSED = 128 << 20  # of a piece that is not split


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
