"""When a request ends by itself: the rules that look at its last token and at its length."""

from scheduler.request import Request, RequestStatus


def check_stop(request: Request) -> RequestStatus | None:
    """How the token just appended ends the request, or None; sets stop_reason for a stop token.

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
    return None
