"""What the device remembers between steps, one row a request: block table, tokens, sampling record, token lists."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxvllm.layers.layer_context import Attended
from scheduler.batch import BatchLimits
from scheduler.buckets import StepKind
from scheduler.records import RECORD_WIDTH
from scheduler.side_buffers import HISTORY_HEADER
from scheduler.token_lists import list_width


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class DeviceState:
    """Persistent rows, donated to every step. Row numbers are those of scheduler.batch.Batch.

    Block table and record are rewritten in full when a request is admitted. Of token_ids a row reads only positions
    that its own request has written: sampled tokens, and the tokens that the host sent if the sampler reads history.
    Of token_lists it reads what its record says is there.
    """

    block_tables: jax.Array  # i32[max_num_seqs, max_blocks] unused entries 0, the null block
    token_ids: jax.Array  # i32[max_num_seqs, max_model_len] by position; the last one is the next decode step's input
    records: jax.Array  # i32[max_num_seqs, RECORD_WIDTH] see scheduler.records
    token_lists: jax.Array  # i32[max_num_seqs, list_width] see scheduler.token_lists
    attended: Attended | None = None  # [largest T] of the last mixed step, for the logprobs programs; None: not kept

    @staticmethod
    def shapes(
        limits: BatchLimits, sharding: Sharding | None = None, attended: Attended | None = None
    ) -> "DeviceState":
        """The same tree with ShapeDtypeStructs as leaves, which those of `attended` are already."""
        rows = limits.max_num_seqs
        shapes = (
            (rows, limits.max_blocks),
            (rows, limits.max_model_len),
            (rows, RECORD_WIDTH),
            (rows, list_width(limits.num_processor_params)),
        )
        leaves = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in shapes]
        return DeviceState(*leaves, attended=attended)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def zeros(limits: BatchLimits, sharding: Sharding | None = None, attended: Attended | None = None) -> "DeviceState":
        """All rows empty; arguments as in `shapes`."""
        shapes = DeviceState.shapes(limits, sharding, attended)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)

    def of_step(self, kind: StepKind) -> "DeviceState":
        """What a step reads or writes. The other leaves are None: the host pays 2 to 3 us for each that passes."""
        is_unused = ("token_lists",) if kind == "mixed" else ("token_lists", "records", "attended")
        return replace(self, **dict.fromkeys(is_unused))

    def after_step(self, changed: "DeviceState") -> "DeviceState":
        """The whole again, with what a step made of its part."""
        leaves = {name: leaf for name, leaf in vars(changed).items() if leaf is not None}
        return replace(self, **leaves)

    def admit(self, admits: jax.Array) -> "DeviceState":
        """Rewrite rows.

        Args:
          admits: i32[A, admit_width] row, record, block table; a row number of max_num_seqs is a pad and dropped.
        """
        rows = admits[:, 0]
        return replace(
            self,
            block_tables=self.block_tables.at[rows].set(admits[:, 1 + RECORD_WIDTH :], mode="drop"),
            records=self.records.at[rows].set(admits[:, 1 : 1 + RECORD_WIDTH], mode="drop"),
        )

    def admit_lists(self, lists: jax.Array) -> "DeviceState":
        """Rewrite token lists.

        Args:
          lists: i32[A, 1 + list_width] row, token lists; a row number of max_num_seqs is a pad and dropped.
        """
        return replace(self, token_lists=self.token_lists.at[lists[:, 0]].set(lists[:, 1:], mode="drop"))

    def admit_history(self, pieces: jax.Array) -> "DeviceState":
        """Enter tokens that the host knows.

        Args:
          pieces: i32[A, HISTORY_HEADER + n] row, first position, number of tokens, tokens.
        """
        header = len(HISTORY_HEADER)
        rows, start, count = (pieces[:, i, None] for i in range(header))
        offset = jnp.arange(pieces.shape[1] - header)
        positions = jnp.where(offset < count, start + offset, self.token_ids.shape[1])
        return replace(self, token_ids=self.token_ids.at[rows, positions].set(pieces[:, header:], mode="drop"))

    def append_blocks(self, appends: jax.Array) -> "DeviceState":
        """Enter new blocks into block tables.

        Args:
          appends: i32[A, 3] row, index in the table, block id; a row number of max_num_seqs is a pad and dropped.
        """
        tables = self.block_tables.at[appends[:, 0], appends[:, 1]].set(appends[:, 2], mode="drop")
        return replace(self, block_tables=tables)

    def keep_attended(self, attended: Attended) -> "DeviceState":
        """Keep this of the T tokens of a step, if it is kept at all."""
        if self.attended is None:
            return self
        # Else XLA runs a product once more to have its result here as well.
        attended = jax.lax.optimization_barrier(attended)
        kept = jax.tree.map(lambda kept, new: kept.at[: len(new)].set(new), self.attended, attended)
        return replace(self, attended=kept)
