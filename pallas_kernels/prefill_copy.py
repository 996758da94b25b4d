"""The copying side of the prefill kernel: who brings queries, keys and values to shared memory."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, div, pl, plgpu, widened
from pallas_kernels.prefill_rows import copy_rows_in
from pallas_kernels.prefill_sizes import PrefillInputs, PrefillScratch, PrefillSizes, QueryTile, num_rounds, query_tile


def copy_tiles(sizes: PrefillSizes, inputs: PrefillInputs, scratch: PrefillScratch) -> None:
    """One warp: each query tile's q and all K and V tiles that it sees, as buffers become free."""
    k_ring, v_ring = (scratch.k, scratch.k_full, scratch.k_free), (scratch.v, scratch.v_full, scratch.v_free)
    if sizes.is_narrow:
        k_ring = scratch.k_narrow, scratch.k_narrow_full, scratch.k_narrow_free
        v_ring = scratch.v_narrow, scratch.v_narrow_full, scratch.v_narrow_free
    rings = (k_ring, v_ring)
    config, block_size, per_tile = sizes.config, sizes.block_size, sizes.blocks_per_tile
    stages = jnp.int32(config.stages)
    layer = inputs.layer[0]
    rounds = num_rounds(sizes, inputs.num_tiles)

    def blocks_of(query: QueryTile, i: jax.Array) -> tuple[jax.Array, ...]:
        # Never past the last block that the tile sees: what the table holds there is not its own.
        last = div(query.num_keys - 1, block_size)
        return tuple(inputs.block_tables[query.row, jnp.minimum(i * per_tile + j, last)] for j in range(per_tile))

    def copy_q(query: QueryTile, r: jax.Array) -> None:
        for warpgroup in range(config.warpgroups):

            @pl.when(r > 0)
            def _(warpgroup: int = warpgroup):
                plgpu.barrier_wait(scratch.q_free.at[warpgroup])

            copy_rows_in(sizes, query, warpgroup, inputs.q, scratch.q_in.at[warpgroup], scratch.q_full.at[warpgroup])

    def query_body(r: jax.Array, copied: jax.Array) -> jax.Array:
        query = query_tile(sizes, inputs.tiles, r)
        first_step = sizes.first_step(query)
        copy_q(query, r)

        def copy_tile(i: jax.Array, blocks: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            done = copied + i - first_step
            slot = lax.rem(done, stages)
            next_blocks = blocks_of(query, i + 1)  # before anything is waited for: they come from device memory
            for kv, (smem, filled, free) in enumerate(rings):

                @pl.when(done >= stages)
                def _(free: Ref = free):
                    plgpu.barrier_wait(free.at[slot])

                for j in range(per_tile):
                    rows = pl.ds(j * block_size, block_size)
                    source = inputs.kv_cache.at[layer, blocks[j], kv, query.head]
                    plgpu.copy_gmem_to_smem(source, smem.at[slot, rows], filled.at[slot])
            return next_blocks

        lax.fori_loop(first_step, sizes.end_step(query), copy_tile, blocks_of(query, jnp.int32(first_step)))
        return copied + sizes.num_steps(query)

    copied = lax.fori_loop(0, rounds, query_body, jnp.int32(0))

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(i: jax.Array, _: None) -> None:
        for _, _, free in rings:
            plgpu.barrier_wait(free.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(copied - stages, 0), copied, drain, None)

    @pl.when(rounds > 0)
    def _():
        for warpgroup in range(config.warpgroups):
            plgpu.barrier_wait(scratch.q_free.at[warpgroup])


def widen_tiles(sizes: PrefillSizes, inputs: PrefillInputs, scratch: PrefillScratch) -> None:
    """One warpgroup: 8-bit tiles as they arrive, into the rings that the products read."""
    stages = jnp.int32(sizes.config.stages)

    def widen(done: jax.Array, narrow: Ref, arrived: Ref, taken: Ref, wide: Ref, filled: Ref, free: Ref) -> None:
        slot = lax.rem(done, stages)
        plgpu.barrier_wait(arrived.at[slot])
        pl.when(done >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        for part in range(0, sizes.config.tile, 64):
            wide[slot, pl.ds(part, 64)] = widened(narrow.at[slot, pl.ds(part, 64)], sizes.dtype)
        plgpu.barrier_arrive(taken.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(filled.at[slot])

    def widen_tile(done: jax.Array, _: None) -> None:
        s = scratch
        widen(done, s.k_narrow, s.k_narrow_full, s.k_narrow_free, s.k, s.k_full, s.k_free)
        widen(done, s.v_narrow, s.v_narrow_full, s.v_narrow_free, s.v, s.v_full, s.v_free)

    def count(r: jax.Array, total: jax.Array) -> jax.Array:
        return total + sizes.num_steps(query_tile(sizes, inputs.tiles, r))

    total = lax.fori_loop(0, num_rounds(sizes, inputs.num_tiles), count, jnp.int32(0))
    lax.fori_loop(0, total, widen_tile, None)

    def drain(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(scratch.k_free.at[lax.rem(i, stages)])
        plgpu.barrier_wait(scratch.v_free.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(total - stages, 0), total, drain, None)
