"""What a request may ask of a scheduler: checked once, before it waits."""

from scheduler.config import SchedulerConfig
from scheduler.request import Request


def admit_lengths(request: Request, config: SchedulerConfig, num_pool_slots: int) -> int:
    """The number of tokens at which a request ends with "length".

    The last token's keys and values are never read, so P prompt and M output tokens need P + M - 1 slots: a pool of
    S slots lets a request grow to S + 1 tokens. A prompt must leave room for one token inside the pool all the same.

    Raises:
      ValueError: the prompt or min_tokens can never fit; names value, limit and remedy.
    """
    name = f"Request {request.request_id!r}"
    num_prompt = request.num_prompt_tokens
    if num_prompt + 1 > config.max_model_len:
        raise ValueError(
            f"{name}: the prompt has {num_prompt} tokens, but max_model_len={config.max_model_len} allows at most "
            f"{config.max_model_len - 1}, one less for the first output token: shorten it or raise max_model_len."
        )
    if num_prompt + 1 > num_pool_slots:
        raise ValueError(
            f"{name}: the prompt has {num_prompt} tokens, but the KV pool of {num_pool_slots} slots holds at most "
            f"{num_pool_slots - 1} and one output token: shorten it or give the pool more blocks "
            "(num_blocks, gpu_memory_utilization)."
        )
    limit = min(config.max_model_len, num_pool_slots + 1)
    params = request.sampling_params
    if params.min_tokens > limit - num_prompt:
        raise ValueError(
            f"{name}: min_tokens={params.min_tokens}, but after a prompt of {num_prompt} tokens there is room for "
            f"{limit - num_prompt} (max_model_len={config.max_model_len}, KV pool of {num_pool_slots} slots): lower "
            "min_tokens or shorten the prompt."
        )
    return limit if params.max_tokens is None else min(limit, num_prompt + params.max_tokens)
