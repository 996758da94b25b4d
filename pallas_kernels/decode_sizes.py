"""The static sizes of a decode kernel, and where its items, tiles and query heads lie.

Letters: N query heads  K kv heads  H head_dim  G = N / K
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import ATOM, PRODUCT_ROWS, AttentionSizes, div
from pallas_kernels.tuning import DecodeConfig

# Elements of the accumulated O^T with merged qkv, all columns of the window. With twice as many, heads of 256 over an
# 8-bit cache spill registers.
_MAX_MERGED_SIZE = 16 * 128


@dataclass(frozen=True)
class MergedQKV:
    """That a decode kernel takes the merged qkv and not q, and how it norms: see decode_newest."""

    eps: float = 0.0
    unit_offset: bool = False


@dataclass(frozen=True)
class DecodeSizes(AttentionSizes):
    """What a decode kernel is compiled for."""

    config: DecodeConfig
    num_rows: int
    num_heads: int
    merged: MergedQKV | None = None  # None: q is rotated, and the cache has the newest keys

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
        """Rows an item of the operand with q: with its key and value, or padded where groups do not fit into atoms."""
        if self.merged is not None:
            return self.group + 2
        return self.group if ATOM % self.group == 0 else round_up(self.group, ATOM)

    @property
    def columns(self) -> int:
        """Columns of the products, an item's window of rows; those beyond the group are not stored."""
        return window_rows(self.q_rows)

    @property
    def parts(self) -> int:
        """64-row parts of O^T."""
        return self.head_dim // PRODUCT_ROWS

    def first_tile(self, length: jax.Array) -> jax.Array | int:
        """The first tile with a visible key."""
        if self.sliding_window is None:
            return 0
        return div(jnp.maximum(length - self.sliding_window, 0), self.config.tile)

    def num_tiles(self, length: jax.Array) -> jax.Array:
        """Tiles with visible keys; one for a row without keys, so that it is an item."""
        return jnp.maximum(div(length + (self.config.tile - 1), self.config.tile), 1) - self.first_tile(length)

    def num_seen(self, length: jax.Array) -> jax.Array:
        """Keys that the query sees in the cache, without a window: all, or all but the newest."""
        return length if self.merged is None else length - 1

    def first_q_row(self, item: jax.Array) -> jax.Array:
        """Where the item's window of rows starts: a multiple of ATOM, and so that it ends within the operand."""
        last = max(round_up(self.num_rows * self.num_kv_heads * self.q_rows, ATOM) - self.columns, 0)
        return jnp.minimum(div(item * self.q_rows, ATOM) * ATOM, last)

    def first_column(self, item: jax.Array) -> jax.Array | int:
        """Where the item's group lies among its columns."""
        return 0 if self.q_rows % ATOM == 0 else item * self.q_rows - self.first_q_row(item)

    def sinks_by_column(self, sinks: jax.Array) -> jax.Array:
        """f32[N] -> f32[K * columns, columns], for each kv head and each first column of its group; see sink_row."""
        column = jnp.arange(self.columns)
        head = jnp.clip(column - column[:, None], 0, self.group - 1)
        return sinks.reshape(self.num_kv_heads, self.group)[:, head].reshape(-1, self.columns)

    def sink_row(self, item: jax.Array) -> jax.Array:
        """The row of sinks_by_column with the sinks of the item's columns."""
        return lax.rem(item, jnp.int32(self.num_kv_heads)) * self.columns + self.first_column(item)


def round_up(rows: int, unit: int) -> int:
    """The next multiple of unit."""
    return -(-rows // unit) * unit


def window_rows(q_rows: int) -> int:
    """Rows of a window that starts at a multiple of ATOM and has any item's rows, q_rows each and without gaps."""
    return round_up(ATOM - math.gcd(q_rows, ATOM) + q_rows, ATOM)


def takes_merged_qkv(group: int, head_dim: int) -> bool:
    """Whether the decode kernel can take heads merged as rope_and_write_kv gets them."""
    return window_rows(group + 2) * max(head_dim, 128) <= _MAX_MERGED_SIZE
