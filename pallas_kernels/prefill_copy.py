"""The copying side of the prefill kernel: which query tiles a CTA has, and who brings their data to shared memory.

Letters: T tokens  N query heads  K kv heads  H head_dim  G = N / K
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import AttentionSizes, Ref, div, pl, plgpu, widened
from pallas_kernels.tuning import PrefillConfig
from pallas_kernels.work_lists import tokens_per_warpgroup


@dataclass(frozen=True)
class PrefillSizes(AttentionSizes):
    """What a prefill kernel is compiled for. With an 8-bit cache a warpgroup of its own widens the tiles."""

    config: PrefillConfig

    @property
    def is_interpreted(self) -> bool:
        """Whether this is for the interpreter, which knows neither register operands nor assembly."""
        return not self.config.p_in_registers

    @property
    def q_in_registers(self) -> bool:
        """Whether the first product reads q from registers. With heads of 256 there are none left."""
        return not self.is_interpreted and self.head_dim <= 128

    @property
    def tokens(self) -> int:
        """Query tokens of a warpgroup."""
        return tokens_per_warpgroup(self.group)

    @property
    def blocks_per_tile(self) -> int:
        """KV cache blocks of a key tile."""
        return self.config.tile // self.block_size

    def first_step(self, query: "QueryTile") -> jax.Array | int:
        """The first key tile that a token of the query tile sees."""
        if self.sliding_window is None:
            return 0
        return div(jnp.maximum(query.position + 1 - self.sliding_window, 0), self.config.tile)

    def end_step(self, query: "QueryTile") -> jax.Array:
        """One past the last key tile that a token of the query tile sees."""
        return div(query.num_keys + (self.config.tile - 1), self.config.tile)

    def num_steps(self, query: "QueryTile") -> jax.Array:
        """Key tiles of a query tile."""
        return self.end_step(query) - self.first_step(query)


@dataclass(frozen=True)
class PrefillInputs:
    """The kernel's operands in global memory."""

    q: Ref  # [T, N, H]
    kv_cache: Ref
    block_tables: Ref
    layer: Ref
    tiles: Ref
    num_tiles: Ref
    out: Ref
    sinks: Ref = None
    kv_scale: Ref = None


@dataclass(frozen=True)
class PrefillScratch:
    """Shared memory and barriers of one CTA."""

    q_in: Ref  # q as it arrives: any token offset works unswizzled
    q: Ref  # q as the products read it, where it does not fit registers
    o: Ref
    k: Ref  # the rings that the products read
    v: Ref
    k_narrow: Ref  # what arrives, where the cache has 8 bits
    v_narrow: Ref
    p: Ref
    q_full: Ref
    q_free: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref
    k_narrow_full: Ref
    v_narrow_full: Ref
    k_narrow_free: Ref
    v_narrow_free: Ref
    v_zeroed: Ref  # values that nobody sees are zeroed


@dataclass(frozen=True)
class QueryTile:
    """A few tokens of one request, for one kv head."""

    head: jax.Array
    row: jax.Array
    token: jax.Array  # first one, in the step
    position: jax.Array  # of the first one, in its request
    num_tokens: jax.Array
    num_keys: jax.Array  # that its last token sees


def num_rounds(sizes: PrefillSizes, num_tiles_ref: Ref) -> jax.Array:
    """Query tiles of this CTA. They are dealt to and fro, since the longest come first: 0 1 2, 2 1 0, 0 1 2, ..."""
    num_items = num_tiles_ref[0] * sizes.num_kv_heads
    num_ctas = sizes.config.num_ctas
    rounds = div(num_items + (num_ctas - 1), num_ctas)
    return jnp.where(_item_of(sizes, rounds - 1) < num_items, rounds, jnp.maximum(rounds - 1, 0))


def _item_of(sizes: PrefillSizes, r: jax.Array) -> jax.Array:
    cta, num_ctas = lax.axis_index("cta"), sizes.config.num_ctas
    is_back = lax.rem(r, jnp.int32(2)) == 1
    return r * num_ctas + jnp.where(is_back, num_ctas - 1 - cta, cta)


def query_tile(sizes: PrefillSizes, tiles_ref: Ref, r: jax.Array) -> QueryTile:
    """The CTA's r-th query tile, read from the work list."""
    item = _item_of(sizes, r)
    tile = div(item, sizes.num_kv_heads)
    row, token, position, num_tokens = (tiles_ref[field, tile] for field in range(4))
    return QueryTile(item - tile * sizes.num_kv_heads, row, token, position, num_tokens, num_keys=position + num_tokens)


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

            _load_tokens(sizes, query, warpgroup, inputs.q, scratch.q_in.at[warpgroup], scratch.q_full.at[warpgroup])

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


def by_token(sizes: PrefillSizes, rows: Ref) -> Ref:
    """[64, H] -> [tokens, G, H]. With 3 or 7 heads a group the last of the 64 rows is left over."""
    used = sizes.tokens * sizes.group
    return rows.at[pl.ds(0, used)].reshape(sizes.tokens, sizes.group, sizes.head_dim)


def _load_tokens(sizes: PrefillSizes, query: QueryTile, warpgroup: int, q_ref: Ref, q_in: Ref, q_full: Ref) -> None:
    """Read the warpgroup's tokens. Those past the query tile are other requests', or padding, and come to nothing."""
    token = query.token + warpgroup * sizes.tokens
    heads = pl.ds(query.head * sizes.group, sizes.group)
    if sizes.config.copy_whole_tiles:
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(token, sizes.tokens), heads], by_token(sizes, q_in), q_full)
        return

    def load(t: jax.Array, _: None) -> None:
        source = q_ref.at[jnp.minimum(token + t, sizes.num_tokens - 1), heads]
        plgpu.copy_gmem_to_smem(source, q_in.at[pl.ds(t * sizes.group, sizes.group)], q_full)

    lax.fori_loop(0, sizes.tokens, load, None)


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
