"""A step while it is built, and its description for the batch."""

from dataclasses import dataclass, field

from scheduler.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.request import Request, RequestStatus


@dataclass(slots=True)
class StepBuilder:
    """What a step holds so far.

    Attributes:
      budget: tokens that may still be scheduled.
      num_scheduled: request id -> tokens, in the order of `scheduled`.
      new_block_ids: request id -> blocks appended for this step; running requests that got none are absent.
      scheduled: running requests in list order, then admitted ones.
      admitted: the part of `scheduled` that comes from the queue, not yet RUNNING.
      preempted: requests that left the running list for others.
    """

    budget: int
    num_scheduled: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    scheduled: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def undo(self, request: Request) -> bool:
        """Take a request out of the step again, with its tokens back in the budget; False if it was not in it."""
        num_scheduled = self.num_scheduled.pop(request.request_id, None)
        if num_scheduled is None:
            return False
        self.budget += num_scheduled
        self.scheduled.remove(request)
        self.new_block_ids.pop(request.request_id, None)
        return True

    def describe(self) -> SchedulerOutput:
        """The step for the batch, before its tokens count as computed."""
        new = [request for request in self.admitted if request.status is RequestStatus.WAITING]
        resumed = [request for request in self.admitted if request.status is RequestStatus.PREEMPTED]
        for request in resumed:
            self.new_block_ids[request.request_id] = request.block_ids.copy()
        known = self.scheduled
        if self.admitted:
            known = known[: len(known) - len(self.admitted)] + resumed
            request_ids = [request.request_id for request in known]
        else:
            request_ids = list(self.num_scheduled)  # in the order of `scheduled`
        return SchedulerOutput(
            scheduled_new_requests=[_describe_new(request) for request in new],
            scheduled_cached_requests=CachedRequestData(
                request_ids=request_ids,
                new_block_ids=list(map(self.new_block_ids.get, request_ids)),
                num_computed_tokens=[request.num_computed_tokens for request in known],
                resumed_request_ids={request.request_id for request in resumed},
                all_token_ids={request.request_id: request.all_token_ids for request in resumed},
            ),
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=sum(self.num_scheduled.values()),
            preempted_request_ids={request.request_id for request in self.preempted},
        )


def _describe_new(request: Request) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        block_ids=request.block_ids.copy(),
        num_computed_tokens=request.num_computed_tokens,
        eos_token_id=request.eos_token_id,
    )
