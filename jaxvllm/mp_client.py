"""MPClient: the engine core in a child process, reached over ZeroMQ with msgpack."""

import builtins
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from jaxvllm import core_messages as messages
from jaxvllm.checkout import checkout_root
from jaxvllm.config import EngineConfig, log_level
from jaxvllm.core_messages import (
    CoreFailure,
    CoreMetrics,
    CoreStart,
    EngineCoreInfo,
    EngineCoreRequest,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from jaxvllm.errors import EngineDeadError
from jaxvllm.owner import Owner
from scheduler.outputs import EngineCoreOutputs

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ImportError(
        f"a core process needs msgspec and pyzmq ({error}): install them, or pass multiprocess=False."
    ) from error

DEATH_CHECK_MS = 100  # how long a wait for the core lasts before it looks whether the core lives
SHUTDOWN_S = 3.0
SHUT_DOWN = "the engine has been shut down."
MAX_SOCKET_DIR = 60  # an ipc path must stay below 108 characters


class MPClient:
    """The core in a child process (`python -m jaxvllm.core`).

    For one thread at a time; or for two of which one receives() and the other does everything else.

    Args:
      give_up: once it is set, wait_until_ready() raises EngineDeadError instead of waiting on.
    """

    def __init__(self, config: EngineConfig, give_up: Event | None = None) -> None:
        self._give_up = give_up or Event()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=messages.encode_array)
        types = {
            messages.READY: EngineCoreInfo,
            messages.OUTPUTS: EngineCoreOutputs,
            messages.UTILITY: UtilityResult,
            messages.DEAD: CoreFailure,
        }
        self._decoders = {kind: msgspec.msgpack.Decoder(of) for kind, of in types.items()}
        self._pending: deque[EngineCoreOutputs] = deque()
        self._dead: str | None = None
        self._has_receiver = False
        self._num_calls = 0
        parent = "/tmp" if len(tempfile.gettempdir()) > MAX_SOCKET_DIR else None
        folder = tempfile.mkdtemp(prefix="jaxvllm-", dir=parent)
        context = zmq.Context()
        self._requests, self._outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.SNDHWM, 0)
        self._requests.setsockopt(zmq.SNDTIMEO, DEATH_CHECK_MS)  # sending waits only for a core that has hung up
        self._outputs.setsockopt(zmq.RCVHWM, 0)
        self._outputs.setsockopt(zmq.RCVTIMEO, DEATH_CHECK_MS)
        addresses = [f"ipc://{folder}/{name}" for name in ("requests", "outputs")]
        self._requests.bind(addresses[0])
        self._outputs.bind(addresses[1])
        self._process = _start_process(config)
        self._progress = _Progress()
        self._stop = weakref.finalize(
            self, _stop_core, self._process, self._progress, self._requests, self._outputs, context, folder
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
            info = self._receive()
        except EngineDeadError as error:
            raise (error.__cause__ or error) from None
        assert isinstance(info, EngineCoreInfo), info
        self._progress.is_ready = True
        shutil.rmtree(self._folder, ignore_errors=True)  # both ends are connected: the sockets need no name any more
        return info

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
            message = self._receive()
            if isinstance(message, EngineCoreOutputs):
                return message
        return self._pending.popleft()

    def reset_prefix_cache(self) -> bool:
        """See CoreClient."""
        return self._call("reset_prefix_cache")

    def metrics(self) -> CoreMetrics:
        """See CoreClient."""
        return msgspec.convert(self._call("metrics"), CoreMetrics)

    def receive(self) -> EngineCoreOutputs | UtilityResult:
        """What the core says next, outputs or the answer to start_call(); waits for it.

        For a thread of its own: from the first call on it alone hears of the core.
        """
        self._has_receiver = True
        message = self._receive()
        assert not isinstance(message, EngineCoreInfo), "which wait_until_ready has taken"
        return message

    def start_call(self, method: UtilityMethod) -> int:
        """Ask the core, without waiting. Returns the call_id of the UtilityResult that receive() will bring."""
        self._num_calls += 1
        self._send(messages.UTILITY, UtilityCall(self._num_calls, method))
        return self._num_calls

    def stop_receiving(self) -> None:
        """Let receive() raise within DEATH_CHECK_MS: its thread must have ended before shutdown()."""
        self._dead = self._dead or SHUT_DOWN

    def shutdown(self) -> None:
        """See CoreClient."""
        self._dead = self._dead or SHUT_DOWN
        self._stop()

    def _call(self, method: UtilityMethod) -> Any:
        call_id = self.start_call(method)
        while True:
            message = self._receive()
            if isinstance(message, EngineCoreOutputs):
                self._pending.append(message)
            elif isinstance(message, UtilityResult) and message.call_id == call_id:
                return message.value

    def _send(self, kind: bytes, body: Any) -> None:
        self._progress.owner.check()
        message = kind + self._encoder.encode(body)
        while self._dead is None:
            if self._process.poll() is not None:
                if self._has_receiver:  # and hears of the cause itself
                    raise EngineDeadError(_describe_exit(self._process))
                self._read_last_words()
                break
            with contextlib.suppress(zmq.Again):  # a dying core: its inbox is closed, the process ends soon
                self._requests.send(message)
                return
        raise EngineDeadError(self._dead)

    def _send_start(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died already; the wait for READY says so

    def _receive(self) -> EngineCoreInfo | EngineCoreOutputs | UtilityResult:
        """The next message; raises EngineDeadError as soon as the core is known to be dead."""
        data = self._receive_bytes()
        try:
            message = self._decoders[data[:1]].decode(memoryview(data)[1:])
        except (msgspec.MsgspecError, KeyError, UnicodeError) as error:  # what it was about is lost
            self._dead = f"the engine core sent a message that cannot be read: {error!r}."
            raise EngineDeadError(self._dead) from None
        if isinstance(message, CoreFailure):
            self._dead = _describe(message)
            raise EngineDeadError(self._dead) from _remote_error(message)
        return message

    def _receive_bytes(self) -> bytes:
        self._progress.owner.check()
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        message, is_gone = None, False
        while message is None:
            try:
                message = self._outputs.recv()
            except zmq.Again:
                if self._give_up.is_set():
                    self.stop_receiving()
                if self._dead is not None:
                    raise EngineDeadError(self._dead) from None
                if is_gone:  # and what it sent before its end has been read
                    self._dead = _describe_exit(self._process)
                    raise EngineDeadError(self._dead) from None
                is_gone = self._process.poll() is not None
        return message

    def _read_last_words(self) -> None:
        try:
            while True:
                message = self._receive()
                if isinstance(message, EngineCoreOutputs):
                    self._pending.append(message)
        except EngineDeadError:
            return


def _start_process(config: EngineConfig) -> subprocess.Popen:
    """Start the core's interpreter. It reads CoreStart from the pipe, whose end is also the order to end."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxvllm.core"],
        stdin=subprocess.PIPE,
        stdout=2,  # what a library prints there must not mix with the caller's output
        env=config.core_process_environment(checkout_root()),
        start_new_session=True,  # a terminal's Ctrl-C reaches the front end alone
    )


@dataclass
class _Progress:
    """How far a core has come, and in which process its owner lives."""

    owner: Owner = field(default_factory=Owner)
    is_ready: bool = False


def _stop_core(
    process: subprocess.Popen, progress: _Progress, requests: Any, outputs: Any, context: Any, folder: str
) -> None:
    """End the core's process, kindly if it serves, and free the sockets. In a fork of the owner: nothing."""
    if not progress.owner.is_here():
        return
    if process.poll() is None and progress.is_ready:
        with contextlib.suppress(zmq.Again):  # it is ending by itself, and has closed its inbox
            requests.send(messages.SHUTDOWN)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in a long compile, say
            process.wait(SHUTDOWN_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read all that was to say
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
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # some take more than a message
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
