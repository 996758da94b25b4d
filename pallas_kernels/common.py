"""What the Mosaic GPU kernels share."""

import math
from typing import Any

import numpy as np

import jax
import jax.experimental.pallas
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax

# Typed Any: the annotations of these modules reject how jax's own kernels call them.
pl: Any = jax.experimental.pallas
plgpu: Any = jax.experimental.pallas.mosaic_gpu

Ref = Any  # a reference to global or shared memory, or to barriers

# Rows of a swizzle atom: a copy of a swizzled tile starts at a multiple of it in global memory, or is silently wrong.
ATOM = 8
LOG2E = math.log2(math.e)
# What each copying warp copies, K (0), V (1) or both, by the number of such warps. Every copy costs 64 arrivals at a
# barrier in shared memory, so that blocks of 16 keep one warp busy.
COPIES_OF_WARPS = {1: ((0, 1),), 2: ((0,), (1,))}
# Finite: exp2(score - max) of a masked key must be 0 and not NaN.
MIN_SCORE = -1e30


def swizzled_smem(*shape: int, dtype: Any) -> Any:
    """Shared memory in the layout that wgmma reads: swizzled tiles of 8 rows of 128 bytes."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((ATOM, 64)), plgpu.SwizzleTransform(128)))


def div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """a // b of non-negative i32 scalars."""
    return lax.div(a, jnp.int32(b) if isinstance(b, int) else b)


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """f32 registers of one value in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def hide_columns_from(end: jax.Array, scores: jax.Array, *, interpret: bool) -> jax.Array:
    """Scores with MIN_SCORE in columns [end, ...) of each row; i32[rows] and f32[rows, columns] in WGMMA layouts.

    The interpreter compares with an array of column numbers; the compiler would keep these in registers all along.
    """
    if interpret:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(column < lax.broadcast_in_dim(end, scores.shape, [0]), scores, MIN_SCORE)
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, vector
    from jax.experimental.mosaic import gpu as mgpu

    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout.reduce(1), layout),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout),
    )
    def hide(ctx: Any, end: Any, scores: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pair_type = ir.VectorType.get((2,), i32)
        # A thread has two rows, 8 apart, and of each 8 columns two neighbours.
        first_column = arith.shli(arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(3, i32)), mgpu.utils.c(1, i32))
        ends = [arith.subi(vector.extract(row, [], [0]), first_column) for row in end.registers.flat]
        ends = [vector.broadcast(pair_type, e) for e in ends]
        smallest = vector.broadcast(
            ir.VectorType.get((2,), ir.F32Type.get()), mgpu.utils.c(MIN_SCORE, ir.F32Type.get())
        )
        registers = scores.registers.copy().reshape(-1, 2)
        for (block, row), pair in np.ndenumerate(registers):
            columns = ir.DenseElementsAttr.get(np.array([8 * block, 8 * block + 1], np.int32), type=pair_type)
            is_seen = arith.cmpi(arith.CmpIPredicate.slt, arith.constant(pair_type, columns), ends[row])
            registers[block, row] = arith.select(is_seen, pair, smallest)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(scores.registers.shape), _layout=scores.layout, _is_signed=None
        )

    return hide(end, scores)


def finish_before_what_follows(x: jax.Array) -> None:
    """Keep ptxas from moving the computation of x, f32[rows] of numbers >= 0, behind the next wait for products.

    It may move arithmetic past a wait, and does, so that none would be left to overlap with the products. A store that
    depends on x and never happens holds it. Not for the interpreter.
    """
    from jax._src.lib.mlir.dialects import arith, vector
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA.reduce(1),))
    def finish(ctx: Any, x: Any) -> None:
        rows = [vector.extract(row, [], [0]) for row in x.registers.flat]
        store = "mov.u32 a, 0; setp.lt.f32 p, $0, 0f00000000; @p st.volatile.shared.f32 [a], $0;"
        ptx = f"{{ .reg .pred p; .reg .b32 a; {store} }}"
        mgpu.utils.inline_ptx(ptx, arith.addf(*rows), has_side_effects=True)

    finish(x)
