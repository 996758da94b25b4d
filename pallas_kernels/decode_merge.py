"""Where results of decode items go: straight to the output, or merged from the partial results of several CTAs.

Letters: N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import (
    ATOM,
    LOG2E,
    MIN_SCORE,
    PRODUCT_ROWS,
    Ref,
    across_rows,
    div,
    full,
    one_thread,
    pl,
    plgpu,
)
from pallas_kernels.decode_sizes import DecodeSizes

_WGMMA = plgpu.Layout.WGMMA


def store_item(
    sizes: DecodeSizes, outs: list[jax.Array], lse: Any, item: jax.Array, sinks_ref: Ref, o_smem: Ref, out_ref: Ref
) -> None:
    """Write the group's rows of O.

    Args:
      outs: normalised O^T, f32[64, columns] parts.
      lse: base-2 log-sum-exp of each column's scores, f32[columns]; read only with sinks.
      sinks_ref: of DecodeSizes.sinks_by_column, or None. A sink adds to the sum of the weights and to nothing else.
    """
    if sinks_ref is not None:
        sink = plgpu.load(sinks_ref.at[sizes.sink_row(item)], layout=_WGMMA.reduce(0), optimized=False)
        share = 1.0 / (1.0 + jnp.exp2(sink * LOG2E - lse))
        outs = [out * across_rows(share, out) for out in outs]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, out in enumerate(outs):
        o_smem.at[:, pl.ds(part * PRODUCT_ROWS, PRODUCT_ROWS)].transpose((1, 0))[...] = out.astype(sizes.dtype)
    plgpu.commit_smem()
    rows = pl.ds(sizes.first_column(item), sizes.group)
    plgpu.copy_smem_to_gmem(o_smem.at[rows], out_ref.at[pl.ds(item * sizes.group, sizes.group)])


def store_zeros(sizes: DecodeSizes, num_tokens: jax.Array, o_smem: Ref, out_ref: Ref) -> None:
    """Zero the pad tokens [num_tokens, T), shared among the CTAs."""
    heads = max(n for n in range(1, sizes.columns + 1) if sizes.num_heads % n == 0)
    for part in range(sizes.parts):
        zeros = full((PRODUCT_ROWS, sizes.columns), 0.0, _WGMMA).astype(sizes.dtype)
        o_smem.at[:, pl.ds(part * PRODUCT_ROWS, PRODUCT_ROWS)].transpose((1, 0))[...] = zeros
    plgpu.commit_smem()
    first = num_tokens + lax.axis_index("cta")
    num_ctas = sizes.config.num_ctas

    def store(i: jax.Array, _: None) -> None:
        row = (first + i * num_ctas) * sizes.num_heads
        for j in range(0, sizes.num_heads, heads):
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, heads)], out_ref.at[pl.ds(row + j, heads)])

    mine = div(jnp.maximum(sizes.num_tokens - first + (num_ctas - 1), 0), num_ctas)
    lax.fori_loop(0, mine, store, None)


def merge_item(
    sizes: DecodeSizes,
    item: jax.Array,
    first: jax.Array,
    last: jax.Array,
    partials_ref: Ref,
    sinks_ref: Ref,
    o_smem: Ref,
    out_ref: Ref,
) -> None:
    """Combine the partial results of CTAs first..last, in this order, and write the item.

    A CTA has two places: an item that began before its stretch, 2 * cta, and one that begins in it, 2 * cta + 1.
    """
    unroll = 4 if sizes.columns == ATOM else 2  # loads in flight; 12 registers a thread for each at 8 columns
    parts = sizes.parts

    def body(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, weight, acc = carry
        ctas = [first + i * unroll + u for u in range(unroll)]
        inside = [jnp.where(cta <= last, 0.0, MIN_SCORE).astype(jnp.float32) for cta in ctas]
        ctas = [jnp.minimum(cta, last) for cta in ctas]
        slots = [2 * cta + jnp.where(cta == first, 1, 0) for cta in ctas]
        lses = [plgpu.load(partials_ref.at[slot, parts], layout=_WGMMA, optimized=False) for slot in slots]
        outs = [
            [plgpu.load(partials_ref.at[slot, p], layout=_WGMMA, optimized=False) for p in range(parts)]
            for slot in slots
        ]
        lses = [lse + bias for lse, bias in zip(lses, inside, strict=True)]
        new_highest = functools.reduce(jnp.maximum, lses, highest)
        rescale = jnp.exp2(highest - new_highest)
        weights = [jnp.exp2(lse - new_highest) for lse in lses]
        weight = functools.reduce(operator.add, weights, weight * rescale)
        acc = tuple(
            functools.reduce(operator.add, [w * out[p] for w, out in zip(weights, outs, strict=True)], a * rescale)
            for p, a in enumerate(acc)
        )
        return new_highest, weight, acc

    shape = (PRODUCT_ROWS, sizes.columns)
    zeros = tuple(full(shape, 0.0, _WGMMA) for _ in range(parts))
    start = (full(shape, MIN_SCORE, _WGMMA), full(shape, 0.0, _WGMMA), zeros)
    highest, weight, acc = lax.fori_loop(0, div(last - first + unroll, unroll), body, start)
    # All rows are equal; the maximum only brings them into the layout of a row.
    lse = (highest + jnp.log2(weight)).max(axis=0) if sizes.has_sinks else None
    store_item(sizes, [a / weight for a in acc], lse, item, sinks_ref, o_smem, out_ref)


def merge_kernel(sizes: DecodeSizes, lens_ref: Ref, starts_ref: Ref, partials_ref: Ref, *refs: Ref) -> None:
    """merge="kernel": CTA c merges the item that the end of stretch c cuts, if it began in stretch c."""

    *sinks, out_ref = refs
    sinks_ref = sinks[0] if sizes.has_sinks else None

    def scoped(o_smem: Ref) -> None:
        cta = lax.axis_index("cta")
        item, index = starts_ref[1, cta + 1], starts_ref[2, cta + 1]
        item_tile = starts_ref[0, cta + 1] - index

        @pl.when(jnp.logical_and(index > 0, item_tile >= starts_ref[0, cta]))
        def _():
            num_tiles = sizes.num_tiles(lens_ref[div(item, sizes.num_kv_heads)])
            last = div(item_tile + num_tiles - 1, starts_ref[3, cta])
            merge_item(sizes, item, cta, last, partials_ref, sinks_ref, o_smem, out_ref)

        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(scoped, plgpu.SMEM((sizes.columns, sizes.head_dim), sizes.dtype))


def arrive(arrivals_ref: Ref, flag_smem: Ref, index: jax.Array, others: jax.Array) -> jax.Array:
    """Tell the item's other CTAs that this one's partial result is stored. Not for the interpreter.

    All 128 threads call it. Adds 1 to arrivals_ref[index] with acquire and release at the scope of the GPU.

    Returns:
      i32[] 1 in the last of the others + 1 callers, which also sets the counter back to 0; else 0.
    """
    # Mosaic GPU has no fetch-and-add in Pallas yet; the dialect modules are private until it has.
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, memref
    from jax.experimental.mosaic import gpu as mgpu

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), splat, splat),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, splat),
    )
    def arrive(ctx: Any, counters: Any, flag: Any, index: Any, others: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        index, others = index.registers.item(), others.registers.item()
        zero = mgpu.utils.c(0, ir.IndexType.get())
        ptx = functools.partial(mgpu.utils.inline_ptx, has_side_effects=True)
        mgpu.utils.warpgroup_barrier()  # the stores of all 128 threads come before the release
        with one_thread("WARPGROUP"):
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(counters), [index], i32)
            before = ptx("atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", pointer, result_types=i32)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, before, others)
            ptx("st.global.u32 [$0], 0;", pointer, predicate=is_last)
            memref.store(arith.extui(i32, is_last), flag, [zero])
        mgpu.utils.warpgroup_barrier()
        result = memref.load(flag, [zero])
        mgpu.utils.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(result, (), is_signed=True)

    return arrive(arrivals_ref, flag_smem, index, others)
