"""What crosses the scheduler's borders: a step to run, what the step gave, what the caller is told.

All of it is columns (parallel lists), not one object a request: a steady decode step creates nothing per request
that the garbage collector has to follow, and a message is a few flat lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING

from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler.grammar import RequestGrammar, StepMasks  # NumPy: slow to import, and no front end needs it


@dataclass(slots=True)
class NewRequestData:
    """A request that the batch has not seen yet, in full.

    Attributes:
      prompt_token_ids: the prompt.
      block_ids: all blocks of the request, prefix hits first.
      num_computed_tokens: tokens whose KV is in those blocks already (a prefix hit).
      eos_token_id: masked, like the stop ids, until min_tokens is reached (with ignore_eos too).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    eos_token_id: int | None = None


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the batch knows, as columns of differences; all lists are parallel to request_ids.

    Attributes:
      new_block_ids: blocks appended in this step, or None; for a resumed request the whole list, which replaces.
      num_computed_tokens: before this step's tokens.
      resumed_request_ids: those that come back from pre-emption.
      all_token_ids: prompt and outputs of resumed requests.
    """

    request_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_request_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """One step to run.

    Attributes:
      num_scheduled_tokens: request id -> tokens; order = running requests in list order, then admitted ones.
      finished_request_ids: ended since the last step: their rows are free.
      preempted_request_ids: pre-empted in this step: their rows are free.
      grammars: of the requests with a grammar that sample in this step.
      masks: the tokens that these may sample, in their order; set by whoever has the step run.
    """

    scheduled_new_requests: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_requests: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_request_ids: set[str] = field(default_factory=set)
    preempted_request_ids: set[str] = field(default_factory=set)
    grammars: "dict[str, RequestGrammar]" = field(default_factory=dict)
    masks: "StepMasks | None" = None


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
      token_ids: the token that is there, then the most likely ones in order, or the request's logprob_token_ids.
      logprobs: of those tokens.
      rank: of the token that is there: how many are at least as likely.
      is_ranked: the tokens behind the first have the ranks 1, 2, ...; False: they are logprob_token_ids.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int
    is_ranked: bool = True

    def pack(self) -> bytes:
        """As an int32 of each of rank, is_ranked and the token ids, and a float32 of each logprob."""
        layout = _packed_layout(len(self.token_ids))
        return layout.pack(self.rank, self.is_ranked, *self.token_ids, *self.logprobs)

    @staticmethod
    def unpack(packed: bytes) -> "TokenLogprobs":
        """What pack() made, or read_step (scheduler.logprob_columns)."""
        count = len(packed) // 8 - 1
        rank, is_ranked, *entries = _packed_layout(count).unpack(packed)
        return TokenLogprobs(entries[:count], entries[count:], rank, bool(is_ranked))


@cache
def _packed_layout(count: int) -> Struct:
    return Struct(f"={2 + count}i{count}f")


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens that one step computed; the first of them is token `start` of the prompt."""

    start: int
    positions: list[TokenLogprobs]


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step gave, by request.

    Attributes:
      sampled_token_ids: the token; a request whose prompt is not finished has no entry.
      logprobs: of that token, where they were asked for, as TokenLogprobs packed: bytes are nothing that the loop
        would have to make lists of, encode, or hand to the garbage collector.
      prompt_logprobs: of the prompt tokens in the step, where they were asked for.
    """

    sampled_token_ids: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


@dataclass(slots=True)
class FinishedRequest:
    """How a request ended: finish_reason is stop, length, abort, error or repetition.

    stop_reason is the stop token's id or the stop string, "repetition_detected", what the error is, or None.
    """

    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(slots=True)
class SchedulerStats:
    """The state of a scheduler at a moment, for logs and metrics. kv_cache_usage is a fraction of the usable blocks."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0  # tokens looked up since the start
    prefix_cache_hits: int = 0  # tokens found since the start
    num_preemptions: int = 0  # since the start
    num_recomputed_tokens: int = 0  # since the start: computed again after a pre-emption, prefix hits left out


@dataclass(slots=True)
class EngineCoreOutputs:
    """What one step gives the front end.

    Attributes:
      request_ids, new_token_ids: parallel; one entry for each request that got a token.
      num_cached_tokens: for requests whose first token this is: prompt tokens found in the prefix cache.
      logprobs: of the new tokens, by request, where they were asked for, as in ModelRunnerOutput.
      prompt_logprobs: of prompt tokens, as far as the step computed them; the rest of them came or comes with other
        steps, all of them before or with the first token.
      finished: those that ended in this step, with a last token above or (abort, error) without.
      timestamp: when the core had this, in seconds of time.monotonic(); set by the core, as the next one is.
      request_times: when a request was queued and when first scheduled (0.0: never), with its first token or its end.
    """

    request_ids: list[str] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    finished: dict[str, FinishedRequest] = field(default_factory=dict)
    logprobs: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    timestamp: float = 0.0
    request_times: dict[str, tuple[float, float]] = field(default_factory=dict)
