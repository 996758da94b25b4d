"""Operations on each row of many: RMSNorm, and silu-and-mul, as Pallas Mosaic GPU kernels.

Candidates that scripts/bench_rows.py measures against what XLA makes; no layer uses them. A thread block takes a row at
a time and keeps it in registers. The residual's sum is no part of them: XLA adds it in the product before the norm.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, pl, plgpu

_THREADS = 128


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, interpret: Any = False) -> jax.Array:
    """Of [T, D], as reference_rope_write.rms_norm rounds."""
    num_rows, width = x.shape
    return pl.kernel(
        functools.partial(_rms_norm, width, eps),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        mesh=plgpu.Mesh(grid=(num_rows,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="rms_norm",
    )(x, weight)


def silu_and_mul(gate_up: jax.Array, *, interpret: Any = False) -> jax.Array:
    """silu(gate) * up of [T, 2, F]."""
    num_rows, _, width = gate_up.shape
    return pl.kernel(
        functools.partial(_silu_and_mul, width),
        out_type=jax.ShapeDtypeStruct((num_rows, width), gate_up.dtype),
        mesh=plgpu.Mesh(grid=(num_rows,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="silu_and_mul",
    )(gate_up)


def _layout(width: int) -> Any:
    vector = next(v for v in (8, 4, 2, 1) if width % (v * _THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((width,), vector)


def _load(ref: Ref, width: int) -> jax.Array:
    return plgpu.load(ref, layout=_layout(width), optimized=False)


def _rms_norm(width: int, eps: float, x_ref: Ref, weight_ref: Ref, out_ref: Ref) -> None:
    row = lax.axis_index("row")
    dtype = x_ref.dtype
    wide = _load(x_ref.at[row], width).astype(jnp.float32)
    weight = _load(weight_ref, width).astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1.0 / width) + eps)
    out_ref.at[row][...] = ((wide * factor).astype(dtype).astype(jnp.float32) * weight).astype(dtype)


def _silu_and_mul(width: int, gate_up_ref: Ref, out_ref: Ref) -> None:
    row = lax.axis_index("row")
    gate, up = (_load(gate_up_ref.at[row, i], width).astype(jnp.float32) for i in range(2))
    out_ref.at[row][...] = (gate / (1.0 + jnp.exp(-gate)) * up).astype(out_ref.dtype)
