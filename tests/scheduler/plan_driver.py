"""A careless scheduler: random but legal SchedulerOutputs, with the truth about each request kept beside them."""

import random
from dataclasses import dataclass, field

import numpy as np

from scheduler.batch import BatchLimits
from scheduler.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.plan import StepPlan
from scheduler.records import RECORD_WIDTH
from scheduler.sampling_params import SamplingParams


@dataclass
class Truth:
    """What is true of one request, independently of the batch."""

    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    known: int = 0  # tokens the host knew when it was last admitted

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


class CarelessScheduler:
    def __init__(self, rng: random.Random, limits: BatchLimits, max_num_batched_tokens: int) -> None:
        self.rng, self.limits, self.max_tokens = rng, limits, max_num_batched_tokens
        self.running: dict[str, Truth] = {}
        self.preempted: dict[str, Truth] = {}
        self.finished: set[str] = set()
        self.count = 0
        self.next_block = 1

    def _grow(self, truth: Truth, n: int) -> list[int]:
        need = -(-(truth.num_computed + n) // self.limits.block_size) - len(truth.blocks)
        new = list(range(self.next_block, self.next_block + max(need, 0)))
        self.next_block += len(new)
        truth.blocks += new
        return new

    def schedule(self) -> SchedulerOutput:
        """One step; every running request's num_computed is before the step until `sample` is called."""
        rng, out = self.rng, SchedulerOutput()
        for request_id in list(self.running):
            if rng.random() < 0.1:
                self.running.pop(request_id)
                self.finished.add(request_id)
            elif rng.random() < 0.1:
                self.preempted[request_id] = self.running.pop(request_id)
                out.preempted_request_ids.add(request_id)
        out.finished_request_ids, self.finished = self.finished, set()
        budget = self.max_tokens
        self._schedule_running(out)
        budget -= sum(out.num_scheduled_tokens.values())
        while budget > 0 and len(self.running) < self.limits.max_num_seqs and rng.random() < 0.9:
            resumable = [i for i in self.preempted if i not in out.preempted_request_ids]
            resume = resumable[0] if resumable and rng.random() < 0.7 else None
            budget -= self._admit(out, resume, budget)
        out.total_num_scheduled_tokens = sum(out.num_scheduled_tokens.values())
        return out

    def _schedule_running(self, out: SchedulerOutput) -> None:
        cached, budget = out.scheduled_cached_requests, self.max_tokens
        for request_id, truth in self.running.items():
            n = min(len(truth.tokens) - truth.num_computed, budget)
            if n > 1:
                n = self.rng.randint(1, n)
            if n == 0 or self.rng.random() < 0.1:
                continue
            budget -= n
            self._record(cached, request_id, truth, self._grow(truth, n))
            out.num_scheduled_tokens[request_id] = n

    def _record(self, cached: CachedRequestData, request_id: str, truth: Truth, blocks: list[int]) -> None:
        cached.request_ids.append(request_id)
        cached.new_block_ids.append(blocks or None)
        cached.num_computed_tokens.append(truth.num_computed)

    def _admit(self, out: SchedulerOutput, resume: str | None, budget: int) -> int:
        rng = self.rng
        if resume is None:
            request_id = f"r{self.count}"
            self.count += 1
            truth = Truth([rng.randrange(1000) for _ in range(rng.randint(1, self.limits.max_model_len - 8))])
        else:
            request_id, truth = resume, self.preempted.pop(resume)
        hit = rng.randrange(len(truth.tokens)) // self.limits.block_size * self.limits.block_size
        truth.num_computed, truth.known, truth.blocks = hit, len(truth.tokens), []
        n = rng.randint(1, min(budget, len(truth.tokens) - hit))
        self._grow(truth, n)
        self.running[request_id] = truth
        out.num_scheduled_tokens[request_id] = n
        if resume is None:
            new = NewRequestData(request_id, list(truth.prompt), SamplingParams(seed=7), list(truth.blocks), hit)
            out.scheduled_new_requests.append(new)
        else:
            cached = out.scheduled_cached_requests
            self._record(cached, request_id, truth, list(truth.blocks))
            cached.resumed_request_ids.add(request_id)
            cached.all_token_ids[request_id] = list(truth.tokens)
        return n

    def sample(self, out: SchedulerOutput) -> dict[str, int]:
        """Advance the truth by a step and return the tokens it sampled; a full request only finishes."""
        sampled = {}
        for request_id, n in out.num_scheduled_tokens.items():
            truth = self.running[request_id]
            truth.num_computed += n
            if truth.num_computed == len(truth.tokens):
                if len(truth.tokens) == self.limits.max_model_len:
                    self.running.pop(request_id)
                    self.finished.add(request_id)
                    continue
                sampled[request_id] = self.rng.randrange(1000)
                truth.outputs.append(sampled[request_id])
        return sampled


class DeviceModel:
    """What the device state holds after each plan, in NumPy; free rows hold garbage on purpose."""

    def __init__(self, limits: BatchLimits) -> None:
        self.tables = np.full((limits.max_num_seqs, limits.max_blocks), 10**6, np.int32)
        self.records = np.full((limits.max_num_seqs, RECORD_WIDTH), 10**6, np.int32)
        self.last_tokens = np.full(limits.max_num_seqs, 10**6, np.int32)

    def apply(self, plan: StepPlan, fields: dict[str, np.ndarray]) -> None:
        num_rows = len(self.tables)
        for admits in [*plan.overflow, *([fields["admits"]] if "admits" in fields else [])]:
            for admit in admits:
                if admit[0] < num_rows:
                    self.records[admit[0]] = admit[1 : 1 + RECORD_WIDTH]
                    self.tables[admit[0]] = admit[1 + RECORD_WIDTH :]
        for row, index, block in fields["block_appends"]:
            if row < num_rows:
                self.tables[row, index] = block
