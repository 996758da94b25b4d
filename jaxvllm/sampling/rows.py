"""The sampling parameters of a step's rows, read from their records.

Letters: R rows  V vocab
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from scheduler.records import RecordField


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a step's rows."""

    temperature: jax.Array  # f32[R] 0: greedy
    top_k: jax.Array  # i32[R] 0: off
    top_p: jax.Array  # f32[R] 1: off
    min_p: jax.Array  # f32[R] 0: off
    seed: jax.Array  # u32[R, 2] high and low word
    output_index: jax.Array  # i32[R] number of output tokens so far
    min_tokens: jax.Array  # i32[R]
    num_stop_ids: jax.Array  # i32[R]
    stop_ids: jax.Array  # i32[R, MAX_MASKED_IDS] masked while output_index < min_tokens
    needs_sample: jax.Array  # bool[R] False: the row's token is not wanted
    has_grammar: jax.Array  # bool[R]
    row_numbers: jax.Array | None  # i32[R] rows of grammar_masks
    grammar_masks: jax.Array | None  # i32[max_num_seqs, words]; gathered where a row needs it. None: no row has one

    @staticmethod
    def from_records(
        records: jax.Array,
        seq_lens: jax.Array,
        needs_sample: jax.Array,
        row_numbers: jax.Array | None = None,
        grammar_masks: jax.Array | None = None,
    ) -> "SamplingRows":
        """Read the columns of i32[R, RECORD_WIDTH] records; the other arguments as the attributes."""

        def floats(column: int) -> jax.Array:
            return lax.bitcast_convert_type(records[:, column], jnp.float32)

        high_low = jnp.stack([records[:, RecordField.SEED_HI], records[:, RecordField.SEED_LO]], axis=1)
        return SamplingRows(
            temperature=floats(RecordField.TEMPERATURE),
            top_k=records[:, RecordField.TOP_K],
            top_p=floats(RecordField.TOP_P),
            min_p=floats(RecordField.MIN_P),
            seed=lax.bitcast_convert_type(high_low, jnp.uint32),
            output_index=seq_lens - records[:, RecordField.NUM_PROMPT_TOKENS],
            min_tokens=records[:, RecordField.MIN_TOKENS],
            num_stop_ids=records[:, RecordField.NUM_STOP_IDS],
            stop_ids=records[:, RecordField.STOP_IDS :],
            needs_sample=needs_sample,
            has_grammar=records[:, RecordField.HAS_GRAMMAR] == 1,
            row_numbers=row_numbers,
            grammar_masks=grammar_masks,
        )
