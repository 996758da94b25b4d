"""Ctrl-C at a moment of our choosing."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


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
