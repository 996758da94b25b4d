"""The engine core's process: reads requests, steps, sends outputs; ends when the front end does."""

import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any

import msgspec
import zmq

from jaxvllm import core_messages as messages
from jaxvllm.core import EngineCore, make_executor
from jaxvllm.core_messages import CoreFailure, CoreStart, EngineCoreRequest, UtilityCall, UtilityResult
from scheduler.outputs import EngineCoreOutputs

logger = logging.getLogger(__name__)

LOGGED_PACKAGES = ("jaxvllm", "scheduler", "pallas_kernels")
PARENT_CHECK_S = 0.5
LAST_WORDS_MS = 2000  # how long a dying core keeps trying to send why
# How long the loop may keep Python's lock from the thread that dispatches, and the other way round. Python's 5 ms are
# longer than a step.
SWITCH_INTERVAL_S = 0.0005


class CoreLoop:
    """The busy loop of one thread. It blocks only on the device, or on its inbox when there is no work."""

    def __init__(self, core: EngineCore, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._is_running = True
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = {
            messages.ADD: msgspec.msgpack.Decoder(list[EngineCoreRequest], dec_hook=messages.decode_array),
            messages.ABORT: msgspec.msgpack.Decoder(list[str]),
            messages.UTILITY: msgspec.msgpack.Decoder(UtilityCall),
        }

    def run(self) -> None:
        """Serve until the front end says shutdown."""
        while self._is_running:
            if not self._core.has_work():
                self._inbox.poll()
                self._read_inputs()
                continue
            outputs = self._core.step(self._read_inputs)
            if outputs is not None and _says_something(outputs):
                self.send(messages.OUTPUTS, outputs)

    def send(self, kind: bytes, body: Any) -> None:
        """Send one message to the front end."""
        self._outbox.send(kind + self._encoder.encode(body))

    def _read_inputs(self) -> None:
        """Handle everything in the inbox."""
        # Asking first costs a fourth of recv(NOBLOCK), which raises when there is nothing: the usual case.
        while self._is_running and int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
            message = self._inbox.recv()
            if message == messages.SHUTDOWN:
                self._is_running = False
            else:
                self._handle(message[:1], memoryview(message)[1:])

    def _handle(self, kind: bytes, body: memoryview) -> None:
        """Do what a message says.

        Raises: ValueError for one that cannot be read, which ends the core: somebody waits for an answer that nobody
          can give, and two sides that do not understand each other are no engine.
        """
        try:
            content: Any = self._decoders[kind].decode(body)
        except (msgspec.MsgspecError, KeyError, UnicodeError) as error:
            raise ValueError(f"a message of the front end, of kind {kind!r}, cannot be read: {error!r}") from error
        if kind == messages.ADD:
            for request in content:
                self._core.add_request(request)
        elif kind == messages.ABORT:
            self._core.abort_requests(content)
        else:
            methods = {"reset_prefix_cache": self._core.reset_prefix_cache, "metrics": self._core.metrics}
            self.send(messages.UTILITY, UtilityResult(content.call_id, methods[content.method]()))


def main() -> None:
    """Entry of `python -m jaxvllm.core`; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front end, which then aborts or ends the core
    start = msgspec.json.decode(_read_line(), type=CoreStart)
    socket_folder = os.path.dirname(start.requests_address.removeprefix("ipc://"))
    threading.Thread(target=_end_with_parent, args=(start.parent_pid, socket_folder), daemon=True).start()
    # A service manager sends this to all processes: the front end still needs a core to end its requests with.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.path.extend(path for path in start.sys_path if path not in sys.path)
    logging.basicConfig(format="%(levelname)s %(asctime)s [core] %(message)s", datefmt="%H:%M:%S")
    for package in LOGGED_PACKAGES:
        logging.getLogger(package).setLevel(start.log_level)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outbox.setsockopt(zmq.SNDHWM, 0)
    inbox.setsockopt(zmq.RCVHWM, 0)
    inbox.connect(start.requests_address)
    outbox.connect(start.outputs_address)
    status = _serve(start, inbox, outbox)
    inbox.close(linger=0)
    outbox.close(linger=LAST_WORDS_MS)
    context.term()
    # Not sys.exit: threads of a dead device client may never end, and nobody is left who waits for them.
    sys.stderr.flush()
    os._exit(status)


def _serve(start: CoreStart, inbox: zmq.Socket, outbox: zmq.Socket) -> int:
    try:
        begin = time.monotonic()
        executor = make_executor(start.config)
        imported = time.monotonic()
        core = EngineCore(start.config, executor)
        logger.info("Ready after %.1f s, %.1f s of imports", time.monotonic() - begin, imported - begin)
        loop = CoreLoop(core, inbox, outbox)
        loop.send(messages.READY, core.info)
        gc.collect()
        gc.freeze()  # what start-up made stays; later collections need not walk it
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop.run()
        core.shutdown()
    except BaseException as error:
        failure = CoreFailure(type(error).__name__, _encodable(str(error)), _encodable(traceback.format_exc()))
        outbox.send(messages.DEAD + msgspec.msgpack.encode(failure))
        return 1
    return 0


def _says_something(outputs: EngineCoreOutputs) -> bool:
    return bool(outputs.request_ids or outputs.finished or outputs.prompt_logprobs)


def _encodable(text: str) -> str:
    """Text without what UTF-8 does not know, such as bytes of a file's name that are none."""
    return text.encode(errors="backslashreplace").decode()


def _read_line() -> bytes:
    """The first line of standard input, read without a buffer so that the watch sees the pipe's end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            os._exit(1)
        line += piece
    return bytes(line)


def _end_with_parent(parent_pid: int, socket_folder: str) -> None:
    """Ends this process when the front end is gone: its pipe closes or, held open by a fork of it, its pid changes.

    A front end that was killed during the start has not removed its sockets, which this does then.
    """
    while os.getppid() == parent_pid:
        readable, _, _ = select.select([0], [], [], PARENT_CHECK_S)
        if readable and not os.read(0, 1):
            break
    shutil.rmtree(socket_folder, ignore_errors=True)
    os._exit(1)
