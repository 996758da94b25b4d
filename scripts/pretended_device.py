"""What the benchmarks of the host share of a pretended device: a step whose tokens are known at a time on the clock."""

import time

from scheduler.outputs import ModelRunnerOutput


def sleep_until(at: float) -> None:
    """Sleep up to a time of time.monotonic()."""
    time.sleep(max(at - time.monotonic(), 0.0))


class PretendedStep:
    """A step that the device has run at `ready_at`, in time.monotonic(): a dispatcher.StepOnDevice."""

    def __init__(self, ready_at: float, tokens: dict[str, int]) -> None:
        self._ready_at, self._tokens = ready_at, tokens

    def wait_until_done(self) -> None:
        """See StepOnDevice."""
        sleep_until(self._ready_at)

    def wait(self) -> ModelRunnerOutput:
        """See StepOnDevice."""
        sleep_until(self._ready_at)
        return ModelRunnerOutput(self._tokens)
