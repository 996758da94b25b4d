"""OutputProcessor: the core's tokens become text and RequestOutputs; stop strings are found here."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.detokenizer import Detokenizer, NoDetokenizer, make_detokenizer
from jaxvllm.metrics import FrontEndStats
from jaxvllm.outputs import CompletionOutput, RequestMetrics, RequestOutput, StepOutputs
from scheduler.outputs import EngineCoreOutputs, FinishedRequest
from scheduler.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class CallerRequest:
    """One request as the caller made it, with the n completions it asked for.

    Attributes:
      request_id: the caller's id.
      params: as the caller gave them (n completions).
      internal_ids: of the completions that still run.
      final_outputs: of completions that ended, kept until all have (RequestOutputKind.FINAL_ONLY).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    internal_ids: set[str] = field(default_factory=set)
    final_outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class CompletionState:
    """One completion while it runs: its tokens, its text, and what the caller has seen of them.

    Attributes:
      is_silent: neither text nor caller waits for a single token: they are only collected.
    """

    request: CallerRequest
    index: int
    detokenizer: Detokenizer
    is_silent: bool
    last_token_time: float | None = None
    token_ids: list[int] = field(default_factory=list)
    num_sent_tokens: int = 0


class OutputProcessor:
    """Turns EngineCoreOutputs into RequestOutputs. Outputs for requests that it does not know are dropped."""

    def __init__(self, tokenizer: Tokenizer | None, stats: FrontEndStats) -> None:
        self._tokenizer = tokenizer
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
        for index, child in enumerate(children):
            detokenizer = make_detokenizer(self._tokenizer, request.prompt_token_ids, child.sampling_params)
            is_final_only = request.params.output_kind is RequestOutputKind.FINAL_ONLY
            is_silent = is_final_only and isinstance(detokenizer, NoDetokenizer)
            self._completions[child.request_id] = CompletionState(request, index, detokenizer, is_silent)
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
                del self._completions[internal_id]

    def process_outputs(self, outputs: EngineCoreOutputs) -> StepOutputs:
        """Take in one step's tokens and ends.

        Returns: the RequestOutputs to hand out, and the internal ids that the core must abort: a stop string ended
        them.
        """
        now = time.time()
        result = StepOutputs()
        for internal_id, num_cached_tokens in outputs.num_cached_tokens.items():
            self._note_first_token(internal_id, now, num_cached_tokens)
        for internal_id, token_id in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
            state = self._completions.get(internal_id)
            if state is None:
                continue  # ended by a stop string, or dropped, while the step ran
            state.token_ids.append(token_id)
            state.last_token_time = now
            self._stats.num_generation_tokens += 1
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
        return result

    def _note_first_token(self, internal_id: str, now: float, num_cached_tokens: int) -> None:
        state = self._completions.get(internal_id)
        if state is None or state.request.metrics.first_token_time is not None:
            return
        state.request.num_cached_tokens = num_cached_tokens
        state.request.metrics.first_token_time = now
        self._stats.num_prompt_tokens += len(state.request.prompt_token_ids)

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
            request.internal_ids.discard(internal_id)
            if not request.internal_ids:
                del self._requests[request.request_id]
                request.metrics.finished_time = now
            self._stats.count_finished(finished.finish_reason)
        elif kind is RequestOutputKind.FINAL_ONLY:
            return
        request.metrics.last_token_time = state.last_token_time or request.metrics.last_token_time
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
                metrics=request.metrics,
                num_cached_tokens=request.num_cached_tokens,
            )
        )


def _completion(state: CompletionState, finished: FinishedRequest | None, kind: RequestOutputKind) -> CompletionOutput:
    is_delta = kind is RequestOutputKind.DELTA
    text = state.detokenizer.next_text(finished is not None, is_delta)
    if is_delta:
        token_ids = state.token_ids[state.num_sent_tokens :]
        state.num_sent_tokens = len(state.token_ids)
    else:
        token_ids = state.token_ids if finished is not None else state.token_ids.copy()
    return CompletionOutput(
        index=state.index,
        text=text,
        token_ids=token_ids,
        finish_reason=finished.finish_reason if finished is not None else None,
        stop_reason=finished.stop_reason if finished is not None else None,
    )
