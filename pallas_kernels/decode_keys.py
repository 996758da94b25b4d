"""8-bit keys as the operand of decode's products: in registers, where they lie, with q's columns in the same order.

Of 16 columns of a key a thread loads 4 neighbours, as 4 bytes; the product wants of it 2 columns and the 2 that are 8
behind them. Threads would have to exchange what they have, which is a ninth of the instructions of a key tile. Instead
the registers are taken for the columns that the product wants, and q, which is stored once an item, has its columns in
the order that this gives: of each 16, columns 2 and 3 change places with 8 and 9, and 6 and 7 with 12 and 13. Only the
sum over all columns is seen, and its terms are the same.

Not for the interpreter, which knows no layouts of registers: there keys and q stay in order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import Ref, plgpu, tiled_layout

_WGMMA = plgpu.Layout.WGMMA
_NEIGHBOURS = plgpu.Layout.WGMMA_UPCAST_2X


def keys_in_registers(keys: Ref) -> jax.Array:
    """[64, H] of 8-bit numbers in shared memory as f16, columns in the order of store_q, in the WGMMA layout."""
    values = plgpu.load(keys, layout=_NEIGHBOURS, optimized=False).astype(jnp.float16)
    return _relabelled(values, _NEIGHBOURS, _WGMMA, relabel_keys)


def store_q(q: jax.Array, smem: Ref) -> None:
    """Put q^T, f16[64 rows of H, columns] in the WGMMA layout, into smem [columns, 64] with H in the keys' order."""
    smem.transpose((1, 0))[...] = _relabelled(q, _WGMMA, rows_of_q(), relabel_q)


def rows_of_q() -> Any:
    """Where a thread stores what it has of q^T: as WGMMA, but for the bits of a row in 16 that count 2 and 8."""
    tiles = (64, 8), (16, 8), (8, 8), (4, 8), (2, 8), (2,), (1,)
    return tiled_layout(*tiles, warp_dims=(-12,), lane_dims=(-8, -10, -4, -3))


Cut = Callable[[Any, int, int], Any]  # of a register: values [begin, end)


def relabel_keys(registers: np.ndarray, cut: Cut) -> list[Any]:
    """Registers of 4 neighbours, of two rows in turn, as those of the WGMMA layout: one half behind the other."""
    rows = registers.reshape(-1, 2)
    return [cut(four, begin, begin + 2) for pair in rows for begin in (0, 2) for four in pair]


def relabel_q(registers: np.ndarray, cut: Cut) -> list[Any]:
    """Registers of the WGMMA layout, two columns each, as those of rows_of_q, which are not vectors."""
    return [cut(pair, i, i + 1) for pair in registers.flat for i in range(2)]


def _relabelled(x: jax.Array, layout: Any, new_layout: Any, relabel: Callable[[np.ndarray, Cut], list[Any]]) -> Any:
    """The same registers in every thread, taken for an array in another layout."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, new_layout))
    def relabelled(ctx: Any, x: Any) -> Any:
        from jax.experimental.mosaic import gpu as mgpu

        target = new_layout.to_mgpu()
        registers = np.empty(target.registers_shape(x.shape), object)
        registers.flat = relabel(x.registers, lambda v, begin, end: mgpu.utils.vector_slice(v, slice(begin, end)))
        return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return relabelled(x)
