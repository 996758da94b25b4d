"""The scheduler for steps that are dispatched before the last step's tokens are known on the host."""

from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

RUNNING = RequestStatus.RUNNING  # looked up for each token otherwise


class AsyncScheduler(Scheduler):
    """Schedules step N + 1 while step N runs: any number of steps may be in flight during schedule().

    A request that samples in a step gets a placeholder for that token, and the next step computes it from the device's
    copy. EOS is therefore noticed as many steps late, and the extra tokens are dropped; the length limit is known
    beforehand and costs nothing. A block whose last token is a placeholder is published once the token is known.
    """

    def _advance(self, scheduled: list[Request], num_scheduled_tokens: dict[str, int]) -> None:
        for request, num_new in zip(scheduled, num_scheduled_tokens.values(), strict=True):
            num_computed = request.num_computed_tokens = request.num_computed_tokens + num_new
            num_placeholders = request.num_output_placeholders
            if num_computed >= request.num_tokens + num_placeholders:
                request.num_output_placeholders = num_placeholders + 1

    def _append_token(self, request: Request, token_id: int) -> None:
        request.append_token(token_id)
        num_placeholders = request.num_output_placeholders = request.num_output_placeholders - 1
        # A pre-empted request holds no blocks.
        if request.num_computed_tokens - num_placeholders > request.num_ready_tokens and request.status is RUNNING:
            self.kv.publish_full_blocks(request, request.num_computed_tokens - num_placeholders)
