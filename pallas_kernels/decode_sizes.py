"""The static sizes of a decode kernel, and where its items, tiles and query heads lie.

Letters: N query heads  K kv heads  H head_dim  G = N / K
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import ATOM, AttentionSizes, div
from pallas_kernels.tuning import DecodeConfig


@dataclass(frozen=True)
class DecodeSizes(AttentionSizes):
    """What a decode kernel is compiled for."""

    num_rows: int
    num_heads: int
    config: DecodeConfig

    @property
    def on_card(self) -> bool:
        """Whether the compiled kernel is meant and not the interpreter, which knows less."""
        return self.config.merge == "atomic"

    @property
    def product_dtype(self) -> Any:
        """Of the products' operands. 8-bit keys and values are exact in float16, and that is what hardware gives."""
        return jnp.float16 if self.is_narrow else self.dtype

    @property
    def q_rows(self) -> int:
        """Rows of q an item: the group, padded where groups do not fit into swizzle atoms."""
        return self.group if ATOM % self.group == 0 else -(-self.group // ATOM) * ATOM

    @property
    def columns(self) -> int:
        """Columns of the products; those beyond the group are other heads' or padding, and are not stored."""
        return max(ATOM, self.q_rows)

    @property
    def parts(self) -> int:
        """64-row parts of O^T."""
        return self.head_dim // 64

    @property
    def blocks_per_tile(self) -> int:
        """KV cache blocks of a key tile."""
        return self.config.tile // self.block_size

    def first_tile(self, length: jax.Array) -> jax.Array | int:
        """The first tile with a visible key."""
        if self.sliding_window is None:
            return 0
        return div(jnp.maximum(length - self.sliding_window, 0), self.config.tile)

    def num_tiles(self, length: jax.Array) -> jax.Array:
        """Tiles with visible keys; one for a row without keys, so that it is an item."""
        return jnp.maximum(div(length + (self.config.tile - 1), self.config.tile), 1) - self.first_tile(length)

    def first_column(self, item: jax.Array) -> jax.Array | int:
        """Where the item's group lies among its columns."""
        return lax.rem(item * self.group, jnp.int32(ATOM)) if self.q_rows < ATOM else 0

    def first_q_row(self, item: jax.Array) -> jax.Array:
        """The row of q of the item's first column."""
        row = item * self.q_rows
        return div(row, ATOM) * ATOM if self.q_rows < ATOM else row

    def sinks_by_column(self, sinks: jax.Array) -> jax.Array:
        """f32[N] -> f32[groups of columns, columns]; see sink_row."""
        if self.q_rows != self.group:
            sinks = jnp.pad(sinks.reshape(-1, self.group), ((0, 0), (0, self.q_rows - self.group)))
        repeats = 1 if self.q_rows >= ATOM else ATOM // math.gcd(self.num_heads, ATOM)
        return jnp.tile(sinks.reshape(-1), repeats).reshape(-1, self.columns)

    def sink_row(self, item: jax.Array) -> jax.Array:
        """The row of sinks_by_column with the sinks of the item's columns."""
        if self.q_rows >= ATOM:
            return lax.rem(item, jnp.int32(self.num_kv_heads))
        period = self.num_heads // math.gcd(self.num_heads, ATOM)
        return lax.rem(div(item * self.q_rows, ATOM), jnp.int32(period))
