"""What the caller gets back: RequestOutput and CompletionOutput, with vLLM's fields."""

from dataclasses import dataclass, field

from jaxvllm.logprobs import PromptLogprobs, SampleLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request.

    Attributes:
      index: which of the request's n completions.
      text: the text; only the new piece for RequestOutputKind.DELTA. Empty without a detokenizer.
      token_ids: the ids that `text` was made from, a final stop token included even where its text is left out.
      cumulative_logprob: sum of the logprobs of all tokens so far; None without SamplingParams.logprobs.
      logprobs: one dict a token of `token_ids`, token id -> Logprob (or FlatLogprobs); None likewise.
      finish_reason: stop, length, abort, error or repetition; None while running.
      stop_reason: the stop string, or the id of the stop token; None for EOS. For finish_reason "error": the message.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """What happened to a request, under vLLM's names.

    Attributes:
      arrival_time: seconds since the epoch (time.time()).
      queued_ts, scheduled_ts, first_token_ts, last_token_ts: when the core queued it, first had it in a step, and had
        its tokens, in seconds of time.monotonic(); 0.0: has not happened. With n > 1: first of the first completion,
        last of the last one.
      first_token_latency: seconds from the arrival to the first token.
      num_generation_tokens: of all its completions.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or what is new of it (RequestOutputKind.DELTA).

    Attributes:
      request_id: as the caller gave it.
      prompt: the prompt's text; None when ids were given.
      prompt_logprobs: None for the first prompt token, a dict for each other one (or FlatLogprobs); None without
        SamplingParams.prompt_logprobs and until the prompt has been computed. RequestOutputKind.DELTA gives it once.
      finished: all completions of the request have ended.
      num_cached_tokens: prompt tokens found in the prefix cache; None before the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class StepOutputs:
    """What the front end makes of one EngineCoreOutputs.

    Attributes:
      request_outputs: for the caller.
      aborts: internal ids of requests that a stop string ended; the core still runs them.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
