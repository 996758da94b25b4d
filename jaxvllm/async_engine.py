"""AsyncEngine: requests from an event loop, each with its own stream of RequestOutputs."""

import asyncio
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Thread
from typing import Any

import msgspec

from jaxvllm.config import DEFAULT_STEP_TIMEOUT_S
from jaxvllm.core_messages import CoreMetrics, UtilityMethod, UtilityResult
from jaxvllm.core_reader import Inbox, Message, read_core, split_outputs
from jaxvllm.engine_args import EngineArgs
from jaxvllm.errors import EngineDeadError
from jaxvllm.input_processor import ProcessedRequest, Prompt
from jaxvllm.llm_engine import LLMEngine
from jaxvllm.metrics import Metric
from jaxvllm.model_info import ModelInfo
from jaxvllm.mp_client import MPClient
from jaxvllm.output_collector import OutputCollector
from jaxvllm.outputs import RequestOutput
from jaxvllm.tokenizer import Tokenizer
from scheduler.outputs import EngineCoreOutputs
from scheduler.sampling_params import SamplingParams

MAX_OUTPUTS_AT_ONCE = 128  # tokens turned into text before the event loop gets another turn
MAX_CHARS_AT_ONCE = 4096  # a longer prompt is tokenised, a longer conversation rendered in a thread
MAX_IDS_AT_ONCE = 65536
CHECK_INTERVAL_S = 1.0  # how often a core with requests is asked how it is


class AsyncEngine:
    """Serves the requests of one event loop; the engine core runs in a child process.

    A thread waits for what the core says; all else happens in the loop that makes the requests. Another loop may use
    the engine once no request of the first one runs; whatever else the first one still waits for is cancelled.

    Args:
      args: of the engine.
      step_timeout_s: a core with requests that answers nothing for so long is taken for dead.
      give_up: set by another thread, ends the wait for the core's start, and later the core: EngineDeadError.

    Raises: as LLMEngine.from_engine_args; NotImplementedError for multiprocess=False.
    """

    def __init__(
        self, args: EngineArgs, *, step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S, give_up: Event | None = None
    ) -> None:
        if not args.use_multiprocess:
            raise NotImplementedError(
                "AsyncEngine needs the core in a process of its own: leave out multiprocess=False "
                "(and JAXVLLM_MULTIPROCESS=0)."
            )
        self._engine = LLMEngine.from_engine_args(args, is_server=True, give_up=give_up)
        assert isinstance(self._engine.client, MPClient)
        self._client = self._engine.client
        self._step_timeout_s = step_timeout_s
        self._collectors: dict[str, tuple[OutputCollector, SamplingParams]] = {}
        self._backlog: deque[EngineCoreOutputs] = deque()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._deaths: set[asyncio.Future[EngineDeadError]] = set()
        self._dead_error: EngineDeadError | None = None
        self._is_checking = False
        self._asking: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="jaxvllm-tokenize")
        self._inbox = Inbox(weakref.WeakMethod(self._handle))
        reader = Thread(target=read_core, args=(self._client, self._inbox), name="jaxvllm-outputs", daemon=True)
        self._stop = weakref.finalize(self, _stop_engine, self._client, reader, self._threads)
        reader.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **kwargs: Any) -> "AsyncEngine":
        """The class under the name that vLLM's users call."""
        return cls(engine_args, **kwargs)

    @property
    def model(self) -> ModelInfo:
        """Sizes, ends and defaults of the model."""
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init=True."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens."""
        return self._engine.max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """How many requests wait or run."""
        return len(self._collectors)

    @property
    def is_running(self) -> bool:
        """Whether the core lives, as far as is known here."""
        return self._dead_error is None

    @property
    def errored(self) -> bool:
        """Whether the core has died."""
        return self._dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What the core died of; None while it lives."""
        return self._dead_error

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Serve one request; what it yields depends on sampling_params.output_kind.

        A consumer that stops (closes the generator, is cancelled) ends the request. Outputs that come while the
        consumer is busy are merged into one.

        Args:
          prompt: text, token ids, or a dict with prompt or prompt_token_ids and, if wanted, cache_salt.
          request_id: the caller's name for it; free again once the request has finished.
          priority: lower is served first, with scheduling_policy="priority".

        Raises:
          ValueError, NotImplementedError: a request that cannot be served; nothing was queued.
          EngineDeadError: the core died.
        """
        if lora_request is not None:
            raise NotImplementedError("lora_request is not supported: leave it out.")
        request = await self.process_request(request_id, prompt, sampling_params, priority=priority)
        async with contextlib.aclosing(self.stream([request])) as outputs:
            async for output in outputs:
                yield output

    async def process_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> ProcessedRequest:
        """Tokenise and validate a request without queueing it; as LLMEngine.process_request. Work is in a thread."""
        self.check_alive()
        process = partial(
            self._engine.process_request, request_id, prompt, params, arrival_time=arrival_time, priority=priority
        )
        # A grammar is compiled to see whether it can be: seconds with some.
        is_work = _is_long(prompt) or params.structured_outputs is not None
        return await self.run_in_thread(process) if is_work else process()

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids, a long one in a thread; as LLMEngine.tokenize."""
        tokenize = partial(self._engine.tokenize, text, add_special_tokens=add_special_tokens)
        return await self.run_in_thread(tokenize) if _is_long(text) else tokenize()

    async def run_in_thread[T](self, call: Callable[[], T]) -> T:
        """Run what would keep the event loop from its other work."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def stream(self, requests: Sequence[ProcessedRequest]) -> AsyncGenerator[RequestOutput]:
        """Queue requests that process_request made, all together, and yield their outputs until all have finished.

        Ends, errors and merging as in generate(); requests take turns.
        """
        collector = self._start(requests)
        unfinished = {request.caller.request_id for request in requests}
        try:
            while unfinished:
                output = await collector.get()
                if output.finished:
                    unfinished.discard(output.request_id)
                yield output
        finally:
            # Another request may have the name of one that has ended without this consumer.
            self._drop(i for i in unfinished if self._collectors.get(i, (None,))[0] is collector)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests early; unknown and finished ids are ignored. Their streams end with finish_reason "abort"."""
        if self._dead_error is None:
            with contextlib.suppress(EngineDeadError):  # which will be heard of in _handle
                self._engine.abort_request(request_id)

    async def abort_all(self) -> None:
        """End every request early, as abort() does."""
        await self.abort(list(self._collectors))

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no request runs; False if some still do after timeout_s. New ones are not kept out."""
        deadline = time.monotonic() + timeout_s
        while self._collectors and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._collectors

    async def check_health(self) -> None:
        """Raises: EngineDeadError if the core is dead."""
        self.check_alive()

    async def wait_until_dead(self) -> EngineDeadError:
        """Wait for the core's death; returns what it died of."""
        if self._dead_error is not None:
            return self._dead_error
        self._use_loop()
        death = asyncio.get_running_loop().create_future()
        self._deaths.add(death)
        try:
            return await death
        finally:  # a caller may stop to wait, and wait again, as often as it likes
            self._deaths.discard(death)

    async def get_metrics(self) -> list[Metric]:
        """What the engine has done so far; of a dead core, what it said last."""
        return self._engine.take_core_metrics(await self._core_metrics())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests are running."""
        return await self._call("reset_prefix_cache")

    async def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._engine.get_tokenizer()

    def shutdown(self) -> None:
        """End the core and free the device, and every request with an error; may be called again."""
        self._die(EngineDeadError("the engine has been shut down."))
        self._stop()

    def _start(self, requests: Sequence[ProcessedRequest]) -> OutputCollector:
        self.check_alive()
        self._use_loop()
        ids = dict.fromkeys(request.caller.request_id for request in requests)
        taken = next((i for i in ids if i in self._collectors), None)
        if taken is not None or len(ids) < len(requests):
            raise ValueError(
                f"request_id={taken or list(ids)!r} is in use: give every running request an id of its own."
            )
        collector = OutputCollector()
        try:
            self._engine.add_requests(requests)
        except EngineDeadError as error:
            raise self._dead_error or error from None
        for request in requests:
            self._collectors[request.caller.request_id] = (collector, request.caller.params)
        self._begin_checks()
        return collector

    def _drop(self, request_ids: Iterable[str]) -> None:
        running = [request_id for request_id in request_ids if self._collectors.pop(request_id, None)]
        if running and self._dead_error is None:
            with contextlib.suppress(EngineDeadError):  # which will be heard of in _handle
                self._engine.drop_requests(running)

    def check_alive(self) -> None:
        """Raises: EngineDeadError once the core is dead."""
        if self._dead_error is not None:
            raise self._dead_error.with_traceback(None)  # or it would keep the frames of all who ever heard it

    def _use_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._inbox.loop is loop:
            return
        old = self._inbox.loop
        if old is not None and not old.is_closed() and self._collectors:
            raise RuntimeError("AsyncEngine serves one event loop at a time, and requests of another one are running.")
        self._drop(list(self._collectors))
        self._backlog.clear()  # what is left of it was for them
        for future in filter(_is_waited_for, (*self._calls.values(), *self._deaths)):
            future.get_loop().call_soon_threadsafe(future.cancel)
        self._calls.clear()
        self._deaths.clear()
        self._is_checking = False
        self._inbox.use(loop)

    def _handle(self, message: Message) -> None:
        """Take in what the reader thread received; runs in the loop."""
        if isinstance(message, EngineDeadError):
            self._die(message)
        elif isinstance(message, UtilityResult):
            future = self._calls.pop(message.call_id, None)
            if future is not None and not future.done():
                future.set_result(message.value)
        else:
            was_busy = bool(self._backlog)
            self._backlog.extend(split_outputs(message, MAX_OUTPUTS_AT_ONCE))
            if not was_busy:
                self._handle_next()

    def _handle_next(self) -> None:
        """Hand out the oldest part of the backlog; the rest later, behind whatever else the loop has to do."""
        if not self._backlog:  # the engine died meanwhile
            return
        try:
            for output in self._engine.handle_outputs(self._backlog[0]):
                collector, params = self._collectors[output.request_id]
                collector.put(output, params.output_kind)
                if output.finished:
                    del self._collectors[output.request_id]
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:  # the streams would wait for ever: better all of them learn of it
            self._die(EngineDeadError(f"the engine's front end failed: {type(error).__name__}: {error}"))
            raise
        else:
            self._backlog.popleft()
            if self._backlog:
                asyncio.get_running_loop().call_soon(self._handle_next)

    def _die(self, error: EngineDeadError) -> None:
        if self._dead_error is not None:
            return
        self._dead_error = error
        collectors, self._collectors = self._collectors, {}
        self._engine.forget_requests(list(collectors))
        self._backlog.clear()
        loop = self._inbox.loop
        if loop is not None and not loop.is_closed():  # nobody waits in a closed one, and waking raises there
            for collector, _ in collectors.values():
                collector.fail(error)
        for future in filter(_is_waited_for, self._calls.values()):
            future.set_exception(error)
        for death in filter(_is_waited_for, self._deaths):
            death.set_result(error)

    async def _call(self, method: UtilityMethod) -> Any:
        self.check_alive()
        self._use_loop()
        call_id = self._client.start_call(method)
        self._calls[call_id] = future = asyncio.get_running_loop().create_future()
        return await future

    async def _core_metrics(self) -> CoreMetrics:
        try:
            return msgspec.convert(await self._call("metrics"), CoreMetrics)
        except EngineDeadError:
            return self._engine.last_core_metrics

    def _begin_checks(self) -> None:
        if not self._is_checking:
            self._is_checking = True
            asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        """Ask the core how it is, as long as it has requests."""
        if self._inbox.loop is not asyncio.get_running_loop():
            return  # the requests are another loop's, which has its own checks
        self._is_checking = bool(self._collectors) and self._dead_error is None
        if self._is_checking:
            self._asking = asyncio.get_running_loop().create_task(self._ask())  # the loop keeps no reference

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                await self.get_metrics()
        except TimeoutError:
            self._die(EngineDeadError(f"the engine core hangs: no step has ended for {self._step_timeout_s:g} s."))
            await self.run_in_thread(self._stop)
        else:
            asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check)


def _stop_engine(client: MPClient, reader: Thread, threads: ThreadPoolExecutor) -> None:
    client.stop_receiving()
    if reader.ident is not None:
        reader.join()
    client.shutdown()
    threads.shutdown(wait=False, cancel_futures=True)


def _is_waited_for(future: asyncio.Future[Any]) -> bool:
    return not future.done() and not future.get_loop().is_closed()


def _is_long(prompt: Prompt) -> bool:
    if isinstance(prompt, dict):
        return any(_is_long(prompt[key]) for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None)
    return hasattr(prompt, "__len__") and len(prompt) > (
        MAX_CHARS_AT_ONCE if isinstance(prompt, str) else MAX_IDS_AT_ONCE
    )


AsyncLLMEngine = AsyncEngine  # vLLM's names
AsyncLLM = AsyncEngine
