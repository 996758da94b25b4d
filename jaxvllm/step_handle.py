"""A step in flight, and how its results are read."""

from collections.abc import Iterator

import jax
import numpy as np

from scheduler.logprob_columns import read_dense, read_logprobs, read_step
from scheduler.logprob_plan import LogprobPlan
from scheduler.outputs import ModelRunnerOutput, PromptLogprobs, TokenLogprobs
from scheduler.plan import StepPlan


class StepHandle:
    """A step in flight. What it gives lies in buffers of its own, so later steps may run before anybody waits."""

    def __init__(
        self,
        token_ids: jax.Array,
        logprobs: jax.Array | None,
        plan: StepPlan,
        positions: list[jax.Array],
        dense: list[jax.Array],
    ) -> None:
        """Start the copies to the host.

        Args:
          token_ids: i32[R] of the step.
          logprobs: i32[R, LOGPROBS_WIDTH] of its tokens; None if nobody wants more than the most likely token.
          plan: the step.
          positions, dense: what the logprobs programs gave for the chunks of plan.logprobs.
        """
        self._token_ids = token_ids
        self._request_ids = plan.request_ids
        self._needs_sample = plan.needs_sample
        self._plan = plan.logprobs
        self._masks = plan.masks
        self._logprobs = logprobs if plan.logprobs and plan.logprobs.sampled else None
        self._positions, self._dense = positions, dense
        for array in (self._token_ids, self._logprobs, *positions, *dense):
            if array is not None:
                array.copy_to_host_async()

    def wait_until_done(self) -> None:
        """Block until the device has run the step and what was dispatched behind it; errors as in wait()."""
        for array in (self._token_ids, *self._positions, *self._dense):
            array.block_until_ready()

    def wait(self) -> ModelRunnerOutput:
        """Block until the step is done and give the token of each request that sampled one, and its logprobs.

        Raises:
          jax.errors.JaxRuntimeError: the step failed on the device; the runner's buffers are lost.
        """
        token_ids = np.asarray(self._token_ids)[: len(self._request_ids)].tolist()
        if self._needs_sample.all():
            output = ModelRunnerOutput(dict(zip(self._request_ids, token_ids, strict=True)))
        else:
            rows = np.flatnonzero(self._needs_sample).tolist()
            output = ModelRunnerOutput({self._request_ids[row]: token_ids[row] for row in rows})
        if self._plan is not None:
            self._read_logprobs(self._plan, output)
        return output

    def _read_logprobs(self, plan: LogprobPlan, output: ModelRunnerOutput) -> None:
        if self._logprobs is not None:
            for row, found in read_step(np.asarray(self._logprobs), plan.sampled):
                output.logprobs[self._request_ids[row]] = found
        ranked = _rows_of_chunks(self._positions)
        dense = _rows_of_chunks(self._dense)
        for part in plan.ranges:
            if part.is_sample:
                target, mask = output.sampled_token_ids[part.request_id], None
                if self._masks is not None:
                    mask = self._masks.mask_of(self._request_ids.index(part.request_id))
                found = read_dense(next(dense), target, part.num_logprobs, mask)
                output.logprobs[part.request_id] = found.pack()
                continue
            positions: list[TokenLogprobs] = [
                read_dense(next(dense), target, part.num_logprobs)
                if part.is_dense
                else read_logprobs(next(ranked), part.num_logprobs + 1)
                for target in part.targets.tolist()
            ]
            output.prompt_logprobs[part.request_id] = PromptLogprobs(part.start, positions)


def _rows_of_chunks(chunks: list[jax.Array]) -> Iterator[np.ndarray]:
    """The rows of arrays on the device, one array after the other."""
    for chunk in chunks:
        yield from np.asarray(chunk)
