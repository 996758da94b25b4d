"""The one program of a step: unpack, update the rows, forward, logits of R rows, sample, remember the tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.device_state import DeviceState
from jaxvllm.layers.parameter import Weight
from jaxvllm.sampling import LogitsProcessor, SamplingRows, position_logprobs, sample, sample_plainly
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
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states [T, D] and the cache with the step's keys and values."""
        ...

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of [R, D]."""
        ...


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class StepOutput:
    """What a step gives: fresh arrays, never donated, so the host can read them while later steps run."""

    token_ids: jax.Array  # i32[R]
    logprobs: jax.Array  # i32[R, sampling.LOGPROBS_WIDTH]; zeros unless a row asks for logprobs


StepFunction = Callable[[Params, jax.Array, DeviceState, jax.Array], tuple[StepOutput, jax.Array, DeviceState]]


def make_step(
    bind: Callable[[Params], Model],
    key: BucketKey,
    layout: PlanLayout,
    backend: Backend,
    num_heads: int,
    processors: tuple[LogitsProcessor, ...] = (),
    *,
    is_plain: bool = False,
) -> StepFunction:
    """The step function of a bucket, ready to be jitted with kv_cache and device_state donated.

    Args:
      bind: gives a model that uses the (traced) parameters it is called with.
      key: the bucket.
      layout: of its buffer.
      backend: of the attention ops.
      num_heads: query heads of the model.
      processors: custom logits processors, in the order of their bits.
      is_plain: every row takes the most likely token, whatever its request says, and nobody wants logprobs.

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
        hidden, kv_cache = run_model(model, plan, device_state, kv_cache, key, backend, num_heads)
        if key.kind == "mixed":
            device_state = device_state.store_hidden(hidden)
        logits = model.compute_logits(hidden[plan["logits_indices"]])
        rows = SamplingRows.of_step(device_state, plan)
        token_ids, logprobs = sample_plainly(logits) if is_plain else sample(logits, rows, processors)
        device_state = device_state.store_tokens(plan["rows"], plan["seq_lens"], token_ids, rows.needs_sample)
        return StepOutput(token_ids, logprobs), kv_cache, device_state

    return step


def run_model(
    model: Model,
    plan: dict[str, jax.Array],
    device_state: DeviceState,
    kv_cache: jax.Array,
    key: BucketKey,
    backend: Backend,
    num_heads: int,
) -> tuple[jax.Array, jax.Array]:
    """Forward pass of a step whose changes are in device_state already.

    Args:
      plan: the unpacked buffer.

    Returns: hidden states [T, D] and the cache.
    """
    metadata = _attention_metadata(plan, device_state, key, backend)
    metadata = metadata.with_work(num_heads, kv_cache, model.windows)
    return model(_input_ids(plan, device_state, key), plan["positions"], kv_cache, metadata)


def admit_step(device_state: DeviceState, admits: jax.Array) -> DeviceState:
    """Admissions that did not fit the step's buffer; device_state is to be donated."""
    return device_state.admit(admits)


def write_masks_step(device_state: DeviceState, writes: jax.Array) -> DeviceState:
    """Grammar masks of the next step; device_state is to be donated."""
    return device_state.write_masks(writes)


def admit_lists_step(device_state: DeviceState, lists: jax.Array) -> DeviceState:
    """Token lists of admitted requests; device_state is to be donated."""
    return device_state.admit_lists(lists)


def admit_history_step(device_state: DeviceState, pieces: jax.Array) -> DeviceState:
    """Tokens that the sampler reads of admitted requests; device_state is to be donated."""
    return device_state.admit_history(pieces)


def make_logprobs(bind: Callable[[Params], Model], is_dense: bool) -> Callable[..., jax.Array]:
    """The program for logprobs at positions of the last mixed step.

    Returns:
      logprobs(params, hidden [T, D], positions i32[C, 3]) -> i32[C, LOGPROBS_WIDTH], or f32[C, V] if is_dense.
    """

    def logprobs(params: Params, hidden: jax.Array, positions: jax.Array) -> jax.Array:
        index, target, num_logprobs = (positions[:, i] for i in range(len(POSITION_FIELDS)))
        logits = bind(params).compute_logits(hidden[index])
        if is_dense:
            return jax.nn.log_softmax(logits, axis=-1)
        return position_logprobs(logits, target, num_logprobs)

    return logprobs


def _rows_of(array: jax.Array, rows: jax.Array) -> jax.Array:
    """The step's rows of a persistent array; pads (row number past the end) read zeros."""
    return array.at[rows].get(mode="fill", fill_value=0)


def _input_ids(plan: dict[str, Any], device_state: DeviceState, key: BucketKey) -> jax.Array:
    """The token ids, with those that exist on the device only (-1, decode rows) filled in; i32[T]."""
    last_positions = jnp.maximum(plan["seq_lens"] - 1, 0)
    last_tokens = device_state.token_ids.at[plan["rows"], last_positions].get(mode="fill", fill_value=0)
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
