"""The programs of a step: unpack, update the rows, forward, logits of R rows, the most likely tokens, remember them.

Where a request wants more than that, programs for the number of rows follow: `mask` applies grammars and `process`
changes logits otherwise, if some request wants it; `sample` chooses tokens, in the place of the step's, and gives
logprobs. They are no part of the step: XLA prepares all branches of a program each time it runs, taken or not, and
would compile them again for every bucket.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.device_state import DeviceState
from jaxvllm.layers.layer_context import Attended
from jaxvllm.layers.parameter import Weight
from jaxvllm.sampling import (
    LogitsProcessor,
    SamplingRows,
    greedy,
    mask_grammar,
    position_logprobs,
    process_logits,
    sample,
)
from pallas_kernels import Backend
from scheduler.buckets import BucketKey
from scheduler.logprob_plan import POSITION_FIELDS
from scheduler.plan import HEADER, PlanLayout

Params = Mapping[str, Weight]


class Model(Protocol):
    """What a step needs of a model."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct sliding windows of its layers, None for those that see all."""
        ...

    def __call__(
        self, input_ids: jax.Array, positions: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[Attended, jax.Array]:
        """What compute_logits goes on from, for T tokens, and the cache with the step's keys and values."""
        ...

    def compute_logits(self, attended: Attended, backend: Backend = "reference") -> jax.Array:
        """f32[R, V] of R tokens; `backend` is the step's where they are all of its tokens."""
        ...


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class StepOutput:
    """What a step gives, in fresh arrays. token_ids is never donated: the host reads it while later steps run."""

    token_ids: jax.Array  # i32[R] the most likely ones
    logits: jax.Array  # f32[R, V]
    rows: jax.Array  # i32[3, R] persistent rows, seq_lens, needs_sample: what the sampler has to know of the plan


StepFunction = Callable[[Params, jax.Array, DeviceState, jax.Array], tuple[StepOutput, jax.Array, DeviceState]]


def make_step(
    bind: Callable[[Params], Model],
    key: BucketKey,
    layout: PlanLayout,
    backend: Backend,
    num_heads: int,
) -> StepFunction:
    """The step function of a bucket, ready to be jitted with kv_cache and device_state donated.

    Args:
      bind: gives a model that uses the (traced) parameters it is called with.
      key: the bucket.
      layout: of its buffer.
      backend: of the attention ops.
      num_heads: query heads of the model.

    Returns:
      step(params, kv_cache, device_state, buffer) -> (StepOutput, kv_cache, device_state).
    """

    def step(
        params: Params, kv_cache: jax.Array, device_state: DeviceState, buffer: jax.Array
    ) -> tuple[StepOutput, jax.Array, DeviceState]:
        plan = layout.unpack(buffer)
        if "admits" in plan:
            device_state = device_state.admit(plan["admits"])
        device_state = device_state.append_blocks(plan["block_appends"])
        model = bind(params)
        attended, kv_cache = run_model(model, plan, device_state, kv_cache, key, backend, num_heads)
        if key.kind == "mixed":
            device_state = device_state.keep_attended(attended)
            logits = model.compute_logits(attended.take(plan["logits_indices"]))
        else:
            logits = model.compute_logits(attended, backend)  # row i is token i
        token_ids = greedy(logits)
        rows = jnp.stack([plan["rows"], plan["seq_lens"], plan["needs_sample"]])
        token_store = store_tokens(device_state.token_ids, rows, token_ids)
        return StepOutput(token_ids, logits, rows), kv_cache, replace(device_state, token_ids=token_store)

    return step


def make_process(processors: tuple[LogitsProcessor, ...], backend: Backend) -> Callable[..., jax.Array]:
    """The program that changes a step's logits as its requests ask.

    Args:
      processors: custom ones, in the order of their bits.
      backend: of the attention ops.

    Returns:
      process(logits f32[R, V], rows i32[3, R], records, token_lists, token_ids) -> f32[R, V]; the last three are the
      device state's.
    """

    def process(logits: jax.Array, step_rows: jax.Array, *state: jax.Array) -> jax.Array:
        return process_logits(logits, SamplingRows.of_step(step_rows, *state), processors, backend)

    return process


def make_mask(num_masks: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The program that leaves rows the tokens of their grammars; its first argument is to be donated.

    Returns: mask(logits f32[R, V], buffer i32[mask_buffer_size]) -> f32[R, V]; see sampling.mask_grammar.
    """

    def mask(logits: jax.Array, buffer: jax.Array) -> jax.Array:
        return mask_grammar(logits, buffer[:num_masks], buffer[num_masks:].reshape(num_masks, -1))

    return mask


def make_sample(backend: Backend) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The program that chooses tokens by what the requests ask.

    Args:
      backend: of the attention ops.

    Returns:
      sample(logits f32[R, V], processed f32[R, V], rows i32[3, R], records, token_lists, token_ids) -> i32[R] tokens,
      i32[R, LOGPROBS_WIDTH] logprobs, and token_ids, which is to be donated, with the tokens.
    """

    def step_sample(
        logits: jax.Array,
        processed: jax.Array,
        step_rows: jax.Array,
        records: jax.Array,
        token_lists: jax.Array,
        token_store: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows = SamplingRows.of_step(step_rows, records, token_lists, token_store)
        token_ids, logprobs = sample(logits, processed, rows, backend)
        return token_ids, logprobs, store_tokens(token_store, step_rows, token_ids)

    return step_sample


def store_tokens(token_store: jax.Array, step_rows: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Remember the tokens of the rows that sampled one.

    Args:
      token_store: i32[N, L] DeviceState.token_ids.
      step_rows: i32[3, R] see StepOutput.
      token_ids: i32[R].
    """
    rows, positions, is_sampled = step_rows
    targets = jnp.where(is_sampled == 1, rows, token_store.shape[0])
    return token_store.at[targets, positions].set(token_ids, mode="drop")


def run_model(
    model: Model,
    plan: dict[str, jax.Array],
    device_state: DeviceState,
    kv_cache: jax.Array,
    key: BucketKey,
    backend: Backend,
    num_heads: int,
) -> tuple[Attended, jax.Array]:
    """Forward pass of a step whose changes are in device_state already.

    Args:
      plan: the unpacked buffer.

    Returns: see Model.
    """
    metadata = _attention_metadata(plan, device_state, key, backend)
    metadata = metadata.with_work(num_heads, kv_cache, model.windows)
    return model(_input_ids(plan, device_state, key), plan["positions"], kv_cache, metadata)


def admit_step(device_state: DeviceState, admits: jax.Array) -> DeviceState:
    """Admissions that did not fit the step's buffer; device_state is to be donated."""
    return device_state.admit(admits)


def admit_lists_step(device_state: DeviceState, lists: jax.Array) -> DeviceState:
    """Token lists of admitted requests; device_state is to be donated."""
    return device_state.admit_lists(lists)


def admit_history_step(device_state: DeviceState, pieces: jax.Array) -> DeviceState:
    """Tokens that the sampler reads of admitted requests; device_state is to be donated."""
    return device_state.admit_history(pieces)


def make_logprobs(bind: Callable[[Params], Model], is_dense: bool, backend: Backend) -> Callable[..., jax.Array]:
    """The program for logprobs at positions of the last mixed step.

    Args:
      bind: as in make_step.
      is_dense: of all tokens, for requests that ask for more than a step gives.
      backend: of the attention ops.

    Returns:
      logprobs(params, attended, positions i32[C, 3]) -> i32[C, LOGPROBS_WIDTH], or f32[C, V] if is_dense.
    """

    def logprobs(params: Params, attended: Attended, positions: jax.Array) -> jax.Array:
        index, target, num_logprobs = (positions[:, i] for i in range(len(POSITION_FIELDS)))
        logits = bind(params).compute_logits(attended.take(index))
        if is_dense:
            return jax.nn.log_softmax(logits, axis=-1)
        return position_logprobs(logits, target, num_logprobs, backend)

    return logprobs


def _rows_of(array: jax.Array, rows: jax.Array) -> jax.Array:
    """The step's rows of a persistent array; pads (row number past the end) read zeros."""
    return array.at[rows].get(mode="fill", fill_value=0)


def _input_ids(plan: dict[str, Any], device_state: DeviceState, key: BucketKey) -> jax.Array:
    """The token ids, with those that exist on the device only (-1, decode rows) filled in; i32[T]."""
    last_positions = jnp.maximum(plan["seq_lens"] - 1, 0)
    # Pads, whose row is past the end, have a token; to fill in another one would take a kernel that finds them.
    last_tokens = device_state.token_ids.at[plan["rows"], last_positions].get(mode="clip")
    # Token t of a decode row is row t, and R <= T.
    last_tokens = jnp.pad(last_tokens, (0, key.T - key.R))
    return jnp.where(plan["input_ids"] < 0, last_tokens, plan["input_ids"])


def _attention_metadata(
    plan: dict[str, Any], device_state: DeviceState, key: BucketKey, backend: Backend
) -> AttentionMetadata:
    header = dict(zip(HEADER, plan["header"], strict=True))
    return AttentionMetadata(
        slot_mapping=plan["slot_mapping"],
        block_tables=_rows_of(device_state.block_tables, plan["rows"]),
        seq_lens=plan["seq_lens"],
        query_start_loc=plan["query_start_loc"],
        num_decodes=header["num_decodes"],
        num_reqs=header["num_reqs"],
        num_tokens=header["num_tokens"],
        kind=key.kind,
        backend=backend,
    )
