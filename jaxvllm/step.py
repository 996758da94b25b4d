"""The one program of a step: unpack, update the rows, forward, logits of R rows, sample, remember the tokens."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.device_state import DeviceState
from jaxvllm.layers.parameter import Weight
from jaxvllm.sampling import SamplingRows, sample
from pallas_kernels import Backend
from scheduler.buckets import BucketKey
from scheduler.plan import HEADER, PlanLayout

Params = Mapping[str, Weight]


class Model(Protocol):
    """What a step needs of a model."""

    def __call__(
        self, input_ids: jax.Array, positions: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states [T, D] and the cache with the step's keys and values."""
        ...

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of [R, D]."""
        ...


StepFunction = Callable[[Params, jax.Array, DeviceState, jax.Array], tuple[jax.Array, jax.Array, DeviceState]]


def make_step(
    bind: Callable[[Params], Model], key: BucketKey, layout: PlanLayout, backend: Backend, num_heads: int
) -> StepFunction:
    """The step function of a bucket, ready to be jitted with kv_cache and device_state donated.

    Args:
      bind: gives a model that uses the (traced) parameters it is called with.
      key: the bucket.
      layout: of its buffer.
      backend: of the attention ops.
      num_heads: query heads of the model.

    Returns:
      step(params, kv_cache, device_state, buffer) -> (sampled_token_ids i32[R], kv_cache, device_state). The ids are a
      fresh output, never donated, so the host can read them while later steps run.
    """

    def step(
        params: Params, kv_cache: jax.Array, device_state: DeviceState, buffer: jax.Array
    ) -> tuple[jax.Array, jax.Array, DeviceState]:
        plan = layout.unpack(buffer)
        if "admits" in plan:
            device_state = device_state.admit(plan["admits"])
        device_state = device_state.append_blocks(plan["block_appends"])
        model = bind(params)
        logits, kv_cache = compute_step_logits(model, plan, device_state, kv_cache, key, backend, num_heads)
        needs_sample = plan["needs_sample"] == 1
        records = _rows_of(device_state.records, plan["rows"])
        rows = SamplingRows.from_records(
            records, plan["seq_lens"], needs_sample, plan["rows"], device_state.grammar_masks
        )
        token_ids = sample(logits, rows)
        return token_ids, kv_cache, device_state.store_tokens(plan["rows"], token_ids, needs_sample)

    return step


def compute_step_logits(
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

    Returns: f32[R, V] logits of each row's last token, and the cache.
    """
    num_kv_heads, block_size = kv_cache.shape[3:5]
    metadata = _attention_metadata(plan, device_state, key, backend)
    metadata = metadata.with_work(num_heads, num_kv_heads, block_size)
    hidden, kv_cache = model(_input_ids(plan, device_state, key), plan["positions"], kv_cache, metadata)
    return model.compute_logits(hidden[plan["logits_indices"]]), kv_cache


def admit_step(device_state: DeviceState, admits: jax.Array) -> DeviceState:
    """Admissions that did not fit the step's buffer; device_state is to be donated."""
    return device_state.admit(admits)


def write_masks_step(device_state: DeviceState, writes: jax.Array) -> DeviceState:
    """Grammar masks of the next step; device_state is to be donated."""
    return device_state.write_masks(writes)


def _rows_of(array: jax.Array, rows: jax.Array) -> jax.Array:
    """The step's rows of a persistent array; pads (row number past the end) read zeros."""
    return array.at[rows].get(mode="fill", fill_value=0)


def _input_ids(plan: dict[str, Any], device_state: DeviceState, key: BucketKey) -> jax.Array:
    """The token ids, with those that exist on the device only (-1, decode rows) filled in; i32[T]."""
    last_tokens = _rows_of(device_state.last_tokens, plan["rows"])
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
