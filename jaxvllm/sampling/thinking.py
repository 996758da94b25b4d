"""thinking_token_budget: from the budget on, the row's tokens are those that close the thinking.

Letters: R rows
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.rows import SamplingRows
from scheduler.records import RecordField
from scheduler.sampling_params import MAX_THINK_IDS
from scheduler.token_lists import ListField

CERTAIN = 1e30  # the logit of a token that must come; finite at any temperature
_CHUNK = 512


def forced_ids(rows: SamplingRows) -> jax.Array:
    """The token that a row must give next because its thinking is over; i32[R], -1: none.

    A row thinks from its last opening sequence on, unless a closing one came later; both may lie in the prompt.
    """
    budget = rows.ints(RecordField.THINKING_BUDGET)
    has_budget = (budget >= 0) & rows.needs_sample
    lists = rows.lists(ListField.NUM_THINK_START, 2 * (1 + MAX_THINK_IDS)).reshape(-1, 2, 1 + MAX_THINK_IDS)
    num_ids, ids = lists[:, :, 0], lists[:, :, 1:]
    opened, closed = _ends_of_last(rows, ids, num_ids, has_budget).T
    num_forced = rows.seq_lens - opened - budget  # so many tokens of the closing sequence are there
    is_forced = has_budget & (opened > closed) & (num_forced >= 0)
    # A closing sequence whose tokens are all there has closed.
    token = jnp.take_along_axis(ids[:, 1], jnp.clip(num_forced, 0, MAX_THINK_IDS - 1)[:, None], axis=1)[:, 0]
    return jnp.where(is_forced & (num_forced < num_ids[:, 1]), token, -1)


def _ends_of_last(rows: SamplingRows, ids: jax.Array, num_ids: jax.Array, is_wanted: jax.Array) -> jax.Array:
    """The positions behind the last places where a row's tokens are its `ids`.

    Args:
      rows: the requests.
      ids: i32[R, 2, MAX_THINK_IDS] two sequences a row.
      num_ids: i32[R, 2] their lengths.
      is_wanted: bool[R] others are not looked at.

    Returns: i32[R, 2], 0: nowhere.
    """
    lengths = jnp.where(is_wanted, rows.seq_lens, 0)

    def look(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, found = state
        first = jnp.broadcast_to(index * _CHUNK + jnp.arange(_CHUNK), (lengths.shape[0], _CHUNK))
        fits = first[:, None] + num_ids[:, :, None] <= lengths[:, None, None]

        def compare(i: jax.Array, is_equal: jax.Array) -> jax.Array:
            token_ids = rows.history(first + i, first + i < lengths[:, None], -1)
            is_behind = i >= num_ids
            return is_equal & ((token_ids[:, None] == ids[:, :, i][:, :, None]) | is_behind[:, :, None])

        is_equal = lax.fori_loop(0, MAX_THINK_IDS, compare, fits & (num_ids > 0)[:, :, None])
        ends = jnp.where(is_equal, first[:, None] + num_ids[:, :, None], 0)
        return index + 1, jnp.maximum(found, ends.max(axis=2))

    num_chunks = -(-jnp.max(lengths) // _CHUNK)
    start = (jnp.int32(0), jnp.zeros_like(num_ids))
    return lax.while_loop(lambda state: state[0] < num_chunks, look, start)[1]
