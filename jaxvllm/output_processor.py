"""OutputProcessor: the core's tokens become text and RequestOutputs; stop strings are found here."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.detokenizer import Detokenizer, NoDetokenizer, make_detokenizer
from jaxvllm.logprobs import LogprobCollector, PromptLogprobCollector, PromptLogprobs, TokenTexts
from jaxvllm.metrics import FrontEndStats, RequestTimes
from jaxvllm.outputs import CompletionOutput, RequestMetrics, RequestOutput, StepOutputs
from scheduler.outputs import EngineCoreOutputs, FinishedRequest, TokenLogprobs
from scheduler.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class CallerRequest:
    """One request as the caller made it, with the n completions it asked for.

    Attributes:
      request_id: the caller's id.
      params: as the caller gave them (n completions).
      internal_ids: of the completions that still run.
      final_outputs: of completions that ended, kept until all have (RequestOutputKind.FINAL_ONLY).
      max_num_generated: tokens of the longest completion that has ended.
      prompt_logprobs: None if they were not asked for; the first completion brings them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    internal_ids: set[str] = field(default_factory=set)
    final_outputs: list[CompletionOutput] = field(default_factory=list)
    max_num_generated: int = 0
    num_cached_tokens: int | None = None
    prompt_logprobs: PromptLogprobCollector | None = None

    def next_prompt_logprobs(self) -> PromptLogprobs | None:
        """What the next output shows of them: all once they are complete, but only once as DELTA."""
        collector = self.prompt_logprobs
        if collector is None or (collector.is_sent and self.params.output_kind is RequestOutputKind.DELTA):
            return None
        found = collector.result()
        collector.is_sent = found is not None
        return found


@dataclass(slots=True)
class CompletionState:
    """One completion while it runs: its tokens, its text, and what the caller has seen of them.

    Attributes:
      is_silent: neither text nor caller waits for a single token: they are only collected.
      max_tokens: of this completion; set by the input processor where the caller did not.
      last_token_ts: time.monotonic() of the core when it had the newest token; 0.0 before the first.
      logprobs: None if they were not asked for.
    """

    request: CallerRequest
    index: int
    detokenizer: Detokenizer
    is_silent: bool
    max_tokens: int
    times: RequestTimes = field(default_factory=RequestTimes)
    last_token_ts: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    num_sent_tokens: int = 0
    num_counted_tokens: int = 0
    logprobs: LogprobCollector | None = None


class OutputProcessor:
    """Turns EngineCoreOutputs into RequestOutputs. Outputs for requests that it does not know are dropped."""

    def __init__(self, tokenizer: Tokenizer | None, stats: FrontEndStats) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._stats = stats
        self._completions: dict[str, CompletionState] = {}  # by internal id
        self._requests: dict[str, CallerRequest] = {}  # by the caller's id

    def has_unfinished_requests(self) -> bool:
        """Whether any request runs."""
        return bool(self._requests)

    def num_unfinished_requests(self) -> int:
        """How many of the caller's requests run."""
        return len(self._requests)

    def is_running(self, request_id: str) -> bool:
        """Whether the caller's request_id is in use."""
        return request_id in self._requests

    def add_request(self, request: CallerRequest, children: list[EngineCoreRequest]) -> None:
        """Follow a request; children are its completions, in index order."""
        self._requests[request.request_id] = request
        params = request.params
        texts = self._texts if params.detokenize else None
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = PromptLogprobCollector(request.prompt_token_ids, texts, params.flat_logprobs)
        for index, child in enumerate(children):
            detokenizer = make_detokenizer(self._tokenizer, request.prompt_token_ids, child.sampling_params)
            is_final_only = request.params.output_kind is RequestOutputKind.FINAL_ONLY
            is_silent = is_final_only and isinstance(detokenizer, NoDetokenizer)
            max_tokens = child.sampling_params.max_tokens or 0
            state = CompletionState(request, index, detokenizer, is_silent, max_tokens)
            if params.num_sample_logprobs is not None:
                state.logprobs = LogprobCollector(texts, params.flat_logprobs)
            self._completions[child.request_id] = state
            request.internal_ids.add(child.request_id)

    def internal_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The running completions of the caller's requests; unknown and finished requests have none."""
        found = (self._requests[i] for i in request_ids if i in self._requests)
        return [internal_id for request in found for internal_id in sorted(request.internal_ids)]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests at once: whatever the core still says about them goes unheard."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            for internal_id in request.internal_ids if request else ():
                self._count_finished(self._completions.pop(internal_id), "abort", time.time())

    def process_outputs(self, outputs: EngineCoreOutputs) -> StepOutputs:
        """Take in one step's tokens and ends.

        Returns: the RequestOutputs to hand out, and the internal ids that the core must abort: a stop string ended
        them.
        """
        now, timestamp = time.time(), outputs.timestamp
        result = StepOutputs()
        last_times: dict[float, int] = {}  # few: most tokens of a step follow those of the step before
        num_prompt_tokens = self._note_times(outputs, now)
        for internal_id, part in outputs.prompt_logprobs.items():
            state = self._completions.get(internal_id)
            if state is not None and state.request.prompt_logprobs is not None:
                state.request.prompt_logprobs.add(part)
        for internal_id, token_id in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
            state = self._completions.get(internal_id)
            if state is None:
                continue  # ended by a stop string, or dropped, while the step ran
            if state.logprobs is not None:
                state.logprobs.add(TokenLogprobs.unpack(outputs.logprobs[internal_id]), state.token_ids)
            state.token_ids.append(token_id)
            last_times[state.last_token_ts] = last_times.get(state.last_token_ts, 0) + 1
            state.last_token_ts = timestamp
            if state.is_silent:
                continue  # the hot path of a batch; its end comes below
            finished = outputs.finished.get(internal_id)
            stop_string = state.detokenizer.update(token_id, finished.finish_reason if finished else None)
            if stop_string is not None:
                if finished is None:
                    result.aborts.append(internal_id)
                finished = FinishedRequest("stop", stop_string)
            self._emit(result, internal_id, state, finished, now)
        for internal_id, finished in outputs.finished.items():
            state = self._completions.get(internal_id)
            if state is not None:  # a silent one, or an end that brings no token: an abort, an error
                state.detokenizer.finish()
                self._emit(result, internal_id, state, finished, now)
        self._stats.count_step(timestamp, num_prompt_tokens, last_times)
        return result

    def _note_times(self, outputs: EngineCoreOutputs, now: float) -> int:
        """Take in when requests were queued, scheduled and answered; returns the prompt tokens of the latter."""
        num_prompt_tokens = 0
        for internal_id, (queued_ts, scheduled_ts) in outputs.request_times.items():
            state = self._completions.get(internal_id)
            if state is not None:
                state.times.queued_ts, state.times.scheduled_ts = queued_ts, scheduled_ts
        for internal_id, num_cached_tokens in outputs.num_cached_tokens.items():
            state = self._completions.get(internal_id)
            if state is None:
                continue
            request, times = state.request, state.times
            times.first_token_ts = outputs.timestamp
            latency_s = now - request.metrics.arrival_time
            if request.num_cached_tokens is None:  # the first of its completions
                request.num_cached_tokens = num_cached_tokens
                request.metrics.queued_ts, request.metrics.scheduled_ts = times.queued_ts, times.scheduled_ts
                request.metrics.first_token_ts = outputs.timestamp
                request.metrics.first_token_latency = latency_s
            self._stats.count_first_token(latency_s, len(request.prompt_token_ids), num_cached_tokens)
            num_prompt_tokens += len(request.prompt_token_ids)
        return num_prompt_tokens

    def _count_finished(self, state: CompletionState, reason: str, now: float) -> None:
        request, num_generated = state.request, len(state.token_ids)
        state.times.last_token_ts = state.last_token_ts
        self._stats.count_finished(
            reason,
            now - request.metrics.arrival_time,
            state.times,
            len(request.prompt_token_ids),
            num_generated,
            state.max_tokens,
        )
        request.max_num_generated = max(request.max_num_generated, num_generated)

    def _emit(
        self,
        result: StepOutputs,
        internal_id: str,
        state: CompletionState,
        finished: FinishedRequest | None,
        now: float,
    ) -> None:
        """Add what the caller is to see of this completion now, and let go of it if it has ended."""
        request = state.request
        kind = request.params.output_kind
        if finished is not None:
            del self._completions[internal_id]
            self._count_finished(state, finished.finish_reason, now)
            request.internal_ids.discard(internal_id)
            if not request.internal_ids:
                del self._requests[request.request_id]
                self._stats.count_request_finished(request.params.n, request.max_num_generated)
        elif kind is RequestOutputKind.FINAL_ONLY:
            return
        metrics = request.metrics
        metrics.last_token_ts = max(metrics.last_token_ts, state.last_token_ts)
        metrics.num_generation_tokens += len(state.token_ids) - state.num_counted_tokens
        state.num_counted_tokens = len(state.token_ids)
        completion = _completion(state, finished, kind)
        outputs = [completion]
        if kind is RequestOutputKind.FINAL_ONLY:
            request.final_outputs.append(completion)
            if request.internal_ids:
                return
            outputs = sorted(request.final_outputs, key=lambda output: output.index)
        result.request_outputs.append(
            RequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=request.prompt_token_ids,
                outputs=outputs,
                finished=not request.internal_ids,
                prompt_logprobs=request.next_prompt_logprobs(),
                metrics=request.metrics,
                num_cached_tokens=request.num_cached_tokens,
            )
        )


def _completion(state: CompletionState, finished: FinishedRequest | None, kind: RequestOutputKind) -> CompletionOutput:
    is_delta = kind is RequestOutputKind.DELTA
    text = state.detokenizer.next_text(finished is not None, is_delta)
    first = state.num_sent_tokens if is_delta else 0
    is_whole = finished is not None and not is_delta
    token_ids = state.token_ids if is_whole else state.token_ids[first:]
    logprobs = state.logprobs and (state.logprobs.positions if is_whole else state.logprobs.positions[first:])
    if is_delta:
        state.num_sent_tokens = len(state.token_ids)
    return CompletionOutput(
        index=state.index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=state.logprobs and state.logprobs.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=finished.finish_reason if finished is not None else None,
        stop_reason=finished.stop_reason if finished is not None else None,
    )
