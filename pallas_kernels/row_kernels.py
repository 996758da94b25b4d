"""Operations on each of many rows, RMSNorm and an activation times its gate, as Pallas Mosaic GPU kernels.

A thread block takes some rows, or a part of their columns, in one go: each warp a row, with all of its loads on their
way before the first is used, or all warps one row where it is wide. Nothing but the sum of squares of a wide row goes
through shared memory. Blocks go from the last rows to the first: those are what the product before wrote last and may
still lie in the L2 cache, and the product behind begins with what this kernel wrote last.

The residual's sum is no part of these kernels. cuBLAS adds it where it writes the product before, which costs a read of
the residual; left to the norm it would cost a write and a read of the product besides.

Letters: T rows  D columns  F columns of the gate
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, div, pl, plgpu
from pallas_kernels.layer_slice import LayerArray, as_stack, layer_of, place_in

_DTYPES = ("bfloat16", "float16")
_MAX_ROWS_A_BLOCK = 4
_WARPS, _LANES = 4, 32
# Columns are cut in these.
_UNIT = 128
# Numbers a thread holds of a row that is normed: 56 registers at 32, which leaves room for 9 thread blocks an SM.
_NUMBERS_A_THREAD = 32
_MAX_NORM_WIDTH = 64 * _WARPS * _LANES
# Of a gate that a warp takes at a time: 48 registers, 10 thread blocks an SM.
_MAX_GATE_COLUMNS = 512


def unsupported_norm(shape: tuple[int, ...], dtype: Any, *, unit_offset: bool) -> str | None:
    """Why rms_norm has no kernel for x of a shape, in words, or None if it has one."""
    if unit_offset:
        # Gemma norms what a product gave, adds the residual and norms again. XLA does that at once: with a kernel for
        # the last part a layer would read or write [T, D] ten times in the place of nine.
        return "a factor of 1 + weight"
    if len(shape) != 2 or shape[1] > _MAX_NORM_WIDTH:
        return f"shape {shape} (only [T, D] up to D = {_MAX_NORM_WIDTH})"
    return _unsupported_rows(shape, dtype)


def unsupported_activation(shape: tuple[int, ...], dtype: Any, activation: str | None) -> str | None:
    """Why act_and_mul has no kernel for gate_up of a shape, in words, or None if it has one."""
    if activation not in _EXPONENTS:
        return f"activation {activation} (only {', '.join(map(str, _EXPONENTS))})"
    return _unsupported_rows(shape, dtype)


def _unsupported_rows(shape: tuple[int, ...], dtype: Any) -> str | None:
    if jnp.dtype(dtype).name not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name} (only {' and '.join(_DTYPES)})"
    if shape[0] < _MAX_ROWS_A_BLOCK:
        return f"{shape[0]} rows (only {_MAX_ROWS_A_BLOCK} or more)"
    return f"{shape[-1]} columns (only multiples of {_UNIT})" if shape[-1] % _UNIT else None


def rms_norm(x: jax.Array, weight: LayerArray, *, eps: float, interpret: Any = False) -> jax.Array:
    """See ops.rms_norm.

    Args:
      x: bf16 or f16[T, D].
      weight: [D] of x's dtype.
      interpret: False, or InterpretGPUParams.
    """
    num_rows, width = x.shape
    rows = next((n for n in (4, 2) if n * width <= _NUMBERS_A_THREAD * _WARPS * _LANES), 1)
    layer = layer_of(weight)
    kernel = _kernel(
        functools.partial(_norm_rows, num_rows, rows, eps),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=-(-num_rows // rows),
        name="rms_norm",
        interpret=interpret,
    )
    return kernel(x, as_stack(weight, layer), layer.reshape(1))


def act_and_mul(gate_up: jax.Array, activation: str | None, *, interpret: Any = False) -> jax.Array:
    """See ops.act_and_mul.

    Args:
      gate_up: bf16 or f16[T, 2, F].
      activation: see unsupported_activation.
      interpret: False, or InterpretGPUParams.
    """
    num_rows, _, width = gate_up.shape
    columns = max(n for n in range(_UNIT, _MAX_GATE_COLUMNS + 1, _UNIT) if width % n == 0)
    kernel = _kernel(
        functools.partial(_activate_rows, num_rows, columns, _EXPONENTS[activation]),
        jax.ShapeDtypeStruct((num_rows, width), gate_up.dtype),
        grid=-(-num_rows // _MAX_ROWS_A_BLOCK) * (width // columns),
        name="act_and_mul",
        interpret=interpret,
    )
    return kernel(gate_up)


def _kernel(body: Callable[..., None], out_type: Any, *, grid: int, name: str, interpret: Any) -> Callable[..., Any]:
    return pl.kernel(
        body,
        out_type=out_type,
        mesh=plgpu.Mesh(grid=(grid,), grid_names=("block",)),
        # No thread reads from memory what another one wrote.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        name=name,
    )


@functools.cache
def _layout(rows: int, width: int) -> Any:
    """[rows, width] over the 128 threads: the warps of a row side by side, their lanes in 16 bytes or what divides."""
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

    warps = _WARPS // rows
    vector = next(n for n in (8, 4, 2, 1) if width % (n * _LANES * warps) == 0)
    tiling = plgpu.Tiling(((rows, warps * _LANES * vector), (1, _LANES * vector), (1, vector)))
    warp_dims = tuple(dim for dim, size in ((-6, rows), (-5, warps)) if size > 1)
    layout = TiledLayout(tiling, warp_dims, (-3,), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _rows_from_the_end(number: jax.Array, num_rows: int, rows: int) -> Any:
    """The rows of a block, `number` from the end. The first rows are taken twice if the blocks do not divide them."""
    start = num_rows - rows - number * rows
    return pl.ds(start if num_rows % rows == 0 else jnp.maximum(start, 0), rows)


def _load(ref: Ref, layout: Any) -> jax.Array:
    """As float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _norm_rows(num_rows: int, rows: int, eps: float, x_ref: Ref, weight_ref: Ref, layer_ref: Ref, out_ref: Ref) -> None:
    """The body of rms_norm, with the roundings of reference_rope_write.rms_norm."""
    shape, dtype = (rows, x_ref.shape[1]), x_ref.dtype
    layout = _layout(*shape)
    here = _rows_from_the_end(lax.axis_index("block"), num_rows, rows)
    x = _load(x_ref.at[here], layout)
    weight = _load(weight_ref.at[place_in(weight_ref, layer_ref[0])], layout.reduce(0))
    factor = lax.rsqrt((x * x).sum(axis=1) * (1.0 / shape[1]) + eps)
    factor, weight = (
        plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [dim]), layout)
        for dim, values in enumerate((factor, weight))
    )
    # The product of two 16-bit numbers is exact in float32.
    out_ref[here, :] = ((x * factor).astype(dtype).astype(jnp.float32) * weight).astype(dtype)


def _activate_rows(
    num_rows: int, columns: int, exponent: Callable[[jax.Array], jax.Array], gate_up_ref: Ref, out_ref: Ref
) -> None:
    """The body of act_and_mul: gate / (1 + exp(exponent(gate))) * up. A division is ten instructions, a root is one."""
    block, parts = lax.axis_index("block"), gate_up_ref.shape[2] // columns
    from_the_end = div(block, parts)
    here = _rows_from_the_end(from_the_end, num_rows, _MAX_ROWS_A_BLOCK)
    part = pl.ds((block - from_the_end * parts) * columns, columns)
    layout = _layout(_MAX_ROWS_A_BLOCK, columns)
    gate, up = (_load(gate_up_ref.at[here, i, part], layout) for i in range(2))
    root = lax.rsqrt(1.0 + jnp.exp(exponent(gate)))
    out_ref[here, part] = (gate * root * root * up).astype(out_ref.dtype)


def _gelu_exponent(x: jax.Array) -> jax.Array:
    """0.5 * (1 + tanh(y)) is 1 / (1 + exp(-2 * y))."""
    return x * (1.0 + 0.044715 * (x * x)) * (-2.0 * math.sqrt(2.0 / math.pi))


# Activations of the form x / (1 + exp(f(x))).
_EXPONENTS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: -x,
    "gelu_new": _gelu_exponent,
    "gelu_pytorch_tanh": _gelu_exponent,
}
