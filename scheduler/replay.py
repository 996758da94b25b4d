"""Drive a scheduler over one recorded scenario and write down every step in the format of the recording.

The model is a stub: output token k of a request is a hash of its id and k, now and then EOS. A scenario is a dict with
`cfg` (limits) and `requests`; see tests/scheduler/golden. No device and no JAX is involved.
"""

import zlib
from collections import deque
from itertools import takewhile
from typing import Any

from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler, make_scheduler

EOS_TOKEN_ID = 2
MAX_STEPS = 100_000


def replay(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """The step records of a scenario.

    A request that the scheduler refuses, because it can never fit or contradicts itself, is left out; the record of its
    step names it under `refused`, a key that no other record has.

    Raises:
      ValueError: the limits in `cfg` contradict each other.
      RuntimeError: the requests have not ended after MAX_STEPS steps.
    """
    cfg = scenario["cfg"]
    scheduler = _make_scheduler(cfg)
    arrivals = sorted(scenario["requests"], key=lambda r: (r["step"], r["id"]))
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    model = StubModel(cfg["eos_mod"])
    records: list[dict[str, Any]] = []
    num_added = 0
    for step in range(MAX_STEPS):
        if num_added == len(arrivals) and not in_flight and not scheduler.has_unfinished_requests():
            return records
        refused = []
        while num_added < len(arrivals) and arrivals[num_added]["step"] == step:
            if not _add(scheduler, arrivals[num_added]):
                refused.append(arrivals[num_added]["id"])
            num_added += 1
        aborted = [r["id"] for r in scenario["requests"] if r["abort_step"] == step and r["step"] <= step]
        scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        num_outputs = {i: _num_outputs(request) for i, request in scheduler.requests.items()}
        output = scheduler.schedule()
        record = {"step": step, "aborted": aborted, **_describe(scheduler, output, num_outputs)}
        if refused:
            record["refused"] = refused
        records.append(record)
        if output.total_num_scheduled_tokens:
            in_flight.append((output, model.run(scheduler, output)))
        if in_flight and (len(in_flight) == cfg["pipeline_depth"] or not output.total_num_scheduled_tokens):
            record["out"] = _describe_outputs(scheduler.update_from_output(*in_flight.popleft()))
    raise RuntimeError(f"The scenario has not ended after {MAX_STEPS} steps.")


class StubModel:
    """Gives each request's outputs by number, whatever it computed; must be run in the order of the steps."""

    def __init__(self, eos_mod: int) -> None:
        self._eos_mod = eos_mod
        self._num_sampled: dict[str, int] = {}

    def run(self, scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
        """The tokens of a step; call it right after schedule(), when the step's tokens count as computed."""
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            if request.num_computed_tokens >= request.num_tokens:
                index = self._num_sampled.get(request_id, 0)
                self._num_sampled[request_id] = index + 1
                sampled[request_id] = self._token(request_id, index)
        return ModelRunnerOutput(sampled)

    def _token(self, request_id: str, index: int) -> int:
        value = zlib.crc32(f"{request_id}:{index}".encode())
        if self._eos_mod and value % self._eos_mod == 0:
            return EOS_TOKEN_ID
        return 3 + value % 900


def _make_scheduler(cfg: dict[str, Any]) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=cfg["max_num_seqs"],
        max_num_batched_tokens=cfg["max_num_batched_tokens"],
        max_model_len=cfg["max_model_len"],
        policy=cfg["policy"],
        long_prefill_token_threshold=cfg["long_prefill_token_threshold"],
        reserve_full_isl=cfg["reserve_full_isl"],
        async_scheduling=cfg["async"],
    )
    return make_scheduler(config, CacheConfig(cfg["block_size"], cfg["num_blocks"], cfg["prefix_caching"]))


def _add(scheduler: Scheduler, recorded: dict[str, Any]) -> bool:
    try:
        scheduler.add_request(_make_request(recorded))
    except ValueError:
        return False
    return True


def _make_request(recorded: dict[str, Any]) -> Request:
    params = SamplingParams(
        max_tokens=recorded["max_tokens"],
        min_tokens=recorded["min_tokens"],
        ignore_eos=recorded["ignore_eos"],
    )
    return Request(
        recorded["id"],
        recorded["prompt"],
        params,
        eos_token_id=EOS_TOKEN_ID,
        arrival_time=recorded["arrival"],
        priority=recorded["priority"],
        cache_salt=recorded["salt"],
    )


def _num_outputs(request: Request) -> int:
    """Those in flight are counted."""
    return request.num_output_tokens + request.num_output_placeholders


def _num_common_prefix_blocks(scheduler: Scheduler) -> int:
    """Leading blocks of the first running request that every request with blocks holds; 0 without prefix caching."""
    if not scheduler.running or not scheduler.kv.enable_prefix_caching:
        return 0
    num_holders = sum(bool(request.block_ids) for request in scheduler.requests.values())
    ref_counts = scheduler.kv.pool.ref_counts
    shared = takewhile(lambda block: ref_counts[block] == num_holders, scheduler.running[0].block_ids)
    return len(list(shared))


def _describe(scheduler: Scheduler, output: SchedulerOutput, num_outputs: dict[str, int]) -> dict[str, Any]:
    """A step's record. num_outputs: of each request, before the step."""
    known = output.scheduled_cached_requests
    columns = zip(
        known.request_ids,
        known.num_computed_tokens,
        map(num_outputs.__getitem__, known.request_ids),
        known.new_block_ids,
        strict=True,
    )
    return {
        "num_scheduled": [[i, n] for i, n in output.num_scheduled_tokens.items()],
        "new": [[r.request_id, r.num_computed_tokens, r.block_ids] for r in output.scheduled_new_requests],
        "cached": [[*row, row[0] in known.resumed_request_ids] for row in columns],
        "preempted": sorted(output.preempted_request_ids),
        "finished": sorted(output.finished_request_ids),
        "common_prefix": _num_common_prefix_blocks(scheduler),
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "skipped": [request.request_id for request in scheduler.skipped],
        "free": scheduler.kv.pool.num_free_blocks,
    }


def _describe_outputs(outputs: EngineCoreOutputs) -> list[list[Any]]:
    rows = []
    for request_id, token_id in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
        end = outputs.finished.get(request_id)
        rows.append([request_id, [token_id], end and end.finish_reason, end and end.stop_reason])
    return rows
