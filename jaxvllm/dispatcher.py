"""A thread that dispatches steps, while the engine's loop schedules the next one and takes in the last one."""

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from scheduler.outputs import ModelRunnerOutput

# Steps that the device may have at a time: one that runs and the next one. Each needs a workspace (see PoolSizer).
MAX_STEPS_ON_DEVICE = 2


class StepOnDevice(Protocol):
    """What dispatching a step gives."""

    def wait_until_done(self) -> None:
        """Block until the device has run the step, so that it holds no workspace; raises what it failed of."""
        ...

    def wait(self) -> ModelRunnerOutput:
        """Block until the step's tokens are on the host; errors likewise."""
        ...


class DispatchedStep:
    """A step that has been dispatched, or will be.

    Attributes:
      dispatch_s: seconds that dispatching it took, once wait() has returned.
      handle: what dispatching gave; None before, and if there was an error.
    """

    __slots__ = ("_dispatch", "_error", "_is_pending", "dispatch_s", "handle")

    def __init__(self, dispatch: Callable[[], StepOnDevice]) -> None:
        self._dispatch: Callable[[], StepOnDevice] | None = dispatch
        self.handle: StepOnDevice | None = None
        self.dispatch_s = 0.0
        self._error: BaseException | None = None
        self._is_pending = Lock()  # held until the step is dispatched: the cheapest event there is
        self._is_pending.acquire()

    def run(self, error: BaseException | None) -> BaseException | None:
        """Dispatch the step, unless there is an error of an earlier one; returns the error that holds from now on."""
        dispatch, self._dispatch = self._dispatch, None
        assert dispatch is not None, "a step runs once"
        if error is None:
            start = time.perf_counter()
            try:
                self.handle = dispatch()
            except BaseException as caught:
                error = caught
            self.dispatch_s = time.perf_counter() - start
        self._error = error
        self._is_pending.release()
        return error

    def wait(self) -> ModelRunnerOutput:
        """See StepOnDevice; raises what dispatching this step, or one before it, raised."""
        with self._is_pending:
            pass
        if self._error is not None:
            raise self._error
        assert self.handle is not None
        return self.handle.wait()


class Dispatcher:
    """Dispatches steps one after the other in a daemon thread, which ends with shutdown() or with this object.

    Dispatching a step is mostly C++ that does not hold Python's lock, a millisecond of it on a GPU. A step that would
    be one too many for the device is dispatched as soon as the oldest one there is done, whether or not anybody waits
    for that one. An error ends it: the wait() of that step raises it, and so does that of every later one, none of
    which is dispatched; the steps before keep their results.
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

    def submit(self, dispatch: Callable[[], StepOnDevice]) -> DispatchedStep:
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
        on_device: deque[StepOnDevice] = deque()
        while (step := self.inbox.get()) is not None:
            if len(on_device) == MAX_STEPS_ON_DEVICE:
                error = _error_of(on_device.popleft()) or error
            error = step.run(error)
            self.busy_s += step.dispatch_s
            if step.handle is not None:
                on_device.append(step.handle)
            del step  # or its arrays would live until the next one comes


def _error_of(handle: StepOnDevice) -> BaseException | None:
    """What a step failed of on the device, once that is done with it."""
    try:
        handle.wait_until_done()
    except BaseException as error:
        return error
    return None
