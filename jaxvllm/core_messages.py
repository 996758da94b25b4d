"""What crosses the border between the front end and the engine core: plain data, msgpack when they are processes."""

from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxvllm.config import EngineConfig
from jaxvllm.distribution import Distribution
from scheduler.outputs import SchedulerStats
from scheduler.sampling_params import SamplingParams

# A message is one frame, so that an interrupt cannot tear it: one of these bytes, then the msgpack of what is named.
ADD = b"A"  # list[EngineCoreRequest]
ABORT = b"X"  # list[str]
UTILITY = b"U"  # UtilityCall one way, UtilityResult the other
SHUTDOWN = b"S"  # nothing
READY = b"R"  # EngineCoreInfo
OUTPUTS = b"O"  # scheduler.outputs.EngineCoreOutputs
DEAD = b"D"  # CoreFailure


UtilityMethod = Literal["reset_prefix_cache", "metrics"]


@dataclass(slots=True)
class EngineCoreRequest:
    """A request as the core takes it: tokenised, validated, complete.

    Attributes:
      request_id: internal id, unique for ever.
      prompt_token_ids: int32 (type code "i"): one piece of memory, where a list would be decoded number by number.
      sampling_params: n is 1, max_tokens and seed are set, stop_token_ids holds the model's further EOS ids.
      eos_token_id: the primary EOS; None: nothing but stop_token_ids ends the text.
      arrival_time: seconds since the epoch.
      cache_salt: requests share cached blocks only with those of the same salt.
    """

    request_id: str
    prompt_token_ids: "array[int]"
    sampling_params: SamplingParams
    eos_token_id: int | None = None
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class EngineCoreInfo:
    """What a started core tells the front end. num_blocks counts the null block."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_kv_tokens(self) -> int:
        """How many tokens the KV pool holds."""
        return (self.num_blocks - 1) * self.block_size


@dataclass(slots=True)
class CoreMetrics:
    """The state of a core now.

    Attributes:
      scheduler: its requests and blocks.
      device: what Executor.metrics() says.
      step_host_time, step_wait_time: see CoreClock.
    """

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    device: dict[str, float] = field(default_factory=dict)
    step_host_time: Distribution = field(default_factory=lambda: Distribution(()))
    step_wait_time: Distribution = field(default_factory=lambda: Distribution(()))


@dataclass(slots=True)
class UtilityCall:
    """A call outside the flow of requests."""

    call_id: int
    method: UtilityMethod


@dataclass(slots=True)
class UtilityResult:
    """The answer to UtilityCall call_id."""

    call_id: int
    value: Any


@dataclass(slots=True)
class CoreFailure:
    """Why the core died. kind is the exception's class name."""

    kind: str
    message: str
    traceback: str


@dataclass(slots=True)
class CoreStart:
    """The first line that the core's process reads from its standard input, as JSON.

    The pipe stays open behind it: its end tells the core that the front end is gone.
    """

    requests_address: str
    outputs_address: str
    parent_pid: int
    config: EngineConfig
    log_level: str = "INFO"
    sys_path: list[str] = field(default_factory=list)


def encode_array(value: Any) -> memoryview:
    """For msgspec's encoders, which know no arrays: an int32 array as its bytes."""
    if isinstance(value, array) and value.typecode == "i":
        return memoryview(value).cast("B")
    raise NotImplementedError(f"{type(value).__name__} is no type of message")


def decode_array(kind: Any, value: bytes) -> "array[int]":
    """For msgspec's decoders: the counterpart of encode_array, on the same machine."""
    assert kind is array or getattr(kind, "__origin__", None) is array, kind
    return array("i", value)
