"""The requests of a step as the sampler sees them: their records, and where their token lists and tokens lie.

Letters: R rows of the step  N persistent rows  L max_model_len  V vocab
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
    """A step's rows. Token lists and tokens stay in the persistent arrays until a processor reads them."""

    records: jax.Array  # i32[R, RECORD_WIDTH] see scheduler.records
    seq_lens: jax.Array  # i32[R] tokens before the one to be sampled
    needs_sample: jax.Array  # bool[R] False: the row's token is not wanted
    rows: jax.Array  # i32[R] persistent row; pads hold N
    token_ids: jax.Array  # i32[N, L] by position
    token_lists: jax.Array  # i32[N, list_width] see scheduler.token_lists

    @staticmethod
    def of_step(
        step_rows: jax.Array,
        records: jax.Array,
        token_lists: jax.Array,
        token_ids: jax.Array,
    ) -> "SamplingRows":
        """The rows of a step.

        Args:
          step_rows: i32[3, R] as StepOutput has them.
          records, token_lists, token_ids: of the device state, with the step's admissions.
        """
        rows, seq_lens, needs_sample = step_rows
        return SamplingRows(
            records=records.at[rows].get(mode="fill", fill_value=0),
            seq_lens=seq_lens,
            needs_sample=needs_sample == 1,
            rows=rows,
            token_ids=token_ids,
            token_lists=token_lists,
        )

    def ints(self, column: RecordField) -> jax.Array:
        """i32[R] column of the records."""
        return self.records[:, column]

    def floats(self, column: RecordField) -> jax.Array:
        """f32[R] column of the records."""
        return lax.bitcast_convert_type(self.records[:, column], jnp.float32)

    def lists(self, start: int, length: int) -> jax.Array:
        """i32[R, length] columns of the token lists."""
        return self.token_lists.at[self.rows, start : start + length].get(mode="fill", fill_value=0)

    def history(self, positions: jax.Array, is_valid: jax.Array, fill_value: int) -> jax.Array:
        """The tokens at i32[R, n] positions; fill_value where is_valid is not."""
        positions = jnp.where(is_valid, positions, 0)
        token_ids = self.token_ids.at[self.rows[:, None], positions].get(mode="fill", fill_value=0)
        return jnp.where(is_valid, token_ids, fill_value)

    @property
    def is_greedy(self) -> jax.Array:
        """bool[R]"""
        return self.floats(RecordField.TEMPERATURE) <= 0

    @property
    def num_prompt_tokens(self) -> jax.Array:
        """i32[R]"""
        return self.ints(RecordField.NUM_PROMPT_TOKENS)

    @property
    def output_index(self) -> jax.Array:
        """i32[R] number of output tokens so far."""
        return self.seq_lens - self.num_prompt_tokens

    @property
    def seed(self) -> jax.Array:
        """u32[R, 2] high and low word."""
        high_low = jnp.stack([self.ints(RecordField.SEED_HI), self.ints(RecordField.SEED_LO)], axis=1)
        return lax.bitcast_convert_type(high_low, jnp.uint32)

    @property
    def is_held_back(self) -> jax.Array:
        """bool[R] whether stop ids are masked: min_tokens outputs do not exist yet."""
        return (self.output_index < self.ints(RecordField.MIN_TOKENS)) & (self.ints(RecordField.NUM_STOP_IDS) > 0)

    @property
    def has_penalties(self) -> jax.Array:
        """bool[R] whether token counts matter."""
        return (
            self.has_repetition_penalty
            | (self.floats(RecordField.PRESENCE_PENALTY) != 0)
            | (self.floats(RecordField.FREQUENCY_PENALTY) != 0)
        )

    @property
    def has_repetition_penalty(self) -> jax.Array:
        """bool[R] whether the prompt's tokens matter too."""
        return self.floats(RecordField.REPETITION_PENALTY) != 1

    @property
    def num_logprobs(self) -> jax.Array:
        """i32[R] entries wanted a row, the sampled token's included; 0: none."""
        return jnp.where(self.needs_sample, self.ints(RecordField.NUM_LOGPROBS), 0)
