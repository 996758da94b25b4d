"""How a warpgroup's query rows come to its registers, and its results to global memory.

On the card both pass through shared memory by columns of 128 bytes, swizzled: a copy takes any box there, so that
[tokens, G, 64] lies as the rows of a swizzled tile. In plain rows of 256 bytes the 8 rows of an access share their
banks, which costs 1000 cycles a tile of 64 x 128 each way. The interpreter knows no reshaped references: there the
rows are plain, and each token is a copy.

Letters: T tokens  N query heads  H head_dim  G query heads of a kv head
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common import ATOM, Ref, pl, plgpu
from pallas_kernels.prefill_sizes import PrefillSizes, QueryTile
from pallas_kernels.work_lists import ROWS_PER_WARPGROUP

_WGMMA = plgpu.Layout.WGMMA
_SWIZZLE = plgpu.SwizzleTransform(128)
_COLUMNS = 64  # of 16 bits


def rows_smem(sizes: PrefillSizes) -> Any:
    """Room for the rows of each warpgroup."""
    rows, head_dim, warpgroups = ROWS_PER_WARPGROUP, sizes.head_dim, sizes.config.warpgroups
    if not sizes.config.copy_whole_tiles:
        return plgpu.SMEM((warpgroups, rows, head_dim), sizes.dtype)
    return plgpu.SMEM((warpgroups, head_dim // _COLUMNS, rows, _COLUMNS), sizes.dtype, transforms=(_SWIZZLE,))


def copies_of_rows(sizes: PrefillSizes) -> int:
    """Copies that bring a warpgroup's rows."""
    return sizes.head_dim // _COLUMNS if sizes.config.copy_whole_tiles else sizes.tokens


def copy_rows_in(sizes: PrefillSizes, query: QueryTile, warpgroup: int, q_ref: Ref, smem: Ref, arrived: Ref) -> None:
    """Begin to read the warpgroup's tokens. Those past the query tile are other requests' or padding, for nothing."""
    token = query.token + warpgroup * sizes.tokens
    heads = pl.ds(query.head * sizes.group, sizes.group)
    if sizes.config.copy_whole_tiles:
        for chunk in range(sizes.head_dim // _COLUMNS):
            source = q_ref.at[pl.ds(token, sizes.tokens), heads, _columns(chunk)]
            plgpu.copy_gmem_to_smem(source, _by_token(sizes, smem.at[chunk]), arrived)
        return

    def load(t: jax.Array, _: None) -> None:
        source = q_ref.at[jnp.minimum(token + t, sizes.num_tokens - 1), heads]
        plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(t * sizes.group, sizes.group)], arrived)

    lax.fori_loop(0, sizes.tokens, load, None)


def load_rows(sizes: PrefillSizes, smem: Ref) -> jax.Array:
    """[64, H] in the WGMMA layout."""
    if not sizes.config.copy_whole_tiles:
        return plgpu.load(smem, layout=_WGMMA, optimized=False)
    shape = (ROWS_PER_WARPGROUP, sizes.head_dim)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType((_SWIZZLE,)),), return_type=plgpu.ShapeDtypeStruct(shape, sizes.dtype, _WGMMA)
    )
    def load(ctx: Any, smem: Any) -> Any:
        from jax.experimental.mosaic import gpu as mgpu

        layout = _WGMMA.to_mgpu()
        chunks = [mgpu.FragmentedArray.load_tiled(chunk, 128, layout=layout) for chunk in _tiled_chunks(smem)]
        registers = np.concatenate([chunk.registers for chunk in chunks], axis=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(smem)


def store_rows(sizes: PrefillSizes, rows: jax.Array, smem: Ref) -> None:
    """Put [64, H] in the WGMMA layout into shared memory, for copy_rows_out."""
    if not sizes.config.copy_whole_tiles:
        smem[...] = rows
        return

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType((_SWIZZLE,))))
    def store(ctx: Any, rows: Any, smem: Any) -> None:
        for i, chunk in enumerate(_tiled_chunks(smem)):
            rows[:, i * _COLUMNS : (i + 1) * _COLUMNS].store_tiled(chunk, 128)

    store(rows, smem)


def copy_rows_out(sizes: PrefillSizes, query: QueryTile, warpgroup: jax.Array | int, smem: Ref, out_ref: Ref) -> None:
    """Begin to write the warpgroup's real tokens: all at once, or one by one where the request ends among them."""
    first = warpgroup * sizes.tokens
    token = query.token + first
    count = jnp.clip(query.num_tokens - first, 0, sizes.tokens)
    heads = pl.ds(query.head * sizes.group, sizes.group)
    by_columns = sizes.config.copy_whole_tiles
    chunks = range(sizes.head_dim // _COLUMNS if by_columns else 1)
    is_whole = jnp.logical_and(count == sizes.tokens, by_columns)
    if by_columns:

        @pl.when(is_whole)
        def _():
            for chunk in chunks:
                target = out_ref.at[pl.ds(token, sizes.tokens), heads, _columns(chunk)]
                plgpu.copy_smem_to_gmem(_by_token(sizes, smem.at[chunk]), target)

    @pl.when(jnp.logical_not(is_whole))
    def _():
        def store(t: jax.Array, _: None) -> None:
            rows = pl.ds(t * sizes.group, sizes.group)
            if not by_columns:
                plgpu.copy_smem_to_gmem(smem.at[rows], out_ref.at[token + t, heads])
                return
            for chunk in chunks:
                plgpu.copy_smem_to_gmem(smem.at[chunk, rows], out_ref.at[token + t, heads, _columns(chunk)])

        lax.fori_loop(0, count, store, None)


def _columns(chunk: int) -> Any:
    return pl.ds(chunk * _COLUMNS, _COLUMNS)


def _by_token(sizes: PrefillSizes, rows: Ref) -> Ref:
    """[64, columns] -> [tokens, G, columns]. With 3 or 7 heads a group the last of the 64 rows is left over."""
    used = sizes.tokens * sizes.group
    return rows.at[pl.ds(0, used)].reshape(sizes.tokens, sizes.group, _COLUMNS)


def _tiled_chunks(smem: Any) -> list[Any]:
    """[chunks, 64, 64] as Mosaic names a swizzled tile: atoms of 8 rows."""
    from jax.experimental.mosaic.gpu import utils

    tiled = (ROWS_PER_WARPGROUP // ATOM, 1, ATOM, _COLUMNS)
    num_chunks = smem.type.shape[0]
    return [utils.memref_reshape(utils.memref_slice(smem, i), tiled) for i in range(num_chunks)]
