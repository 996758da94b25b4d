"""SamplingRows made by hand, as admissions would leave them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.sampling import SamplingRows, process_logits, sample
from pallas_kernels import Backend
from scheduler.batch import BatchLimits, SamplingRecord
from scheduler.sampling_params import SamplingParams
from scheduler.token_lists import list_width

PROMPT_LENGTH = 10


def make_rows(
    params: list[SamplingParams],
    output_index=0,
    eos: int | None = None,
    needs_sample=None,
    histories: list[tuple[list[int], list[int]]] | None = None,
    processors: tuple[tuple[str, int], ...] = (),
) -> SamplingRows:
    """One row a request, in reversed persistent rows; histories: (prompt, outputs) in the place of output_index."""
    n = len(params)
    if histories is None:
        indices = np.broadcast_to(np.asarray(output_index), n)
        prompts, seq_lens = [PROMPT_LENGTH] * n, indices + PROMPT_LENGTH
    else:
        prompts = [len(prompt) for prompt, _ in histories]
        seq_lens = np.array([len(prompt) + len(outputs) for prompt, outputs in histories])
    limits = BatchLimits(n + 2, int(seq_lens.max()) + 1, 16, 0, processors)
    made = [SamplingRecord.make(p, length, eos, p.seed or 0, limits) for p, length in zip(params, prompts, strict=True)]
    rows = np.arange(n)[::-1] + 1
    # Garbage where nothing was written; one row where nobody may look.
    token_ids = np.full((n + 2 if histories else 1, limits.max_model_len), 7, np.int32)
    has_lists = any(record.token_lists is not None for record in made)
    lists = np.full((n + 2 if has_lists else 1, list_width(limits.num_processor_params)), 3, np.int32)
    for row, record, history in zip(rows, made, histories or [None] * n, strict=True):
        if record.token_lists is not None:
            lists[row] = record.token_lists
        if history is not None:
            token_ids[row, : sum(map(len, history))] = [*history[0], *history[1]]
    return SamplingRows(
        records=jnp.asarray(np.stack([record.record for record in made])),
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
        needs_sample=jnp.asarray(np.ones(n, bool) if needs_sample is None else np.asarray(needs_sample)),
        rows=jnp.asarray(rows, jnp.int32),
        token_ids=jnp.asarray(token_ids),
        token_lists=jnp.asarray(lists),
    )


def repeat_row(params: SamplingParams, num_rows: int) -> SamplingRows:
    """The same request num_rows times, at output index 0, 1, 2, ..."""
    one = make_rows([params])
    return replace(
        one,
        records=jnp.broadcast_to(one.records, (num_rows, one.records.shape[1])),
        seq_lens=jnp.arange(num_rows, dtype=jnp.int32) + PROMPT_LENGTH,
        needs_sample=jnp.ones(num_rows, bool),
        rows=jnp.zeros(num_rows, jnp.int32),
    )


@partial(jax.jit, static_argnames="backend")
def process_and_sample(
    logits: jax.Array, rows: SamplingRows, backend: Backend = "reference"
) -> tuple[jax.Array, jax.Array]:
    """Token ids and logprobs, by the programs behind a step."""
    return sample(logits, process_logits(logits, rows, (), backend), rows, backend)
