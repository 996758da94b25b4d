"""Traces of requests: when they came, how long their prompts and outputs were, and which prompt blocks they shared.

Read from the public Azure CSV files (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake JSONL files (timestamp in
ms, input_length, output_length, hash_ids: one id for each 512-token block of the prompt), or drawn at random.
"""

import csv
import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

HASH_BLOCK_TOKENS = 512  # of a Mooncake hash id
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
      arrival_s: seconds after the first request.
      num_prompt_tokens, num_output_tokens: at least 1.
      hash_ids: names of its 512-token prompt blocks, equal for shared ones; None: it shares nothing.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None = None

    def prompt_token_ids(self, index: int) -> list[int]:
        """Token ids that are equal exactly where prompts share blocks; `index` is the request's place in the trace."""
        if self.hash_ids is None:
            first = index * 524_288 % MAX_TOKEN_ID  # apart from its neighbours: the first block decides
            return [(first + position) % MAX_TOKEN_ID for position in range(self.num_prompt_tokens)]
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            first = hash_id * HASH_BLOCK_TOKENS
            tokens.extend(range(first, first + HASH_BLOCK_TOKENS))
        return tokens[: self.num_prompt_tokens]


def load_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace in the order of arrival; at most `limit` requests.

    Raises:
      ValueError: the file's ending or a row is not understood; names file, row and the formats.
    """
    path = Path(path)
    readers = {".csv": _read_azure, ".jsonl": _read_mooncake}
    if path.suffix not in readers:
        raise ValueError(f"{path} is neither .csv (Azure columns) nor .jsonl (Mooncake fields).")
    requests: list[TraceRequest] = []
    try:
        with path.open(newline="") as lines:
            rows = csv.DictReader(lines) if path.suffix == ".csv" else lines
            for number, row in enumerate(rows, start=1):
                if len(requests) == limit:
                    break
                try:
                    requests.append(readers[path.suffix](row))
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise ValueError(f"{path}, request {number}: {row!r} cannot be read: {error!r}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no text: {error}.") from error
    start = min((request.arrival_s for request in requests), default=0.0)
    return sorted((_shifted(request, start) for request in requests), key=lambda request: request.arrival_s)


def synthetic_trace(
    num_requests: int, rate: float, mean_prompt_tokens: int, mean_output_tokens: int, seed: int = 0
) -> list[TraceRequest]:
    """Poisson arrivals with `rate` requests a second and geometric lengths of the given means; nothing is shared."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    prompts = rng.geometric(1 / mean_prompt_tokens, num_requests)
    outputs = rng.geometric(1 / mean_output_tokens, num_requests)
    columns = zip((arrivals - arrivals[0]).tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [TraceRequest(*row) for row in columns]


def _read_azure(row: dict[str, str]) -> TraceRequest:
    arrival = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return TraceRequest(arrival, max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1))


def _read_mooncake(line: str) -> TraceRequest:
    row = json.loads(line)
    num_prompt, hash_ids = max(int(row["input_length"]), 1), tuple(row["hash_ids"])
    if len(hash_ids) * HASH_BLOCK_TOKENS < num_prompt:
        raise ValueError(f"{len(hash_ids)} hash_ids of {HASH_BLOCK_TOKENS} tokens do not cover input_length")
    if not all(isinstance(hash_id, int) and hash_id >= 0 for hash_id in hash_ids):
        raise ValueError("hash_ids must be integers of at least 0")
    if not math.isfinite(row["timestamp"]):
        raise ValueError("timestamp must be finite")
    return TraceRequest(row["timestamp"] / 1000, num_prompt, max(int(row["output_length"]), 1), hash_ids)


def _shifted(request: TraceRequest, start: float) -> TraceRequest:
    return TraceRequest(
        request.arrival_s - start, request.num_prompt_tokens, request.num_output_tokens, request.hash_ids
    )
