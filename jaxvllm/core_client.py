"""How the front end reaches the engine core: in this process, or in a child process over ZeroMQ."""

import builtins
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxvllm import core_messages as messages
from jaxvllm.config import EngineConfig, log_level
from jaxvllm.core_messages import (
    CoreFailure,
    CoreStart,
    EngineCoreInfo,
    EngineCoreRequest,
    UtilityCall,
    UtilityResult,
)
from jaxvllm.errors import EngineDeadError
from jaxvllm.interrupt import DeferredInterrupt
from scheduler.outputs import EngineCoreOutputs

if TYPE_CHECKING:
    from jaxvllm.core import EngineCore

DEATH_CHECK_MS = 100
SHUTDOWN_S = 3.0
MAX_SOCKET_DIR = 60  # an ipc path must stay below 108 characters


class CoreClient(Protocol):
    """The core as the front end sees it. Every method raises EngineDeadError once the core has died."""

    def wait_until_ready(self) -> EngineCoreInfo:
        """Block until the core serves; call once, first. Raises what its start raised (ValueError for a bad model)."""
        ...

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """Queue requests; does not wait."""
        ...

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests early; unknown and finished ids are ignored. Each that was running ends with reason abort."""
        ...

    def get_outputs(self) -> EngineCoreOutputs:
        """What comes next; blocks while requests are running."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests hold blocks."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of the device side."""
        ...

    def shutdown(self) -> None:
        """End the core and free the device; may be called again."""
        ...


def make_client(config: EngineConfig, multiprocess: bool) -> CoreClient:
    """Start a core: its process loads the model while the caller goes on (see wait_until_ready)."""
    return MPClient(config) if multiprocess else InprocClient(config)


class InprocClient:
    """The core in this process, stepped by get_outputs(): for debugging, and where msgspec or pyzmq are missing."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EngineCore | None = None
        self._failure: Exception | None = None

    def wait_until_ready(self) -> EngineCoreInfo:
        """See CoreClient."""
        self._config.apply_core_environment()
        from jaxvllm.core import EngineCore, make_executor  # a front end with a core process never imports the core

        self._core = EngineCore(self._config, make_executor(self._config))
        return self._core.info

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """See CoreClient."""
        for request in requests:
            self._alive().add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """See CoreClient."""
        self._alive().abort_requests(request_ids)

    def get_outputs(self) -> EngineCoreOutputs:
        """See CoreClient."""
        core = self._alive()
        outputs = None
        while outputs is None and core.has_work():
            try:
                with DeferredInterrupt():  # half a step would leave the scheduler and the device with two truths
                    outputs = core.step()
            except Exception as error:
                self._failure = error
                raise EngineDeadError(f"the engine core died: {type(error).__name__}: {error}") from error
        return outputs or EngineCoreOutputs()

    def reset_prefix_cache(self) -> bool:
        """See CoreClient."""
        return self._alive().reset_prefix_cache()

    def metrics(self) -> dict[str, float]:
        """See CoreClient."""
        return self._alive().metrics()

    def shutdown(self) -> None:
        """See CoreClient."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None

    def _alive(self) -> Any:
        if self._failure is not None:
            raise EngineDeadError(f"the engine core died: {self._failure}") from self._failure
        if self._core is None:
            raise EngineDeadError("the engine has been shut down.")
        return self._core


class MPClient:
    """The core in a child process (`python -m jaxvllm.core`). For one thread at a time."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ImportError(
                f"a core process needs msgspec and pyzmq ({error}): install them, or pass multiprocess=False."
            ) from error
        self._encode = msgspec.msgpack.encode
        self._decode = msgspec.msgpack.decode
        self._outputs_decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._pending: deque[EngineCoreOutputs] = deque()
        self._dead: str | None = None
        self._num_calls = 0
        parent = "/tmp" if len(tempfile.gettempdir()) > MAX_SOCKET_DIR else None
        folder = tempfile.mkdtemp(prefix="jaxvllm-", dir=parent)
        context = zmq.Context()
        self._requests, self._outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.SNDHWM, 0)
        self._outputs.setsockopt(zmq.RCVHWM, 0)
        addresses = [f"ipc://{folder}/{name}" for name in ("requests", "outputs")]
        self._requests.bind(addresses[0])
        self._outputs.bind(addresses[1])
        self._process = _start_process(config)
        self._stop = weakref.finalize(
            self, _stop_core, self._process, self._requests, self._outputs, context, folder, os.getpid()
        )
        try:
            start = CoreStart(addresses[0], addresses[1], os.getpid(), config, log_level(), sys.path)
            self._send_start(msgspec.json.encode(start) + b"\n")
        except BaseException:
            self._stop()
            raise
        self._folder = folder

    def wait_until_ready(self) -> EngineCoreInfo:
        """See CoreClient."""
        try:
            _, body = self._receive()
        except EngineDeadError as error:
            raise (error.__cause__ or error) from None
        shutil.rmtree(self._folder, ignore_errors=True)  # both ends are connected: the sockets need no name any more
        return self._decode(body, type=EngineCoreInfo)

    @property
    def pid(self) -> int:
        """The core's process id."""
        return self._process.pid

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """See CoreClient."""
        self._send(messages.ADD, requests)

    def abort_requests(self, request_ids: list[str]) -> None:
        """See CoreClient."""
        self._send(messages.ABORT, request_ids)

    def get_outputs(self) -> EngineCoreOutputs:
        """See CoreClient."""
        while not self._pending:
            kind, body = self._receive()
            if kind == messages.OUTPUTS:
                return self._outputs_decoder.decode(body)
        return self._pending.popleft()

    def reset_prefix_cache(self) -> bool:
        """See CoreClient."""
        return self._call("reset_prefix_cache")

    def metrics(self) -> dict[str, float]:
        """See CoreClient."""
        return self._call("metrics")

    def shutdown(self) -> None:
        """See CoreClient."""
        self._dead = self._dead or "the engine has been shut down."
        self._stop()

    def _call(self, method: str) -> Any:
        self._num_calls += 1
        self._send(messages.UTILITY, UtilityCall(self._num_calls, method))
        while True:
            kind, body = self._receive()
            if kind == messages.OUTPUTS:
                self._pending.append(self._outputs_decoder.decode(body))
            elif (result := self._decode(body, type=UtilityResult)).call_id == self._num_calls:
                return result.value

    def _send(self, kind: bytes, body: Any) -> None:
        if self._dead is None and self._process.poll() is not None:
            self._read_last_words()
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self._requests.send(kind + self._encode(body))

    def _send_start(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died already; the wait for READY says so

    def _receive(self) -> tuple[bytes, memoryview]:
        """The next message; raises EngineDeadError as soon as the core is known to be dead."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        while True:
            is_gone = self._process.poll() is not None  # asked first: what it sent before its end is read below
            if self._outputs.poll(DEATH_CHECK_MS):
                message = self._outputs.recv()
                kind, body = message[:1], memoryview(message)[1:]
                if kind == messages.DEAD:
                    failure = self._decode(body, type=CoreFailure)
                    self._dead = _describe(failure)
                    raise EngineDeadError(self._dead) from _remote_error(failure)
                return kind, body
            if is_gone:
                self._dead = _describe_exit(self._process)
                raise EngineDeadError(self._dead)

    def _read_last_words(self) -> None:
        try:
            while True:
                kind, body = self._receive()
                if kind == messages.OUTPUTS:
                    self._pending.append(self._outputs_decoder.decode(body))
        except EngineDeadError:
            return


def _start_process(config: EngineConfig) -> subprocess.Popen:
    """Start the core's interpreter. It reads CoreStart from the pipe, whose end is also the order to end."""
    environment = os.environ | config.core_environment()
    root = str(Path(__file__).resolve().parent.parent)
    if root not in site.getsitepackages():  # a checkout: the child must find the same code
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxvllm.core"],
        stdin=subprocess.PIPE,
        stdout=2,  # what a library prints there must not mix with the caller's output
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C reaches the front end alone
    )


def _stop_core(
    process: subprocess.Popen, requests: Any, outputs: Any, context: Any, folder: str, owner_pid: int
) -> None:
    """End the core's process, kindly at first, and free the sockets. In a fork of the owner: nothing."""
    if os.getpid() != owner_pid:
        return
    if process.poll() is None:
        requests.send(messages.SHUTDOWN)
        try:
            process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:  # in a long compile, say
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()
    requests.close(linger=0)
    outputs.close(linger=0)
    context.term()
    shutil.rmtree(folder, ignore_errors=True)


def _describe(failure: CoreFailure) -> str:
    return f"the engine core died: {failure.kind}: {failure.message}\n\nIn the core's process:\n{failure.traceback}"


def _remote_error(failure: CoreFailure) -> Exception:
    """The core's exception again, of the same built-in class where there is one; the traceback is a note on it."""
    kind = getattr(builtins, failure.kind, None)
    error = RuntimeError(f"{failure.kind}: {failure.message}")
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        error = kind(failure.message)
    error.add_note(f"In the engine core's process:\n{failure.traceback}")
    return error


def _describe_exit(process: subprocess.Popen) -> str:
    code = process.returncode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the engine core died: its process {process.pid} was killed by {name}{hint}."
    return f"the engine core died: its process {process.pid} ended with exit code {code}; its output says more."
