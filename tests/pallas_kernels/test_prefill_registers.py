"""The registers that the prefill kernel's warpgroups ask for exist."""

import pytest

from pallas_kernels.prefill import REGISTERS

REGISTERS_OF_AN_SM = 65536
THREADS_OF_A_WARPGROUP = 128


@pytest.mark.parametrize("sizes", REGISTERS)
def test_the_warpgroups_of_a_prefill_kernel_ask_for_no_more_registers_than_the_launch_allocates(sizes):
    asked = [registers for registers in REGISTERS[sizes] if registers]
    allocated = REGISTERS_OF_AN_SM // (len(asked) * THREADS_OF_A_WARPGROUP) // 8 * 8
    assert sum(asked) <= len(asked) * allocated
    assert all(registers % 8 == 0 and 24 <= registers <= 256 for registers in asked)
