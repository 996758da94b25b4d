"""Processes that lower steps, for those who wait for them. Without JAX: they are started before it is imported."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from queue import SimpleQueue
from threading import Lock
from typing import Any, BinaryIO, cast


class LoweringProcesses:
    """`python -m jaxvllm.lowering`: one process imports, and its forks lower, one a place. For any number of threads.

    The imports begin at once. Nothing else happens before the first step has to be lowered.

    Args:
      environment: of the processes; see config.lowering_environment.
      limit: how many steps are lowered at a time.
    """

    def __init__(self, environment: dict[str, str], limit: int) -> None:
        pairs = [socket.socketpair() for _ in range(limit)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxvllm.lowering", *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=2,  # what a library prints there must not mix with the caller's output
            env=environment,
            pass_fds=descriptors,
            start_new_session=True,  # with its forks it makes the process group that close() ends
        )
        self._lock = Lock()
        self._task: bytes | None = None
        self._free: SimpleQueue[BinaryIO] = SimpleQueue()
        self._streams: list[BinaryIO] = []
        for ours, theirs in pairs:
            theirs.close()
            with ours:  # the stream keeps it open
                stream = cast(BinaryIO, ours.makefile("rwb"))
            self._streams.append(stream)
            self._free.put(stream)

    @property
    def pid(self) -> int:
        """Of the process that imports; its group holds the forks too."""
        return self._process.pid

    def lower_for(self, task: Any) -> None:
        """Say what is to be lowered, before the first export().

        Args:
          task: a lowering.LoweringTask.
        """
        self._task = pickle.dumps(task)

    def export(self, key: Any, num_blocks: int) -> Any:
        """Have a step lowered; waits for a place.

        Returns: lowering.ExportedStep.

        Raises: RuntimeError with the process's own error.
        """
        stream = self._free.get()
        try:
            answer = self._ask(stream, (key, num_blocks))
        finally:
            self._free.put(stream)  # of a dead process too: whoever takes it hears of it
        if isinstance(answer, str):
            raise RuntimeError(f"{key} could not be lowered: {answer}")
        return answer

    def close(self) -> None:
        """End all processes, those at work too. Closing again does nothing."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        for stream in self._streams:
            with contextlib.suppress(OSError):  # what could not be sent is not wanted any more
                stream.close()

    def _ask(self, stream: BinaryIO, question: Any) -> Any:
        try:
            self._send_task()
            pickle.dump(question, stream)
            stream.flush()
            return pickle.load(stream)
        except (EOFError, OSError, ValueError) as error:  # ValueError: close() was called meanwhile
            raise RuntimeError("a lowering process ended; its output says more") from error

    def _send_task(self) -> None:
        """Let the process fork, which it does once."""
        with self._lock:
            stdin = self._process.stdin
            assert self._task is not None and stdin is not None, "lower_for comes first"
            if not stdin.closed:
                stdin.write(self._task)
                stdin.close()
