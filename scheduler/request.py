"""A request as the scheduler sees it: its tokens, how far they are computed, and the blocks that hold them."""

from array import array
from collections.abc import Sequence
from enum import IntEnum

from scheduler.block_hash import root_digest
from scheduler.grammar import RequestGrammar
from scheduler.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Where a request stands; everything above PREEMPTED is an end."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str:
        """The word that the caller reads; only for a finished status."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}


class Request:
    """State of one request. The scheduler moves it on; the KV manager owns the four block fields.

    Attributes:
      token_ids: prompt and outputs as int32, an eighth of a list's memory; grows by append_token only.
      num_tokens: len(token_ids), kept as a number because every step reads it.
      max_num_tokens: tokens at which the request ends with "length"; set when it is added to a scheduler.
      num_computed_tokens: tokens whose keys and values exist once every dispatched step has run.
      num_output_placeholders: tokens sampled by steps in flight, not known here yet (async scheduling).
      num_cached_tokens: prompt tokens found in the prefix cache at the first admission; -1 before.
      num_lost_tokens: tokens that were computed before the last pre-emption.
      stop_tokens: ids that end the request: EOS unless ignored, and stop_token_ids.
      grammar: what its text must be, or None; its next token is sampled only once the last one is known here, though
        its model may run before.
      checks_every_token: any token may end it, not only a stop token or the last one.
      block_ids: blocks that hold its tokens, in order; empty while it waits.
      block_hashes: digests of its full blocks, as far as they were asked for.
      num_hashed_blocks: leading blocks known to the prefix cache under their hash.
      num_ready_tokens: it may grow to so many tokens with nothing to do for the KV manager.

    Raises:
      ValueError: the prompt or the cache salt is empty, or an id is outside int32.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "checks_every_token",
        "eos_token_id",
        "grammar",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_lost_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_ready_tokens",
        "num_tokens",
        "priority",
        "request_id",
        "root_digest",
        "sampling_params",
        "status",
        "stop_reason",
        "stop_tokens",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_id: int | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: RequestGrammar | None = None,
    ) -> None:
        if len(prompt_token_ids) == 0:
            raise ValueError(f"The prompt of request {request_id!r} is empty; give at least 1 token.")
        if cache_salt == "":
            raise ValueError(f"cache_salt='' of request {request_id!r} must not be empty; None means no salt.")
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.eos_token_id = eos_token_id
        self.stop_tokens = frozenset(sampling_params.stop_token_ids or ())
        if eos_token_id is not None and not sampling_params.ignore_eos:
            self.stop_tokens |= {eos_token_id}
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.root_digest = root_digest(cache_salt)
        self.grammar = grammar
        self.checks_every_token = sampling_params.repetition_detection is not None

        self.status = RequestStatus.WAITING
        if grammar is not None:
            self.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.stop_reason: int | str | None = None
        self.token_ids = _as_int32(request_id, prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.max_num_tokens = 0
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.num_lost_tokens = 0

        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.num_ready_tokens = 0

    def append_token(self, token_id: int) -> None:
        """Add one output token."""
        self.token_ids.append(token_id)
        self.num_tokens += 1

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known here; those in flight are not counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def all_token_ids(self) -> list[int]:
        """A copy of prompt and outputs."""
        return self.token_ids.tolist()

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the outputs."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status.is_finished

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may stand in for its prompt; prompt logprobs need every position computed."""
        params = self.sampling_params
        if params.skip_reading_prefix_cache is None:
            return params.prompt_logprobs is None
        return not params.skip_reading_prefix_cache

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy: the smallest is the most urgent."""
        return (self.priority, self.arrival_time, self.request_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={len(self.block_ids)})"
        )


def _as_int32(request_id: str, token_ids: Sequence[int]) -> "array[int]":
    try:
        return array("i", token_ids)
    except OverflowError as error:
        raise ValueError(
            f"The prompt of request {request_id!r} holds an id outside int32; token ids are below the vocabulary size."
        ) from error
