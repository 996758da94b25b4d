"""What the device remembers between steps, one row a request: block table, last token, sampling record."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from scheduler.batch import BatchLimits
from scheduler.records import RECORD_WIDTH


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class DeviceState:
    """Persistent rows, donated to every step. Row numbers are those of scheduler.batch.Batch.

    A row is rewritten in full when a request is admitted, so nothing of the request before survives.
    """

    block_tables: jax.Array  # i32[max_num_seqs, max_blocks] unused entries 0, the null block
    last_tokens: jax.Array  # i32[max_num_seqs] the token sampled last, input of the next decode step
    records: jax.Array  # i32[max_num_seqs, RECORD_WIDTH] see scheduler.records
    grammar_masks: jax.Array  # i32[max_num_seqs, mask_words] bit b of word w: token 32 * w + b may come next

    @staticmethod
    def shapes(limits: BatchLimits, sharding: Sharding | None = None) -> "DeviceState":
        """The same tree with ShapeDtypeStructs as leaves."""
        rows = limits.max_num_seqs
        shapes = ((rows, limits.max_blocks), (rows,), (rows, RECORD_WIDTH), (rows, limits.mask_words))
        return DeviceState(*(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in shapes))  # pyright: ignore[reportArgumentType]

    @staticmethod
    def zeros(limits: BatchLimits, sharding: Sharding | None = None) -> "DeviceState":
        """All rows empty."""
        shapes = DeviceState.shapes(limits)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), shapes)

    def admit(self, admits: jax.Array) -> "DeviceState":
        """Rewrite rows in full.

        Args:
          admits: i32[A, admit_width] row, record, block table; a row number of max_num_seqs is a pad and dropped.
        """
        rows = admits[:, 0]
        return replace(
            self,
            block_tables=self.block_tables.at[rows].set(admits[:, 1 + RECORD_WIDTH :], mode="drop"),
            last_tokens=self.last_tokens.at[rows].set(0, mode="drop"),
            records=self.records.at[rows].set(admits[:, 1 : 1 + RECORD_WIDTH], mode="drop"),
        )

    def write_masks(self, writes: jax.Array) -> "DeviceState":
        """Rewrite rows of grammar_masks; a row without a grammar has an old mask, which does not count.

        Args:
          writes: i32[A, 1 + mask_words] row, mask; a row number of max_num_seqs is a pad and dropped.
        """
        return replace(self, grammar_masks=self.grammar_masks.at[writes[:, 0]].set(writes[:, 1:], mode="drop"))

    def append_blocks(self, appends: jax.Array) -> "DeviceState":
        """Enter new blocks into block tables.

        Args:
          appends: i32[A, 3] row, index in the table, block id; a row number of max_num_seqs is a pad and dropped.
        """
        tables = self.block_tables.at[appends[:, 0], appends[:, 1]].set(appends[:, 2], mode="drop")
        return replace(self, block_tables=tables)

    def store_tokens(self, rows: jax.Array, token_ids: jax.Array, is_sampled: jax.Array) -> "DeviceState":
        """Remember the tokens of the rows that sampled one; all arguments are [R]."""
        targets = jnp.where(is_sampled, rows, self.last_tokens.shape[0])
        return replace(self, last_tokens=self.last_tokens.at[targets].set(token_ids, mode="drop"))
