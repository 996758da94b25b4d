"""From logits to token ids and logprobs: by kernels where there are some for the device, else by XLA.

Which of the two is decided here alone, by the backend of the attention ops: where these have kernels, sampling has too.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling import draw, draw_kernel, logprobs, logprobs_kernel, process_kernel, processors
from jaxvllm.sampling.custom import LogitsProcessor
from jaxvllm.sampling.row_kernel import group_stats
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.thinking import CERTAIN, forced_ids
from pallas_kernels import Backend
from scheduler.logprob_columns import LOGPROBS_WIDTH
from scheduler.records import RecordField
from scheduler.sampling_params import MAX_LOGPROB_TOKEN_IDS
from scheduler.token_lists import ListField


def process_logits(
    logits: jax.Array,
    rows: SamplingRows,
    custom: tuple[LogitsProcessor, ...] = (),
    backend: Backend = "reference",
) -> jax.Array:
    """Apply all that the rows ask for but grammars.

    Args:
      logits: f32[R, V].
      rows: the requests.
      custom: logits processors, in the order of their bits.
      backend: of the attention ops.

    Returns: f32[R, V]; a row that asks for nothing is bit-equal.
    """
    if backend == "reference":
        edited, forced = processors.edit_logits(logits, rows), forced_ids(rows)
    else:
        edited, forced = process_kernel.edit_logits(logits, rows, interpret=_interprets(backend))
    edited = processors.apply_custom(edited, rows, custom)
    places = jnp.arange(logits.shape[0]), jnp.where(forced >= 0, forced, logits.shape[1])
    return edited.at[places].set(CERTAIN, mode="drop")


def sample(
    logits: jax.Array, processed: jax.Array, rows: SamplingRows, backend: Backend = "reference"
) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its logprobs.

    Args:
      logits: f32[R, V] as the model gave them: of these are the logprobs.
      processed: f32[R, V] from process_logits: of these is the choice. May be the same array.
      rows: the requests; what comes out of a row without needs_sample is arbitrary.
      backend: of the attention ops.

    Returns: i32[R] token ids; i32[R, LOGPROBS_WIDTH] logprobs, arbitrary where a row wants none.
    """
    num_listed = jnp.where(rows.needs_sample, rows.ints(RecordField.NUM_LISTED_IDS), 0)
    num_logprobs = jnp.where(num_listed > 0, 1, rows.num_logprobs)
    listed_ids = rows.lists(ListField.LISTED_IDS, MAX_LOGPROB_TOKEN_IDS)
    if backend != "reference":
        interpret = _interprets(backend)
        wants_logprobs = (num_logprobs > 0).astype(jnp.float32)
        of_processed, of_logits = group_stats(
            (processed, draw_kernel.scales(rows)), (logits, wants_logprobs), interpret=interpret
        )
        token_ids = draw_kernel.choose(processed, of_processed, rows, interpret=interpret)
        args = (logits, of_logits, token_ids, num_logprobs, listed_ids, num_listed)
        return token_ids, logprobs_kernel.position_logprobs(*args, interpret=interpret)
    token_ids = draw.choose(processed, rows)
    return token_ids, lax.cond(
        jnp.any(num_logprobs > 0),
        lambda logits: logprobs.position_logprobs(logits, token_ids, num_logprobs, listed_ids, num_listed),
        lambda _: jnp.zeros((logits.shape[0], LOGPROBS_WIDTH), jnp.int32),
        logits,
    )


def position_logprobs(
    logits: jax.Array, targets: jax.Array, num_logprobs: jax.Array, backend: Backend = "reference"
) -> jax.Array:
    """The logprob and rank of one token a row, and the most likely tokens.

    Args:
      logits: f32[R, V] as the model gave them.
      targets: i32[R] token ids.
      num_logprobs: i32[R] entries wanted, the target's included.
      backend: of the attention ops.

    Returns: i32[R, LOGPROBS_WIDTH], see scheduler.logprob_columns; the LISTED columns are arbitrary.
    """
    num_rows = len(targets)
    args = (jnp.zeros((num_rows, MAX_LOGPROB_TOKEN_IDS), jnp.int32), jnp.zeros(num_rows, jnp.int32))
    if backend == "reference":
        return logprobs.position_logprobs(logits, targets, num_logprobs, *args)
    interpret = _interprets(backend)
    (stats,) = group_stats((logits, (num_logprobs > 0).astype(jnp.float32)), interpret=interpret)
    return logprobs_kernel.position_logprobs(logits, stats, targets, num_logprobs, *args, interpret=interpret)


def _interprets(backend: Backend) -> bool:
    return backend == "mosaic_gpu_interpret"
