"""Short ways to make requests and schedulers."""

import random
from typing import Any

from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.grammar import RequestGrammar
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.verify import VOCAB_SIZE, CheckedScheduler


def ids(count: int, seed: int = 0) -> list[int]:
    """Arbitrary fixed token ids."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def make_request(
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int | None = 16,
    *,
    priority: int = 0,
    arrival: float = 0.0,
    salt: str | None = None,
    eos: int | None = None,
    grammar: RequestGrammar | None = None,
    **params: Any,
) -> Request:
    """A request; a prompt given as a length gets ids that no other request has."""
    if isinstance(prompt, int):
        prompt = ids(prompt, seed=sum(map(ord, request_id)) * 1009 + prompt)
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        eos_token_id=eos,
        arrival_time=arrival,
        priority=priority,
        cache_salt=salt,
        grammar=grammar,
    )


def make_checked(usable_blocks: int, block_size: int = 16, caching: bool = True, **limits: Any) -> CheckedScheduler:
    """A scheduler that checks itself; synchronous unless async_scheduling=True."""
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 256, "async_scheduling": False} | limits
    return CheckedScheduler(SchedulerConfig(**limits), CacheConfig(block_size, usable_blocks + 1, caching))


def run(checked: CheckedScheduler, max_steps: int = 500) -> dict[str, tuple[list[int], str]]:
    """Run to the end; request id -> (output tokens, finish reason) of every request there was."""
    checked.drain(max_steps)
    return checked.ended
