"""What a benchmark sends: prompts with lengths and times of arrival."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scheduler.trace import HASH_BLOCK_TOKENS, TraceRequest, load_trace

# Ids below it: every vocabulary has them, and 256^16 different first blocks are enough.
VOCAB_SIZE = 256
SONNETS = Path(__file__).with_name("sonnets.txt")
INSTRUCTION = "Pick as many lines as you can from these poem lines:\n"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a load.

    Attributes:
      prompt: token ids, or text.
      num_prompt_tokens: of the prompt; for text as counted by the tokenizer it was made with.
      num_output_tokens: max_tokens.
      arrival_s: seconds after the start at which it is sent.
    """

    prompt: list[int] | str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float = 0.0


def random_load(
    num_prompts: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[BenchRequest]:
    """Random token ids.

    Args:
      input_len, output_len: mean lengths; drawn evenly from length * (1 - range_ratio) to length * (1 + range_ratio).
      prefix_len: tokens in front of each prompt that all of them share.

    Raises: ValueError for lengths or a ratio that make no request.
    """
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"random_range_ratio={range_ratio} must be in [0, 1).")
    if prefix_len < 0 or input_len < 1 or output_len < 1:
        raise ValueError(f"lengths must be at least 1: input {input_len}, output {output_len}, prefix {prefix_len}.")
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB_SIZE, prefix_len).tolist()

    def draw_lengths(mean: int) -> list[int]:
        low, high = int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))
        return rng.integers(max(low, 1), max(high, 1) + 1, num_prompts).tolist()

    return [
        BenchRequest(prefix + rng.integers(0, VOCAB_SIZE, n).tolist(), prefix_len + n, m)
        for n, m in zip(draw_lengths(input_len), draw_lengths(output_len), strict=True)
    ]


def sonnet_load(
    num_prompts: int,
    input_len: int,
    output_len: int,
    count_tokens: Callable[[Sequence[str]], list[int]],
    *,
    prefix_len: int = 0,
    path: Path = SONNETS,
    seed: int = 0,
) -> list[BenchRequest]:
    """Text: an instruction and a poem's first lines, which all share, then random lines of it up to input_len tokens.

    Args:
      count_tokens: the tokens of each of some texts.
      path: a text file; every line that is not empty is one to choose.

    Raises: ValueError if the file has no lines, or input_len leaves no room for one.
    """
    lines = [line + "\n" for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no lines.")
    num_instruction, *counts = count_tokens([INSTRUCTION, *lines])
    shared, total = INSTRUCTION, num_instruction
    for line, count in zip(lines, counts, strict=True):
        if total + count > prefix_len:
            break
        shared, total = shared + line, total + count
    if total + max(counts) > input_len:
        raise ValueError(f"sonnet_input_len={input_len} must be at least {total + max(counts)}: the prefix and a line.")
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(num_prompts):
        prompt, length = shared, total
        while length + counts[i := int(rng.integers(len(lines)))] <= input_len:
            prompt, length = prompt + lines[i], length + counts[i]
        prompts.append(prompt)
    # Lines together may be other tokens than each alone.
    return [BenchRequest(p, n, output_len) for p, n in zip(prompts, count_tokens(prompts), strict=True)]


def trace_load(
    path: str | Path, num_prompts: int, *, max_tokens: int | None = None, seed: int = 0
) -> tuple[list[BenchRequest], int]:
    """The first requests of a recorded trace (see scheduler.trace), with its times; shared blocks stay shared.

    Args:
      max_tokens: requests with a longer prompt and output together are left out.

    Returns: the requests, and how many were left out.
    Raises: ValueError, OSError for a file that cannot be read; ValueError if no request is left.
    """
    chosen: list[BenchRequest] = []
    num_left_out = 0
    for index, request in enumerate(load_trace(path)):
        if len(chosen) == num_prompts:
            break
        if max_tokens is not None and request.num_prompt_tokens + request.num_output_tokens > max_tokens:
            num_left_out += 1
            continue
        prompt = _trace_prompt(request, index, seed)
        chosen.append(BenchRequest(prompt, len(prompt), request.num_output_tokens, request.arrival_s))
    if not chosen:
        limit = "" if max_tokens is None else f" of at most trace_max_tokens={max_tokens} tokens"
        raise ValueError(f"{path} has no request{limit}.")
    start = chosen[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - start) for request in chosen], num_left_out


def _trace_prompt(request: TraceRequest, index: int, seed: int) -> list[int]:
    if request.hash_ids is None:
        return np.random.default_rng((seed, 1, index)).integers(0, VOCAB_SIZE, request.num_prompt_tokens).tolist()
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens += np.random.default_rng((seed, 0, hash_id)).integers(0, VOCAB_SIZE, HASH_BLOCK_TOKENS).tolist()
    return tokens[: request.num_prompt_tokens]


def at_rate(
    requests: Sequence[BenchRequest], rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[BenchRequest]:
    """The same requests with drawn times: `rate` of them a second on average; infinity: all at once.

    The gaps are gamma distributed: burstiness 1 is a Poisson process, less is burstier, more is more even. They are
    stretched so that the last request comes at len(requests) / rate.

    Raises: ValueError for a rate or burstiness that is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"request_rate={rate} and burstiness={burstiness} must be greater than 0.")
    if rate == float("inf") or not requests:
        return [replace(request, arrival_s=0.0) for request in requests]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, len(requests))
    times = np.cumsum(gaps)
    times *= len(requests) / rate / times[-1]
    return [replace(request, arrival_s=float(t)) for request, t in zip(requests, times, strict=True)]
