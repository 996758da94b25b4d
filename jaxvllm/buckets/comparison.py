"""Policies compared one after the other on a device, within a limit of time."""

import sys
import time
from statistics import median

from jaxvllm.buckets.compare import Result, StepLog, Workload, estimate_policy, run_policy
from jaxvllm.compile_cache import ProgramKey
from jaxvllm.executor import DeviceExecutor
from scheduler.buckets import BucketPolicy
from scheduler.cost_model import CostModel, StepSample, fit
from scheduler.tuning import TuningOptions, tune

# Of the time that is left, so that the last policy ends in it.
SAFETY_S = 5.0
# To compile a program, until one has been compiled: of Qwen3-0.6B on one H200's host, 16 at a time.
SECONDS_A_PROGRAM = 3.0


class Comparison:
    """Runs policies; one that there is no time for is estimated from the step times measured so far.

    Attributes:
      results: one a policy, in order.
      samples: all measured step times.
    """

    def __init__(self, executor: DeviceExecutor, num_blocks: int, workload: Workload, deadline: float) -> None:
        """Prepare; `deadline` is a time of time.monotonic()."""
        self._executor, self._num_blocks, self._workload, self._deadline = executor, num_blocks, workload, deadline
        self._begin = time.monotonic()
        self._measured: list[tuple[Result, StepLog]] = []
        self._seconds_a_program = SECONDS_A_PROGRAM
        self._seconds_beside = 0.0  # what a run takes beside its steps: timing the buckets, starting a core
        self.results: list[Result] = []
        self.samples: list[StepSample] = []

    def add(self, policy: BucketPolicy) -> None:
        """Run a policy, or estimate what it would do if there is no time. The first one runs in any case."""
        estimate = self._estimate(policy)
        left_s = self._deadline - time.monotonic() - SAFETY_S
        if self._measured and self._seconds_for(policy, estimate) > left_s:
            if estimate is None:
                self._say(f"{policy.name}: left out, no time")
                return
            self.results.append(estimate)
            self._say(f"{policy.name}: no time to run it, estimated")
            return
        self._prepare(policy)
        start = time.monotonic()
        result, log, samples = run_policy(
            self._executor.runner, self._executor.config, self._num_blocks, policy, self._workload
        )
        self._seconds_beside = time.monotonic() - start - result.total_s
        self._measured.append((result, log))
        self.samples += samples
        self.results.append(result)
        self._say(f"{policy.name}: {result.num_steps} steps in {result.total_s:.1f} s")

    def tuned(self, max_programs: int) -> BucketPolicy:
        """A policy tuned to the steps of the first run, by all step times so far.

        Raises: ValueError if nothing has run.
        """
        if not self._measured:
            raise ValueError("the tuned policy is tuned to the runs before it: name another policy first.")
        limits = self._executor.config.scheduler
        shapes = self._measured[0][1].counts()
        options = TuningOptions(max_programs=max_programs)
        return tune(shapes, self._cost(), limits.max_num_seqs, limits.max_num_batched_tokens, options)

    def _cost(self) -> CostModel:
        return fit(self.samples)

    def _estimate(self, policy: BucketPolicy) -> Result | None:
        """None where steps depend on times, or too little was measured yet."""
        has_times = {key.kind for key in policy.keys()} <= {sample.key.kind for sample in self.samples}  # noqa: SIM118
        if not has_times or self._workload.in_seconds:
            return None
        measured, log = self._measured[0]
        config = self._executor.config
        return estimate_policy(config, self._num_blocks, policy, self._workload, self._cost(), measured, log)

    def _missing(self, policy: BucketPolicy) -> list[ProgramKey]:
        runner = self._executor.runner
        ready = runner.programs.programs()
        wanted = [*policy.keys(), *(key for key in runner.program_keys() if key == "admit")]
        return [key for key in wanted if key not in ready]

    def _seconds_for(self, policy: BucketPolicy, estimate: Result | None) -> float:
        run_s = estimate.total_s if estimate else median(result.total_s for result, _ in self._measured)
        return len(self._missing(policy)) * self._seconds_a_program + self._seconds_beside + run_s

    def _prepare(self, policy: BucketPolicy) -> None:
        missing, start = self._missing(policy), time.monotonic()
        programs = self._executor.runner.programs
        num_compiled = len(programs.compile_seconds)
        if missing:
            self._executor.prepare(missing)
        num_compiled = len(programs.compile_seconds) - num_compiled
        if num_compiled:
            self._seconds_a_program = (time.monotonic() - start) / num_compiled
        self._say(f"{policy.name}: {len(missing)} programs ready, {num_compiled} of them compiled")

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._begin:6.1f} s] {what}", file=sys.stderr, flush=True)
