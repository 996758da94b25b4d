"""The scheduler: which requests compute how many tokens in the next step, and what came of the last one.

There is no prefill and no decode here. A request knows how many tokens it has and how many are computed; each step lets
the second number catch up with the first within a budget of tokens: running requests first, in list order, then waiting
ones while blocks, budget and places last. When a running request finds no block, another one gives its blocks back and
will be computed again later (pre-emption by recomputation).

Meaning follows vLLM 0.22 (vllm/v1/core/sched/scheduler.py), but for the hazards named where they are avoided.
"""

import logging
from collections import deque
from collections.abc import Iterable

from scheduler.buckets import BucketPolicy
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.grammar import RequestGrammar
from scheduler.intake import admit_lengths
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.outputs import EngineCoreOutputs, FinishedRequest, ModelRunnerOutput, SchedulerOutput, SchedulerStats
from scheduler.request import Request, RequestStatus
from scheduler.request_queue import RequestQueue, make_request_queue
from scheduler.step_builder import StepBuilder
from scheduler.stop import check_stop

logger = logging.getLogger(__name__)

# Of the running requests at least this share must have a grammar for these to take part in every step although their
# last token is in flight. The sampling of such a step waits for the host, which costs the others up to a fifth of a
# step where steps are short (0.03 of one of 256 rows, 0.15 of one of 64; host side alone, LOG 2026-11-30). Fewer leave
# out the step behind each of theirs.
PIPELINED_GRAMMARS = 1 / 4


class Scheduler:
    """Schedules one step at a time; the step returned by schedule() must be run, in the order of the calls.

    A request whose sampled token is still in flight waits for it; AsyncScheduler goes on with a placeholder.

    When others may find a block by its hash: a returned step is certain to run, and so before every step returned after
    it, so its blocks are found from then on, also when their request is aborted with the step in flight: the step fills
    them all the same. Inside schedule() a pre-emption can still take a running request out of the step: its hashes are
    rolled back (_preempt), and nobody has found them yet, since a step that pre-empts admits nobody. A request aborted
    before it is scheduled has published nothing. A step that could not be run leaves no scheduler to go on with: the
    engine core dies of it.
    """

    def __init__(
        self, config: SchedulerConfig, cache_config: CacheConfig, bucket_policy: BucketPolicy | None = None
    ) -> None:
        """Begin without requests.

        Args:
          bucket_policy: what steps are padded to. The last part of a prompt in a step ends where a bucket does, unless
            few pads are saved; what is left goes into the next step. None: steps are as vLLM's.
        """
        self.config = config
        self._bucket_policy = bucket_policy if config.enable_chunked_prefill else None
        self.kv = KVCacheManager(cache_config)
        self.requests: dict[str, Request] = {}  # unfinished ones
        self.running: list[Request] = []
        self.waiting = make_request_queue(config.policy)
        self.skipped = make_request_queue(config.policy)  # waiting ones that were passed over: their grammar is missing
        self._with_grammar: dict[str, Request] = {}  # unfinished ones
        self._finished_ids: set[str] = set()  # the batch has not been told yet
        self._unreported: dict[str, FinishedRequest] = {}  # the caller has not been told yet
        self._in_flight: deque[SchedulerOutput] = deque()  # steps with tokens, oldest first
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0

    # ---- requests come and go

    def add_request(self, request: Request) -> None:
        """Let a request wait for admission.

        Raises:
          ValueError: it can never fit, or its id is in use: by an unfinished request, or by an ended one that the next
            update or a step in flight still speaks of. Names value, limit and remedy.
        """
        if self._is_used(request.request_id):
            raise ValueError(f"Request id {request.request_id!r} is in use; give every request an id of its own.")
        request.max_num_tokens = admit_lengths(request, self.config, self.kv.num_slots)
        self.requests[request.request_id] = request
        if request.grammar is not None:
            self._with_grammar[request.request_id] = request
        self.waiting.add(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests from outside; unknown and finished ids are ignored. The next update reports them."""
        ended = [(self.requests[i], status) for i in dict.fromkeys(request_ids) if i in self.requests]
        self._end(ended)
        for request, _ in ended:
            self._unreported[request.request_id] = FinishedRequest(status.finish_reason)

    def _is_used(self, request_id: str) -> bool:
        if request_id in self.requests or request_id in self._unreported:
            return True
        return any(request_id in step.num_scheduled_tokens for step in self._in_flight)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether a step has anything to do: a request, or an end that the batch or the caller must hear of."""
        return bool(self.requests or self._finished_ids or self._unreported)

    @property
    def has_grammars(self) -> bool:
        """Whether some request has a grammar."""
        return bool(self._with_grammar)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and no change, while any request holds blocks."""
        return self.kv.reset_prefix_cache()

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step; its tokens count as computed from now on."""
        if self._with_grammar:
            self._end_failed_grammars()
        step = StepBuilder(budget=self.config.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        assert step.budget >= 0 and len(self.running) <= self.config.max_num_seqs
        output = step.describe()
        output.finished_request_ids, self._finished_ids = self._finished_ids, set()
        if self._with_grammar:
            output.grammars = self._sampling_grammars(output.num_scheduled_tokens)
        self._advance(step.scheduled, output.num_scheduled_tokens)
        for request in step.admitted:
            request.status = RequestStatus.RUNNING
        if output.num_scheduled_tokens:
            self._in_flight.append(output)
        return output

    def _schedule_running(self, step: StepBuilder) -> None:
        running, block_size = self.running, self.kv.block_size
        are_few_grammars = len(self._with_grammar) < PIPELINED_GRAMMARS * len(running)
        threshold = self.config.long_prefill_token_threshold
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            index += 1
            num_placeholders, num_computed = request.num_output_placeholders, request.num_computed_tokens
            num_known = request.num_tokens + num_placeholders
            num_new = num_known - num_computed
            if num_new == 0 or num_known >= request.max_num_tokens:
                continue  # its next token, or its last one, is in flight
            if request.grammar is not None and (
                not request.grammar.is_ready or (num_placeholders and are_few_grammars)
            ):
                continue
            if num_new > 1:
                num_new = min(num_new, threshold or num_new, step.budget)
                if index == len(running) and not (self.waiting or self.skipped):
                    num_new = self._fitted_chunk(step, num_new)
            if num_computed + num_new > request.num_ready_tokens and not (
                # A token in flight cannot complete a block that others may find, so room is all that it needs.
                num_placeholders and num_computed + num_new <= len(request.block_ids) * block_size
            ):
                new_block_ids = self.kv.allocate_slots(request, num_new)
                while new_block_ids is None:
                    victim_index = self._choose_victim()
                    index -= victim_index < index  # requests behind the victim move up: none may be skipped
                    victim = running.pop(victim_index)
                    self._preempt(victim, step)
                    if victim is request:
                        return
                    new_block_ids = self.kv.allocate_slots(request, num_new)
                if new_block_ids:
                    step.new_block_ids[request.request_id] = new_block_ids
            step.num_scheduled[request.request_id] = num_new
            step.scheduled.append(request)
            step.budget -= num_new

    def _choose_victim(self) -> int:
        """Index of the running request to pre-empt: the last one, or the least urgent one."""
        if self.config.policy == "fcfs":
            return len(self.running) - 1
        # By id among equals, as in the queue: vLLM takes the first of them here, and two requests that arrived together
        # can then pre-empt each other for ever.
        return max(range(len(self.running)), key=lambda index: self.running[index].sort_key)

    def _preempt(self, victim: Request, step: StepBuilder) -> None:
        """Take everything back from a request that has left the running list, also its part of this step."""
        if step.undo(victim):
            self.kv.undo_publish(victim)  # vLLM keeps these hashes, and a resume hits blocks nobody computed
        self.kv.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_lost_tokens = victim.num_computed_tokens
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.put_back(victim)
        step.preempted.append(victim)

    def _schedule_waiting(self, step: StepBuilder) -> None:
        set_aside: list[Request] = []
        while step.budget > 0 and len(self.running) < self.config.max_num_seqs:
            queue = self._next_queue()
            if queue is None:
                break
            request = queue.peek()
            if request.num_output_placeholders:
                break  # pre-empted with a token in flight: what it has to compute again is not known yet
            if request.grammar is not None and not request.grammar.is_ready:
                set_aside.append(queue.pop())
                continue
            if not self._schedule_first(queue, step):
                break
        for request in reversed(set_aside):
            self.skipped.put_back(request)

    def _next_queue(self) -> RequestQueue | None:
        """The queue with the request to admit next: first come first served prefers those passed over before."""
        if not self.skipped:
            return self.waiting or None
        if not self.waiting or self.config.policy == "fcfs":
            return self.skipped
        return min(self.skipped, self.waiting, key=lambda queue: queue.peek().sort_key)

    def _schedule_first(self, queue: RequestQueue, step: StepBuilder) -> bool:
        """Admit a queue's first request to the step; False, and it stays, if it does not fit."""
        config = self.config
        request = queue.peek()
        hit_block_ids = self.kv.get_computed_blocks(request)
        num_hit = len(hit_block_ids) * self.kv.block_size
        num_new = request.num_tokens - num_hit
        num_new = min(num_new, config.long_prefill_token_threshold or num_new)
        if num_new > step.budget and not config.enable_chunked_prefill:
            return False
        num_new = min(num_new, step.budget)
        if len(self.waiting) + len(self.skipped) == 1 or len(self.running) + 1 == config.max_num_seqs:
            num_new = self._fitted_chunk(step, num_new)
        new_block_ids = self.kv.allocate_slots(
            request,
            num_new,
            hit_block_ids,
            full_sequence_must_fit=config.reserve_full_isl,
            num_reserved_blocks=self._num_growth_blocks(request),
        )
        if new_block_ids is None:
            return False
        queue.pop()
        self._admit(request, num_hit)
        step.num_scheduled[request.request_id] = num_new
        step.scheduled.append(request)
        step.admitted.append(request)
        step.budget -= num_new
        return True

    def _num_growth_blocks(self, admitted: Request) -> int:
        """Blocks that the running requests and one to be admitted may soon ask for; 0 where far more are free."""
        num_tokens, block_size = self.config.num_growth_tokens, self.kv.block_size
        most = (len(self.running) + 1) * (num_tokens // block_size + 1) + self.config.max_model_len // block_size
        if not num_tokens or not self.running or self.kv.pool.num_free_blocks > most:
            return 0
        needed = 0
        for request in (*self.running, admitted):
            num_held = len(request.block_ids) or -(-request.num_tokens // block_size)
            num_later = min(request.num_tokens + num_tokens, request.max_num_tokens)
            needed += -(-num_later // block_size) - num_held
        return needed

    def _fitted_chunk(self, step: StepBuilder, num_new: int) -> int:
        """How much of a prompt to compute if nothing comes behind it in a step."""
        if self._bucket_policy is None:
            return num_new
        num_before = self.config.max_num_batched_tokens - step.budget
        return self._bucket_policy.fitted_chunk(num_before, num_new, len(step.scheduled) + 1)

    def _end_failed_grammars(self) -> None:
        """End the requests whose grammar could not be compiled, or not be followed further."""
        failed = [request for request in self._with_grammar.values() if _grammar(request).error is not None]
        self._end([(request, RequestStatus.FINISHED_ERROR) for request in failed])
        for request in failed:
            self._unreported[request.request_id] = FinishedRequest("error", _grammar(request).error)

    def _sampling_grammars(self, num_scheduled_tokens: dict[str, int]) -> dict[str, RequestGrammar]:
        """The grammars of the scheduled requests that sample, before their tokens count as computed."""
        grammars = {}
        for request_id, request in self._with_grammar.items():
            num_new = num_scheduled_tokens.get(request_id, 0)
            num_known = request.num_tokens + request.num_output_placeholders
            if num_new and request.num_computed_tokens + num_new == num_known:
                grammars[request_id] = _grammar(request)
        return grammars

    def _admit(self, request: Request, num_hit: int) -> None:
        self.running.append(request)
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            request.status = RequestStatus.WAITING
        request.num_computed_tokens = num_hit
        self._num_recomputed_tokens += max(request.num_lost_tokens - num_hit, 0)
        if self.kv.enable_prefix_caching and request.reads_prefix_cache:
            self._num_queried_tokens += request.num_tokens
            self._num_hit_tokens += num_hit
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit

    def _advance(self, scheduled: list[Request], num_scheduled_tokens: dict[str, int]) -> None:
        """Count the step's tokens as computed; both arguments are in the same order."""
        for request, num_new in zip(scheduled, num_scheduled_tokens.values(), strict=True):
            request.num_computed_tokens += num_new

    # ---- what came of a step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in the tokens of a step, the oldest in flight first; end the requests that they end."""
        if scheduler_output.num_scheduled_tokens:
            oldest = self._in_flight.popleft()
            assert scheduler_output is oldest, "steps are taken in in the order in which they were scheduled"
        outputs = EngineCoreOutputs(finished=self._unreported)
        self._unreported = {}
        ended: list[tuple[Request, RequestStatus]] = []
        sampled, logprobs = model_runner_output.sampled_token_ids, model_runner_output.logprobs
        for request_id, part in model_runner_output.prompt_logprobs.items():
            if request_id in self.requests:
                outputs.prompt_logprobs[request_id] = part
        requests, append_token = self.requests, self._append_token
        request_ids, new_token_ids = outputs.request_ids, outputs.new_token_ids
        for request_id in scheduler_output.num_scheduled_tokens:
            token_id, request = sampled.get(request_id), requests.get(request_id)
            if token_id is None or request is None:
                continue  # the prompt is not finished, or the request ended while the step was in flight
            if request.grammar is not None and request.grammar.refusal is not None:
                ended.append((request, RequestStatus.FINISHED_ERROR))
                outputs.finished[request_id] = FinishedRequest("error", request.grammar.refusal)
                continue  # the token is no part of the text: vLLM shows it, though its grammar does not allow it
            append_token(request, token_id)
            request_ids.append(request_id)
            new_token_ids.append(token_id)
            if logprobs and request_id in logprobs:
                outputs.logprobs[request_id] = logprobs[request_id]
            num_tokens = request.num_tokens
            if num_tokens == request.num_prompt_tokens + 1:
                outputs.num_cached_tokens[request_id] = request.num_cached_tokens
            if token_id in request.stop_tokens or num_tokens >= request.max_num_tokens or request.checks_every_token:
                status = check_stop(request)
                if status is not None:
                    ended.append((request, status))
                    outputs.finished[request_id] = FinishedRequest(status.finish_reason, request.stop_reason)
        self._end(ended)
        return outputs

    def make_stats(self) -> SchedulerStats:
        """The present state in numbers."""
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting) + len(self.skipped),
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=self._num_queried_tokens,
            prefix_cache_hits=self._num_hit_tokens,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

    def _append_token(self, request: Request, token_id: int) -> None:
        """Take in one sampled token."""
        request.append_token(token_id)

    def _end(self, ended: list[tuple[Request, RequestStatus]]) -> None:
        """Take requests out of the scheduler, in order, and their blocks back; the next step tells the batch."""
        if any(request.status is RequestStatus.RUNNING for request, _ in ended):
            gone = {request.request_id for request, _ in ended}
            self.running = [request for request in self.running if request.request_id not in gone]
        for request, status in ended:
            if request.status is not RequestStatus.RUNNING:
                (self.skipped if request in self.skipped else self.waiting).remove(request)
            if request.grammar is not None:
                request.grammar.close()
                del self._with_grammar[request.request_id]
            self.kv.free(request)
            request.status = status
            del self.requests[request.request_id]
            self._finished_ids.add(request.request_id)
            if request.num_tokens > self.kv.num_slots:
                logger.warning(
                    "Request %s ends with %d output tokens: with its prompt of %d it fills the KV pool of %d slots.",
                    request.request_id,
                    request.num_output_tokens,
                    request.num_prompt_tokens,
                    self.kv.num_slots,
                )


def _grammar(request: Request) -> RequestGrammar:
    assert request.grammar is not None
    return request.grammar


def make_scheduler(
    config: SchedulerConfig, cache_config: CacheConfig, bucket_policy: BucketPolicy | None = None
) -> Scheduler:
    """The scheduler that a configuration asks for."""
    from scheduler.async_scheduler import AsyncScheduler  # which derives from this module's class

    return (AsyncScheduler if config.async_scheduling else Scheduler)(config, cache_config, bucket_policy)
