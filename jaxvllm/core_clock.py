"""When requests were queued and scheduled, and how a step's time divides between the host and the device."""

import time
from collections.abc import Iterable
from typing import Any

from jaxvllm.distribution import Distribution
from scheduler.outputs import EngineCoreOutputs, NewRequestData

_MS = 1e-3
HOST_TIME_BOUNDS = [b * _MS for b in (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 50, 100, 1000)]
WAIT_TIME_BOUNDS = [b * _MS for b in (0.1, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 100, 200, 500, 1000, 5000)]

# In times of a dispatch. At 1 the device would idle now and then, as neither takes the same time every time.
LATE_WAIT = 1.5


class CoreClock:
    """Takes the times for one core; all are time.monotonic(), which processes of one machine share.

    What it costs: two readings of the clock a step, two an admitted request, nothing a token.

    Attributes:
      host_time: seconds a step that the loop worked: reading requests, scheduling, planning, updating. Dispatching,
        which has a thread of its own, is not in it (Executor.metrics: dispatch_seconds_total).
      wait_time: seconds a step that it waited for the device, or for its step to be dispatched.
      is_late: the wait for the last result was short beside what dispatching its step took. Then a step that is handed
        over only when a result has been taken in finds the device without work, or nearly so.
    """

    def __init__(self) -> None:
        self.host_time = Distribution(HOST_TIME_BOUNDS)
        self.wait_time = Distribution(WAIT_TIME_BOUNDS)
        self.is_late = False
        self._times: dict[str, tuple[float, float]] = {}  # queued, scheduled (0.0: not yet) before the first token
        self._host_s = self._wait_s = 0.0  # of the step that is not complete

    def note_queued(self, request_id: str) -> None:
        """A request waits from now on."""
        self._times[request_id] = (time.monotonic(), 0.0)

    def note_scheduled(self, requests: Iterable[NewRequestData]) -> None:
        """Requests are in a step for the first time."""
        for request in requests:
            queued, _ = self._times.get(request.request_id, (0.0, 0.0))
            self._times[request.request_id] = (queued, time.monotonic())

    def wait(self, handle: Any) -> Any:
        """The result of a StepHandle."""
        start = time.monotonic()
        result = handle.wait()
        waited_s = time.monotonic() - start
        self._wait_s += waited_s
        self.is_late = waited_s < LATE_WAIT * handle.dispatch_s
        return result

    def end_call(self, start: float, outputs: EngineCoreOutputs | None, is_step_complete: bool) -> None:
        """Close the books on a call of EngineCore.step that began at `start`, and put the times into its outputs."""
        now = time.monotonic()
        self._host_s += now - start
        if is_step_complete:
            self.host_time.observe(self._host_s - self._wait_s)
            self.wait_time.observe(self._wait_s)
            self._host_s = self._wait_s = 0.0
        if outputs is None:
            return
        outputs.timestamp = now
        for request_id in outputs.num_cached_tokens:
            outputs.request_times[request_id] = self._times.pop(request_id, (0.0, 0.0))
        for request_id in outputs.finished:
            times = self._times.pop(request_id, None)
            if times is not None:
                outputs.request_times[request_id] = times
