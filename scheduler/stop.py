"""When a request ends by itself: the rules that look at its last token and at its length."""

from scheduler.repetition import ends_in_repetition
from scheduler.request import Request, RequestStatus

REPETITION_STOP_REASON = "repetition_detected"


def check_stop(request: Request) -> RequestStatus | None:
    """How the token just appended ends the request, or None; sets stop_reason for a stop token and a repetition.

    Below min_tokens only the length can end it: otherwise a request whose room is used up would never end.
    """
    params = request.sampling_params
    if request.num_output_tokens >= params.min_tokens:
        last = request.token_ids[-1]
        if last in request.stop_tokens:
            is_eos = last == request.eos_token_id and not params.ignore_eos
            request.stop_reason = None if is_eos else last
            return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    repetition = params.repetition_detection
    if (
        repetition is not None
        and request.num_output_tokens >= params.min_tokens
        and ends_in_repetition(request.token_ids, request.num_prompt_tokens, repetition)
    ):
        request.stop_reason = REPETITION_STOP_REASON
        return RequestStatus.FINISHED_REPETITION
    return None
