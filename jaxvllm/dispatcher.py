"""A thread that dispatches steps, while the engine's loop schedules the next one and takes in the last one."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

from scheduler.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from jaxvllm.step_handle import StepHandle  # which imports JAX


class DispatchedStep:
    """A step that has been dispatched, or will be."""

    __slots__ = ("_dispatch", "_error", "_handle", "_is_pending")

    def __init__(self, dispatch: "Callable[[], StepHandle]") -> None:
        self._dispatch: Callable[[], StepHandle] | None = dispatch
        self._handle: StepHandle | None = None
        self._error: BaseException | None = None
        self._is_pending = Lock()  # held until the step is dispatched: the cheapest event there is
        self._is_pending.acquire()

    def run(self, error: BaseException | None) -> BaseException | None:
        """Dispatch the step, unless there is an error of an earlier one; returns the error that holds from now on."""
        dispatch, self._dispatch = self._dispatch, None
        assert dispatch is not None, "a step runs once"
        if error is None:
            try:
                self._handle = dispatch()
            except BaseException as caught:
                error = caught
        self._error = error
        self._is_pending.release()
        return error

    def wait(self) -> ModelRunnerOutput:
        """See StepHandle.wait; raises what dispatching this step, or one before it, raised."""
        with self._is_pending:
            pass
        if self._error is not None:
            raise self._error
        assert self._handle is not None
        return self._handle.wait()


class Dispatcher:
    """Dispatches steps one after the other in a daemon thread, which ends with shutdown() or with this object.

    Dispatching a step is mostly C++ that does not hold Python's lock, a millisecond of it on a GPU. An error ends it:
    the wait() of that step raises it, and so does that of every later one, none of which is dispatched; the steps
    before keep their results.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._work = _Work()
        self._thread = Thread(target=self._work.serve, name="dispatch", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._work.inbox.put, None)

    @property
    def busy_s(self) -> float:
        """Seconds that the thread has dispatched since it began."""
        return self._work.busy_s

    def submit(self, dispatch: "Callable[[], StepHandle]") -> DispatchedStep:
        """Have a function called in the thread, behind those submitted before; returns at once."""
        assert self._stop.alive, "shutdown comes last"
        step = DispatchedStep(dispatch)
        self._work.inbox.put(step)
        return step

    def shutdown(self) -> None:
        """Dispatch what has been submitted, then end the thread; may be called again."""
        self._stop()
        self._thread.join()


@dataclass
class _Work:
    """What the thread holds: not the Dispatcher, whose end it must hear of."""

    inbox: SimpleQueue[DispatchedStep | None] = field(default_factory=SimpleQueue)
    busy_s: float = 0.0

    def serve(self) -> None:
        error: BaseException | None = None
        while (step := self.inbox.get()) is not None:
            start = time.perf_counter()
            error = step.run(error)
            del step  # or its arrays would live until the next one comes
            self.busy_s += time.perf_counter() - start
