"""What the Mosaic GPU kernels share."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import lazy

pl: Any = lazy.pl
plgpu: Any = lazy.plgpu

Ref = Any  # a reference to global or shared memory, or to barriers

# Rows of a swizzle atom: a copy of a swizzled tile starts at a multiple of it in global memory, or is silently wrong.
ATOM = 8
LOG2E = math.log2(math.e)
# Finite: exp2(score - max) of a masked key must be 0 and not NaN.
MIN_SCORE = -1e30


@dataclass(frozen=True)
class AttentionSizes:
    """What every attention kernel is compiled for.

    Attributes:
      group: query heads of a kv head.
      dtype: of q and of the result.
    """

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_sinks: bool
    dtype: Any
    cache_dtype: Any

    @property
    def is_narrow(self) -> bool:
        """Whether keys and values are kept in 8 bits and widened on their way into the products."""
        return jnp.dtype(self.cache_dtype).itemsize == 1


def swizzled_smem(*shape: int, dtype: Any) -> Any:
    """Shared memory in the layout that wgmma reads: swizzled tiles of 8 rows of 128 bytes, or of a whole row."""
    row_bytes = min(128, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((ATOM, row_bytes // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row_bytes)))


def capped(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap), times log2(e). The exponential form is exact enough; tanh.approx has 11 bits."""
    return (cap * LOG2E) * (1.0 - 2.0 / (1.0 + jnp.exp2(scores * (2 * LOG2E / cap))))


def div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """a // b of non-negative i32 scalars."""
    return lax.div(a, jnp.int32(b) if isinstance(b, int) else b)


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """f32 registers of one value in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def widened(narrow: Ref, dtype: Any, *, is_operand: bool = False) -> jax.Array:
    """[tile, H] of 8-bit numbers in shared memory, in registers as `dtype`.

    For products that read registers (`is_operand`) they are brought to the WGMMA layout, for which threads exchange
    what they have. What goes back to shared memory stays as it came.
    """
    values = plgpu.load(narrow, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
    if is_operand:  # while they are narrow: half as many registers
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA)
    values = values.astype(jnp.float16)  # the conversion that the hardware has, and exact
    return values if dtype == jnp.float16 else values.astype(jnp.float32).astype(dtype)


def hide_columns(scores: jax.Array, begin: jax.Array | None, end: jax.Array, *, interpret: bool) -> jax.Array:
    """Scores with MIN_SCORE in the columns of each row that are not in [begin, end).

    The interpreter compares with an array of column numbers; the compiler would keep these in registers all along.

    Args:
      scores: f32[rows, columns] in the WGMMA layout.
      begin, end: i32[rows] in the same layout; begin is None for 0.
    """
    layout = plgpu.Layout.WGMMA
    if interpret:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
        seen = column < lax.broadcast_in_dim(end, scores.shape, [0])
        if begin is not None:
            seen = jnp.logical_and(seen, column >= lax.broadcast_in_dim(begin, scores.shape, [0]))
        return jnp.where(seen, scores, MIN_SCORE)
    scores = _hide(scores, end, "from")
    return scores if begin is None else _hide(scores, begin, "before")


def _hide(scores: jax.Array, bound: jax.Array, which: Literal["from", "before"]) -> jax.Array:
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, vector
    from jax.experimental.mosaic import gpu as mgpu

    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout.reduce(1), layout),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout),
    )
    def hide(ctx: Any, bound: Any, scores: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), i32)
        # A thread has two rows, 8 apart, and of each 8 columns two neighbours.
        first_column = arith.shli(arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(3, i32)), mgpu.utils.c(1, i32))
        bounds = [arith.subi(vector.extract(row, [], [0]), first_column) for row in bound.registers.flat]
        bounds = [vector.broadcast(pair_type, b) for b in bounds]
        smallest = vector.broadcast(ir.VectorType.get((2,), f32), mgpu.utils.c(MIN_SCORE, f32))
        comparison = arith.CmpIPredicate.slt if which == "from" else arith.CmpIPredicate.sge
        registers = scores.registers.copy().reshape(-1, 2)
        for (block, row), pair in np.ndenumerate(registers):
            columns = ir.DenseElementsAttr.get(np.array([8 * block, 8 * block + 1], np.int32), type=pair_type)
            is_seen = arith.cmpi(comparison, arith.constant(pair_type, columns), bounds[row])
            registers[block, row] = arith.select(is_seen, pair, smallest)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(scores.registers.shape), _layout=scores.layout, _is_signed=None
        )

    return hide(bound, scores)


def finish_before_what_follows(x: jax.Array) -> None:
    """Keep ptxas from moving the computation of x, f32[64, N] of numbers >= 0, behind the next wait for products.

    It may move arithmetic past a wait, and does, so that none would be left to overlap with the products. A store that
    depends on x and never happens holds it. Not for the interpreter.
    """
    from jax._src.lib.mlir.dialects import arith, vector
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def finish(ctx: Any, x: Any) -> None:
        values = [vector.extract(pair, [], [i]) for pair in x.registers.flat for i in range(2)]
        store = "mov.u32 a, 0; setp.lt.f32 p, $0, 0f00000000; @p st.volatile.shared.f32 [a], $0;"
        ptx = f"{{ .reg .pred p; .reg .b32 a; {store} }}"
        mgpu.utils.inline_ptx(ptx, functools.reduce(arith.addf, values), has_side_effects=True)

    finish(x)
