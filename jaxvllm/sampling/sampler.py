"""From logits to token ids and logprobs: by kernels where there are some for the device, else by XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling import draw, draw_kernel, logprobs, logprobs_kernel
from jaxvllm.sampling.rows import SamplingRows
from pallas_kernels import Backend
from scheduler.logprob_columns import LOGPROBS_WIDTH
from scheduler.records import RecordField
from scheduler.sampling_params import MAX_LOGPROB_TOKEN_IDS
from scheduler.token_lists import ListField


def sample(
    logits: jax.Array, processed: jax.Array, rows: SamplingRows, backend: Backend = "reference"
) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its logprobs.

    Args:
      logits: f32[R, V] as the model gave them: of these are the logprobs.
      processed: f32[R, V] from process_logits: of these is the choice. May be the same array.
      rows: the requests; what comes out of a row without needs_sample is arbitrary.
      backend: of the attention ops: where these have kernels, sampling has them too.

    Returns: i32[R] token ids; i32[R, LOGPROBS_WIDTH] logprobs, arbitrary where a row wants none.
    """
    num_listed = jnp.where(rows.needs_sample, rows.ints(RecordField.NUM_LISTED_IDS), 0)
    num_logprobs = jnp.where(num_listed > 0, 1, rows.num_logprobs)
    listed_ids = rows.lists(ListField.LISTED_IDS, MAX_LOGPROB_TOKEN_IDS)
    if backend != "reference":
        interpret = backend == "mosaic_gpu_interpret"
        token_ids = draw_kernel.choose(processed, rows, interpret=interpret)
        args = (logits, token_ids, num_logprobs, listed_ids, num_listed)
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
      backend: see sample.

    Returns: i32[R, LOGPROBS_WIDTH], see scheduler.logprob_columns; the LISTED columns are arbitrary.
    """
    num_rows = len(targets)
    args = (jnp.zeros((num_rows, MAX_LOGPROB_TOKEN_IDS), jnp.int32), jnp.zeros(num_rows, jnp.int32))
    if backend == "reference":
        return logprobs.position_logprobs(logits, targets, num_logprobs, *args)
    interpret = backend == "mosaic_gpu_interpret"
    return logprobs_kernel.position_logprobs(logits, targets, num_logprobs, *args, interpret=interpret)
