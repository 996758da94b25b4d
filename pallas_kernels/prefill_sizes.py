"""What a prefill kernel is compiled for, what it works on, and which query tiles a CTA has.

Letters: T tokens  N query heads  K kv heads  H head_dim  G = N / K
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import AttentionSizes, Ref, div
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

    q: Ref  # [T, N, H], T at least the tokens of a warpgroup
    kv_cache: Ref  # [L, num_blocks, 2, K, block_size, H]
    block_tables: Ref  # i32[R, max_blocks]
    layer: Ref  # i32[1]
    tiles: Ref  # as in work_lists.PrefillWork, like the next one
    num_tiles: Ref
    out: Ref  # [T, N, H]
    sinks: Ref = None  # f32[K, 64] of each row of a tile
    kv_scale: Ref = None  # f32[L or 1, 2]


@dataclass(frozen=True)
class PrefillScratch:
    """Shared memory and barriers of one CTA, W computing warpgroups: a barrier a warpgroup, or a place of a ring."""

    q_in: Ref  # q as it arrives; see prefill_rows.rows_smem
    q: Ref  # [W, 64, H] q as the products read it, where it does not fit registers
    o: Ref  # the results, as q_in
    k: Ref  # [stages, tile, H] the rings that the products read
    v: Ref
    k_narrow: Ref  # [stages, tile, H] what arrives, where the cache has 8 bits
    v_narrow: Ref
    p: Ref  # [W, 64, tile] weights of the keys, for the interpreter
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
    v_zeroed: Ref  # one barrier: values that nobody sees are zeroed


@dataclass(frozen=True)
class QueryTile:
    """A few tokens of one request, for one kv head."""

    head: jax.Array  # kv head
    row: jax.Array  # of the request
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
