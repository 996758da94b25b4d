"""Ctrl-C at a moment of our choosing."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


@contextlib.contextmanager
def immediate_interrupt() -> Iterator[None]:
    """While entered, a Ctrl-C ends the process on the spot. For imports, with nothing to clean up; main thread only.

    Raised inside of an import, KeyboardInterrupt shows its traceback, or is lost: Python ignores what a callback of
    the import system raises, and some libraries what their optional imports do.
    """
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class DeferredInterrupt:
    """While entered, a Ctrl-C waits for the end of the block; a second one does not. No effect off the main thread."""

    def __enter__(self) -> None:
        self._pending: tuple[int, FrameType | None] | None = None
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)
        signal.signal(signal.SIGINT, self._previous)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            if self._pending is not None:
                self._previous(*self._pending)
