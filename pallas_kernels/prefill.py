"""Prefill attention over the paged cache: many query tokens a request (Pallas Mosaic GPU, compute capability 9.0).

Persistent CTAs take query tiles of one request and one kv head (work_lists.PrefillWork), the longest context first. A
row of a tile is one query head of one token: 64 // G tokens of G heads for each of two computing warpgroups, which
share the K and V tiles. A warp copies and runs ahead across query tiles. q and o keep their [T, N, H] layout: a tile
arrives by one copy a warpgroup and leaves the same way, or token by token where a request ends within it.

Letters: T tokens  R rows  N query heads  K kv heads  H head_dim  G = N / K
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, kernel, pl, plgpu, swizzled_smem
from pallas_kernels.layer_slice import LayerArray, as_stack
from pallas_kernels.prefill_copy import copy_tiles, widen_tiles
from pallas_kernels.prefill_rows import copies_of_rows, copy_rows_out, load_rows, rows_smem, store_rows
from pallas_kernels.prefill_sizes import PrefillInputs, PrefillScratch, PrefillSizes, num_rounds, query_tile
from pallas_kernels.prefill_tiles import Part, attend_tiles
from pallas_kernels.tuning import PrefillConfig
from pallas_kernels.work_lists import ROWS_PER_WARPGROUP, PrefillWork

# Registers a thread of computing, copying and widening warpgroups, by how many compute and whether one widens. They
# have to fit what the launch allocates, a multiple of 8 for each thread: 168 with three warpgroups. Otherwise one of
# them waits for ever.
REGISTERS = {
    (2, False): (240, 24, 0),
    (2, True): (216, 24, 56),
    (1, False): (248, 64, 0),
    (1, True): (248, 64, 96),
}


def paged_prefill(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    out: jax.Array,
    work: PrefillWork,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    config: PrefillConfig,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of the prefill tokens, into an array that holds the others' results.

    Args:
      q: bf16 or f16[T, N, H].
      kv_cache: [L, num_blocks, 2, K, block_size, H] of q's dtype, or float8_e4m3fn; holds the keys and values of these
        tokens already.
      layer: i32[].
      block_tables: i32[R, max_blocks].
      out: like q; consumed, and written in place where nothing else reads it.
      work: from make_prefill_work with the same config.
      scale: factor of the scores.
      sliding_window, soft_cap, sinks, kv_scale: as in ops.paged_attention.
      config: static.
      interpret: for the CPU interpreter.

    Returns:
      out with the tokens of the work's tiles replaced, and no others.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    group = num_heads // num_kv_heads
    sizes = PrefillSizes(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        dtype=q.dtype,
        cache_dtype=kv_cache.dtype,
        config=config,
    )
    # A copy is never longer than the array it reads.
    q = jnp.pad(q, ((0, max(sizes.tokens - num_tokens, 0)), (0, 0), (0, 0)))
    operands = [q, kv_cache, block_tables, layer.reshape(1), work.tiles, work.num_tiles]
    if sinks is not None:  # of each row of a tile
        heads = jnp.arange(ROWS_PER_WARPGROUP) % group
        operands.append(sinks.reshape(num_kv_heads, group)[:, heads])
    operands += [] if kv_scale is None else [as_stack(kv_scale, layer)]
    out_ref = jax.new_ref(out, memory_space=plgpu.GMEM)
    num_threads = config.warpgroups + (2 if sizes.is_narrow else 1)
    kernel(
        functools.partial(_attend, sizes),
        out_type=(),
        mesh=plgpu.Mesh(grid=(config.num_ctas,), grid_names=("cta",), num_threads=num_threads, thread_name="warpgroup"),
        interpret=interpret,
        name="paged_prefill",
    )(*operands, out_ref)
    return jax.freeze(out_ref)


def _attend(sizes: PrefillSizes, *refs: Ref) -> None:
    """The body of the kernel; scratch first, then one branch a warpgroup."""
    config = sizes.config
    operands, out_ref = list(refs[:-1]), refs[-1]
    kv_scale = operands.pop() if sizes.is_narrow else None
    sinks = operands.pop() if sizes.has_sinks else None
    inputs = PrefillInputs(*operands, out=out_ref, sinks=sinks, kv_scale=kv_scale)
    compute_registers, copy_registers, widen_registers = REGISTERS[config.warpgroups, sizes.is_narrow]

    def scoped(*buffers: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")
        scratch = PrefillScratch(*buffers)

        @pl.when(warpgroup < config.warpgroups)
        def _():
            plgpu.set_max_registers(compute_registers, action="increase")
            # Known where there is one: addresses that depend on it take registers, and heads of 256 leave none.
            _compute(sizes, inputs, scratch, warpgroup if config.warpgroups > 1 else 0)

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(copy_registers, action="decrease")
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: copy_tiles(sizes, inputs, scratch)))

        if sizes.is_narrow:

            @pl.when(warpgroup == config.warpgroups + 1)
            def _():
                plgpu.set_max_registers(widen_registers, action="decrease")
                widen_tiles(sizes, inputs, scratch)

    pl.run_scoped(scoped, *_scratch_types(sizes), collective_axes="warpgroup")


def _scratch_types(sizes: PrefillSizes) -> tuple[Any, ...]:
    """The fields of PrefillScratch."""
    config, head_dim, dtype = sizes.config, sizes.head_dim, sizes.dtype
    warpgroups, rows, stages = config.warpgroups, ROWS_PER_WARPGROUP, config.stages
    ring = swizzled_smem(stages, config.tile, head_dim, dtype=dtype)
    narrow_ring = swizzled_smem(stages, config.tile, head_dim, dtype=sizes.cache_dtype) if sizes.is_narrow else None
    arrived = plgpu.Barrier(num_arrivals=sizes.blocks_per_tile, num_barriers=stages)
    widened = plgpu.Barrier(num_barriers=stages)
    filled = widened if sizes.is_narrow else arrived
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    return (
        rows_smem(sizes),
        None if sizes.q_in_registers else swizzled_smem(warpgroups, rows, head_dim, dtype=dtype),
        rows_smem(sizes),
        ring,
        ring,
        narrow_ring,
        narrow_ring,
        None if config.p_in_registers else swizzled_smem(warpgroups, rows, config.tile, dtype=dtype),
        plgpu.Barrier(num_arrivals=copies_of_rows(sizes), num_barriers=warpgroups),
        plgpu.Barrier(num_barriers=warpgroups),
        filled,
        filled,
        free,
        free,
        arrived if sizes.is_narrow else None,
        arrived if sizes.is_narrow else None,
        widened if sizes.is_narrow else None,
        widened if sizes.is_narrow else None,
        plgpu.Barrier(num_arrivals=warpgroups),
    )


def _compute(sizes: PrefillSizes, inputs: PrefillInputs, scratch: PrefillScratch, warpgroup: jax.Array | int) -> None:
    """One of the computing warpgroups: its share of every query tile."""
    q_in, o_smem = scratch.q_in.at[warpgroup], scratch.o.at[warpgroup]

    def query_body(r: jax.Array, done: jax.Array) -> jax.Array:
        query = query_tile(sizes, inputs.tiles, r)
        plgpu.barrier_wait(scratch.q_full.at[warpgroup])
        q = load_rows(sizes, q_in)
        if not sizes.q_in_registers:
            q_smem = scratch.q.at[warpgroup]
            for first in range(0, sizes.head_dim, 64):  # the columns of a swizzled tile: few addresses
                q_smem.at[:, pl.ds(first, 64)][...] = q[:, first : first + 64]
            plgpu.commit_smem()
            q = q_smem
        out = attend_tiles(Part(sizes, inputs, scratch, query, warpgroup, q, done))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_rows(sizes, out.astype(sizes.dtype), o_smem)
        plgpu.commit_smem()
        copy_rows_out(sizes, query, warpgroup, o_smem, inputs.out)
        return done + sizes.num_steps(query)

    lax.fori_loop(0, num_rounds(sizes, inputs.num_tiles), query_body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
