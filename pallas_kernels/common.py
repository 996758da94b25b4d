"""What the Mosaic GPU kernels share."""

import math
from typing import Any

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
