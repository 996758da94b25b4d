"""EngineCore: schedule, execute, update, with two or three steps in flight. `python -m jaxvllm.core` is its process."""

import contextlib
import importlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from jaxvllm.config import EngineConfig, ModelLoadConfig
from jaxvllm.core_clock import CoreClock
from jaxvllm.core_messages import CoreMetrics, EngineCoreInfo, EngineCoreRequest
from scheduler.buckets import BucketPolicy
from scheduler.config import CacheConfig
from scheduler.outputs import EngineCoreOutputs, FinishedRequest, ModelRunnerOutput, SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import make_scheduler

if TYPE_CHECKING:
    from jaxvllm.structured_output.manager import GrammarManager, TokenGrammar


# A third step is planned ahead on a GPU whose loop is late (see EngineCore._depth). Qwen3-0.6B on one H200: one request
# takes 0.88 ms a token with it and 1.05 without, 64 requests 1% less, 256 the same.
MAX_STEPS_IN_FLIGHT = 3


class StepHandle(Protocol):
    """A step that the device has been given, or will be."""

    @property
    def dispatch_s(self) -> float:
        """Seconds that giving it to the device took, known after wait(); 0.0 where the caller's thread did it."""
        ...

    def wait(self) -> ModelRunnerOutput:
        """The step's tokens; blocks until they are on the host. Raises what kept it, or one before it, from running."""
        ...


class Executor(Protocol):
    """What the core asks of the device side: it plans a scheduled step and runs it."""

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        """Load the model, make the KV pool, compile what is compiled ahead. Returns its blocks, null block included.

        Args:
          meanwhile: other work of the start, to be called once, in a thread, when this one waits for disk and compiler.

        Raises: ValueError for a model that cannot be served.
        """
        ...

    @property
    def bucket_policy(self) -> BucketPolicy | None:
        """What steps are padded to, known once it is initialized; None: to nothing."""
        ...

    def execute(self, scheduler_output: SchedulerOutput) -> StepHandle | None:
        """Start a step without waiting for it, nor for the one before it.

        Called for every SchedulerOutput, in order. One without tokens only says which requests ended: then None.
        Its masks are known later, and this call must not wait for them: a thread does, behind the step's model.
        What goes wrong may show in the step's wait() only: the results of the steps before it are taken first then.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers of the device side by name, as Prometheus writes them: 'steps_total{kind="decode"}'; may be empty."""
        ...

    def shutdown(self) -> None:
        """Free the device."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """The Executor that config.executor ("module:function") makes."""
    module, _, function = config.executor.partition(":")
    return getattr(importlib.import_module(module), function)(config)


class EngineCore:
    """Owns the scheduler and the executor, and moves requests through them step by step.

    Raises: ValueError if the KV pool is too small for one request of max_model_len tokens.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._executor = executor
        self._model = config.model
        self._grammars: GrammarManager | None = None
        self._prepared_grammars: GrammarManager | None = None
        memory, max_model_len = config.memory, config.scheduler.max_model_len
        if memory.num_blocks is not None:  # known before anything is loaded
            _check_pool(EngineCoreInfo(memory.num_blocks, memory.block_size, max_model_len))
        # What would stop serving for a moment is done ahead on a GPU, as compiling is.
        num_blocks = executor.initialize(self._prepare_grammars if config.device == "gpu" else lambda: None)
        self.info = EngineCoreInfo(num_blocks, memory.block_size, max_model_len)
        _check_pool(self.info)
        self._scheduler = make_scheduler(
            config.scheduler,
            CacheConfig(memory.block_size, num_blocks, memory.enable_prefix_caching),
            executor.bucket_policy,
        )
        self._is_async = config.scheduler.async_scheduling
        self._max_depth = MAX_STEPS_IN_FLIGHT if config.device == "gpu" else 2
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._num_results = 0  # steps whose result has been taken
        self._rejected: dict[str, FinishedRequest] = {}
        self._clock = CoreClock()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that the scheduler refuses ends with finish reason "error" in the next outputs."""
        grammar: TokenGrammar | None = None
        if request.sampling_params.structured_outputs is not None:
            grammar = self._grammar_manager().add(request.sampling_params.structured_outputs)
        try:
            self._scheduler.add_request(
                Request(
                    request.request_id,
                    request.prompt_token_ids,
                    request.sampling_params,
                    eos_token_id=request.eos_token_id,
                    arrival_time=request.arrival_time,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    grammar=grammar,
                )
            )
            self._clock.note_queued(request.request_id)
        except ValueError as error:
            if grammar is not None:
                grammar.close()
            self._rejected[request.request_id] = FinishedRequest("error", str(error))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests early; unknown and finished ids are ignored."""
        self._scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_work(self) -> bool:
        """Whether step() has something to do."""
        return bool(self._in_flight or self._rejected or self._scheduler.has_requests())

    def step(self, read_inputs: Callable[[], None] = lambda: None) -> EngineCoreOutputs | None:
        """Schedule and dispatch a step, and take the result of the oldest one unless more may be dispatched first.

        Args:
          read_inputs: takes in what the callers have sent; called between the wait for a result and its use, so that
            an abort that came meanwhile counts. Never called twice, and not in a call that only fills the pipeline.

        Returns: what the callers are to hear; None if the step only filled the pipeline.
        """
        start, num_results = time.monotonic(), self._num_results
        outputs = self._step(read_inputs)
        self._clock.end_call(start, outputs, self._num_results > num_results)
        return outputs

    def _step(self, read_inputs: Callable[[], None]) -> EngineCoreOutputs | None:
        if not self._in_flight:
            self._clock.is_late = False  # that was measured on other steps
        depth = self._depth()
        if len(self._in_flight) < depth and self._scheduler.has_requests():
            scheduler_output = self._scheduler.schedule()
            if scheduler_output.grammars:
                masks = self._grammar_manager().begin_step(_grammars_of(scheduler_output))
                scheduler_output.masks = masks
            self._clock.note_scheduled(scheduler_output.scheduled_new_requests)
            handle = self._executor.execute(scheduler_output)
            if handle is not None:
                self._in_flight.append((scheduler_output, handle))
                if len(self._in_flight) < depth:
                    return self._with_rejected(None)
            elif not self._in_flight:
                if self._grammars is not None:
                    self._grammars.wait()
                read_inputs()
                return self._update(scheduler_output, ModelRunnerOutput())
        if not self._in_flight:
            return self._with_rejected(None)
        scheduler_output, handle = self._in_flight.popleft()
        result = self._clock.wait(handle)
        self._num_results += 1
        read_inputs()
        return self._update(scheduler_output, result)

    def _depth(self) -> int:
        """How many steps are in flight while the loop waits for the oldest one.

        The dispatcher keeps a third one until the oldest is done, and dispatches it while the loop takes in that one's
        result. It is there only where the device would wait for the loop otherwise, since new requests and the ends of
        others come into effect a step later with it. A CPU never waits: dispatching is work for the same cores.
        """
        if not self._is_async:
            return 1
        return self._max_depth if self._clock.is_late and not self._scheduler.has_grammars else 2

    def _update(self, scheduler_output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs | None:
        # First of all: the device may have run the next step's model, and waits for its masks.
        if scheduler_output.grammars:
            sampled = result.sampled_token_ids
            self._grammar_manager().end_step(
                _grammars_of(scheduler_output), [sampled[request_id] for request_id in scheduler_output.grammars]
            )
        if self._in_flight:
            masks = self._in_flight[0][0].masks
            if masks is not None:
                masks.open()  # its grammars know the tokens of all steps before it
        return self._with_rejected(self._scheduler.update_from_output(scheduler_output, result))

    def _grammar_manager(self) -> "GrammarManager":
        """Made for the first request that needs it: most engines never see one."""
        if self._grammars is None:
            self._grammars = self._prepared_grammars or _make_grammar_manager(self._model)
        return self._grammars

    def _prepare_grammars(self) -> None:
        """Make a manager that loads its vocabulary in a thread of its own. A failure shows in requests alone."""
        manager = _make_grammar_manager(self._model)
        manager.prepare()
        self._prepared_grammars = manager

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def metrics(self) -> CoreMetrics:
        """The state now, in numbers."""
        clock = self._clock
        return CoreMetrics(self._scheduler.make_stats(), self._executor.metrics(), clock.host_time, clock.wait_time)

    def shutdown(self) -> None:
        """Wait for what is in flight and free the device."""
        # A device thread that lets go of a step's buffers after Python's end takes the whole process down with abort().
        for scheduler_output, _ in self._in_flight:
            if scheduler_output.masks is not None:
                scheduler_output.masks.open()  # or it would never be dispatched
        while self._in_flight:
            _, handle = self._in_flight.popleft()
            with contextlib.suppress(Exception):  # nobody wants the result
                handle.wait()
        grammars = self._grammars or self._prepared_grammars
        if grammars is not None:
            grammars.shutdown()
        self._executor.shutdown()

    def _with_rejected(self, outputs: EngineCoreOutputs | None) -> EngineCoreOutputs | None:
        if self._rejected:
            outputs = outputs or EngineCoreOutputs()
            outputs.finished.update(self._rejected)
            self._rejected = {}
        return outputs


def _grammars_of(scheduler_output: SchedulerOutput) -> "list[TokenGrammar]":
    return list(scheduler_output.grammars.values())  # pyright: ignore[reportReturnType]  made by add_request


def _make_grammar_manager(model: ModelLoadConfig) -> "GrammarManager":
    from jaxvllm.structured_output.manager import make_grammar_manager  # slow, and most engines never need it

    return make_grammar_manager(model)


def _check_pool(info: EngineCoreInfo) -> None:
    if info.max_model_len > info.num_kv_tokens:
        raise ValueError(
            f"max_model_len={info.max_model_len} does not fit the KV cache, which holds {info.num_kv_tokens} tokens "
            f"({info.num_blocks - 1} blocks of {info.block_size}): lower it to at most {info.num_kv_tokens}, "
            "or enlarge the cache (kv_cache_memory_bytes, gpu_memory_utilization, num_gpu_blocks_override)."
        )


if __name__ == "__main__":
    from jaxvllm.core_process import main

    main()
