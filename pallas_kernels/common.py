"""What the Mosaic GPU kernels share."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lazy

pl: Any = lazy.pl
plgpu: Any = lazy.plgpu

Ref = Any  # a reference to global or shared memory, or to barriers

# Of q, weights and products.
DTYPES = ("bfloat16", "float16")
# Of a warpgroup, the 128 threads that compute together.
WARPS, LANES = 4, 32
# Rows of a product by one instruction of a warpgroup.
PRODUCT_ROWS = 64
# Counters by which the CTAs of a kernel tell each other of their results: one for each item that decode cuts, or for
# each stage and group of units of products.
MAX_ARRIVALS = 256
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
      scale: factor of the scores.
      dtype: of q and of the result.
      config: how the work is cut; see the subclasses.
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
    config: Any

    @property
    def is_narrow(self) -> bool:
        """Whether keys and values are kept in 8 bits and widened on their way into the products."""
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def blocks_per_tile(self) -> int:
        """KV cache blocks of a key tile."""
        return self.config.tile // self.block_size


def kernel(
    body: Callable[..., None], *, name: str, out_type: Any, mesh: Any, interpret: bool, **compiler_params: Any
) -> Callable[..., Any]:
    """pl.kernel for the card, or for the CPU interpreter. approx_math holds unless compiler_params say otherwise."""
    compiler_params = {"approx_math": True, "lowering_semantics": plgpu.LoweringSemantics.Lane} | compiler_params
    return pl.kernel(
        body,
        name=name,
        out_type=out_type,
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(**compiler_params),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def zero_arrivals() -> jax.Array:
    """i32[MAX_ARRIVALS], zeros, which kernels leave as zeros: XLA makes one buffer a step of it, for all of them."""
    return jnp.zeros(MAX_ARRIVALS, jnp.int32)


def swizzled_smem(*shape: int, dtype: Any) -> Any:
    """Shared memory in the layout that wgmma reads: swizzled tiles of 8 rows of 128 bytes, or of a whole row."""
    row_bytes = min(128, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((ATOM, row_bytes // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row_bytes)))


def tiled_layout(*tiles: tuple[int, ...], warp_dims: tuple[Any, ...], lane_dims: tuple[int, ...]) -> Any:
    """A layout of registers over a warpgroup: `tiles` from large to small, the last dimension is one thread's vector.

    warp_dims and lane_dims count the dimensions of all tiles from the end, as in Mosaic's TiledLayout.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout  # slow: see lazy

    layout = TiledLayout(plgpu.Tiling(tiles), warp_dims, lane_dims, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def tanh(x: jax.Array, factor: Any) -> jax.Array:
    """tanh(x * factor). The exponential form is exact enough; tanh.approx has 11 bits."""
    return 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(x * (factor * (2 * LOG2E)))))


def capped(scores: jax.Array, cap: float, factor: Any = 1.0) -> jax.Array:
    """cap * tanh(scores * factor / cap), times log2(e)."""
    return tanh(scores, factor * (1.0 / cap)) * (cap * LOG2E)


@contextlib.contextmanager
def one_thread(of: Literal["WARP", "WARPGROUP"]) -> Iterator[None]:
    """Inside plgpu.inline_mgpu: what one thread alone does.

    Mosaic's single_thread keeps in a global variable that it was entered. Where two threads of the host lower kernels,
    one may find the other's note there and leave out its own condition: then all threads of the card do it.
    """
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import scf
    from jax.experimental.mosaic.gpu import utils

    branch: Any = scf.IfOp(utils.single_thread_predicate(utils.ThreadSubset[of]))
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.YieldOp([])


def div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """a // b of non-negative i32 scalars."""
    return lax.div(a, jnp.int32(b) if isinstance(b, int) else b)


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """f32 registers of one value in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def spread(x: jax.Array, shape: tuple[int, ...], dims: tuple[int, ...], layout: Any) -> jax.Array:
    """x as the dimensions `dims` of an array of `shape`, equal along the others, in registers of a layout."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, dims), layout)


def across_rows(row: jax.Array, like: jax.Array) -> jax.Array:
    """[columns] -> like.shape, [rows, columns] in the WGMMA layout."""
    return spread(row, like.shape, (1,), plgpu.Layout.WGMMA)


def across_columns(column: jax.Array, like: jax.Array) -> jax.Array:
    """[rows] -> like.shape, [rows, columns] in the WGMMA layout."""
    return spread(column, like.shape, (0,), plgpu.Layout.WGMMA)


def widened(narrow: Ref, dtype: Any) -> jax.Array:
    """[tile, H] of 8-bit numbers in shared memory, in registers as `dtype`, on their way back to shared memory.

    A thread has 8 neighbours: loads of 8 bytes, stores of 16.
    """
    values = plgpu.load(narrow, layout=_neighbours_layout(narrow.shape[1]), optimized=False)
    values = values.astype(jnp.float16)  # the conversion that the hardware has, and exact
    return values if dtype == jnp.float16 else values.astype(jnp.float32).astype(dtype)


def _neighbours_layout(head_dim: int) -> Any:
    """[tile, H] over a warpgroup: 8 neighbours a thread, the threads of a row side by side, so that no banks clash."""
    width = min(head_dim, 128)  # of a swizzled tile
    rows_of_warp = LANES * 8 // width
    tiles = (WARPS * rows_of_warp, width), (rows_of_warp, width), (1, 8)
    return tiled_layout(*tiles, warp_dims=(-6,), lane_dims=(-4, -3))
