"""Step times by bucket, measured with made-up steps that fill each bucket: what the cost model is fitted to."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

import jax
import numpy as np

from jaxvllm.model_runner import ModelRunner
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey
from scheduler.cost_model import StepSample
from scheduler.plan import PlanLayout, StepPlan

CONTEXTS = (256, 1024)  # keys of each decode row; two of them tell what a context token costs
PROMPT_TOKENS = 1024  # of each prompt in a mixed step, if the bucket has rows for so many prompts
MAX_DECODES_OF_MIXED = 64
WARM_UP_STEPS = 3  # a CUDA graph is made in the second run
MAX_SECONDS_OF_A_BUCKET = 0.25  # at each context


def measure_steps(runner: ModelRunner, keys: Iterable[BucketKey], repeats: int = 20) -> Iterator[StepSample]:
    """Time full steps of each bucket, back to back with two in flight, at each of CONTEXTS.

    The runner's block tables are overwritten; it can serve afterwards only what is admitted anew.
    """
    assert runner.kv_cache is not None and runner.device_state is not None, "initialize_kv_cache comes first"
    num_blocks = runner.kv_cache.shape[1]
    limits = runner.config.limits
    tables = _tables(limits, num_blocks)
    place = runner.device_state.block_tables.sharding
    runner.device_state = replace(runner.device_state, block_tables=jax.device_put(tables, place))
    for key in keys:
        for context in CONTEXTS:
            plan = full_step(key, limits, tables, min(context, limits.max_model_len - 1))
            yield StepSample(key, int(_seq_lens(plan, limits).sum()), _time(runner, plan, repeats))


def _tables(limits: BatchLimits, num_blocks: int) -> np.ndarray:
    """i32[max_num_seqs, max_blocks]: rows share a block only where all of them together exceed the pool.

    What rows share comes from the L2 cache: 256 rows of 1024 keys seemed to be read at 6 TB/s.
    """
    starts = np.arange(limits.max_num_seqs) * -(-max(*CONTEXTS, PROMPT_TOKENS) // limits.block_size)
    return ((starts[:, None] + np.arange(limits.max_blocks)) % (num_blocks - 1) + 1).astype(np.int32)


def full_step(key: BucketKey, limits: BatchLimits, tables: np.ndarray, context: int) -> StepPlan:
    """A step without a pad: decode rows of `context` keys, and in a mixed bucket prompts for the rest of the tokens.

    Args:
      tables: i32[max_num_seqs, max_blocks] block tables that the device has.
    """
    num_tokens = _num_tokens(key, limits)
    layout = PlanLayout.make(key, limits)
    buffer = layout.empty_buffer(limits.max_num_seqs)
    fields = layout.unpack(buffer)
    n = len(num_tokens)
    rows = np.arange(n)
    is_decode = num_tokens == 1
    seq_lens = np.where(is_decode, context, num_tokens)
    ends = num_tokens.cumsum()
    token_rows = np.repeat(rows, num_tokens)
    positions = np.arange(ends[-1]) - np.repeat(ends - seq_lens, num_tokens)
    blocks = tables[token_rows, positions // limits.block_size]
    num_real = int(ends[-1])
    fields["header"][:] = (num_real, n, is_decode.sum())
    fields["input_ids"][:num_real] = 1 + positions % 100
    fields["positions"][:num_real] = positions
    fields["slot_mapping"][:num_real] = blocks * limits.block_size + positions % limits.block_size
    fields["query_start_loc"][1 : n + 1] = ends
    fields["query_start_loc"][n + 1 :] = num_real
    fields["seq_lens"][:n] = seq_lens
    fields["logits_indices"][:n] = ends - 1
    fields["rows"][:n] = rows
    fields["needs_sample"][:n] = 1
    request_ids = [f"r{row}" for row in rows]
    return StepPlan(key, buffer, [], request_ids, np.ones(n, bool), n, num_real)


def _num_tokens(key: BucketKey, limits: BatchLimits) -> np.ndarray:
    """Tokens of each row: ones for the decode rows, then prompts of nearly the same length."""
    if key.kind == "decode":
        return np.ones(min(key.R, limits.max_num_seqs), int)
    longest = min(PROMPT_TOKENS, limits.max_model_len - 1)
    num_rows = min(key.R, limits.max_num_seqs)
    num_prompts = min(max(-(-key.T // longest), 1), num_rows)
    num_decodes = min(MAX_DECODES_OF_MIXED, num_rows - num_prompts, key.T // 2)
    left = min(key.T - num_decodes, num_prompts * (limits.max_model_len - 1))
    prompts = np.full(num_prompts, left // num_prompts)
    prompts[: left % num_prompts] += 1
    return np.concatenate([np.ones(num_decodes, int), prompts])


def _seq_lens(plan: StepPlan, limits: BatchLimits) -> np.ndarray:
    return PlanLayout.make(plan.key, limits).unpack(plan.buffer)["seq_lens"][: plan.num_reqs]


def _time(runner: ModelRunner, plan: StepPlan, repeats: int) -> float:
    """Milliseconds a step: the median of the times between results."""
    for _ in range(WARM_UP_STEPS):
        runner.execute(plan).wait()
    begin = last = time.perf_counter()
    handle = runner.execute(plan)
    gaps = []
    while len(gaps) < repeats and last - begin < MAX_SECONDS_OF_A_BUCKET:
        following = runner.execute(plan)
        handle.wait()
        handle, now = following, time.perf_counter()
        gaps.append(now - last)
        last = now
    handle.wait()
    return median(gaps[1:] or gaps) * 1e3
