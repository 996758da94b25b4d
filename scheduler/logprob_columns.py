"""How a step's logprobs lie in one int32 row a request, and how the host reads them (floats as bit views)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from struct import iter_unpack

import numpy as np

from scheduler.outputs import TokenLogprobs
from scheduler.records import MAX_STEP_LOGPROBS
from scheduler.sampling_params import MAX_LOGPROB_TOKEN_IDS


class LogprobColumn(IntEnum):
    """First columns."""

    RANK = 0  # of the target: how many tokens are at least as likely
    IDS = 1  # the target, then the most likely tokens
    VALUES = IDS + 1 + MAX_STEP_LOGPROBS  # float32 bits: their logprobs
    LISTED = VALUES + 1 + MAX_STEP_LOGPROBS  # float32 bits: logprobs of the request's logprob_token_ids


LOGPROBS_WIDTH = LogprobColumn.LISTED + MAX_LOGPROB_TOKEN_IDS


def read_logprobs(packed: np.ndarray, num_entries: int, listed_ids: list[int] | None = None) -> TokenLogprobs:
    """One row of a step's logprobs, i32[LOGPROBS_WIDTH].

    Args:
      packed: the row.
      num_entries: the target and the most likely tokens.
      listed_ids: in the place of the most likely tokens.
    """
    floats = packed.view(np.float32)
    ids, values = packed[LogprobColumn.IDS :], floats[LogprobColumn.VALUES :]
    rank = int(packed[LogprobColumn.RANK])
    if listed_ids:
        listed = floats[LogprobColumn.LISTED : LogprobColumn.LISTED + len(listed_ids)].tolist()
        return TokenLogprobs([int(ids[0]), *listed_ids], [float(values[0]), *listed], rank, False)
    return TokenLogprobs(ids[:num_entries].tolist(), values[:num_entries].tolist(), rank)


def read_step(packed: np.ndarray, rows: Iterable[tuple[int, int, list[int] | None]]) -> Iterator[tuple[int, bytes]]:
    """The same for rows of a step, each with its number and packed (TokenLogprobs.pack): a few copies for all of them.

    Args:
      packed: i32[R, LOGPROBS_WIDTH].
      rows: (row, num_entries, listed_ids), see read_logprobs.
    """
    by_count: defaultdict[int, list[int]] = defaultdict(list)
    for row, num_entries, listed_ids in rows:
        if listed_ids:
            yield row, read_logprobs(packed[row], num_entries, listed_ids).pack()
        else:
            by_count[num_entries].append(row)
    for count, of_count in by_count.items():
        chosen = np.array(of_count)
        found = np.ones((len(of_count), 2 + 2 * count), np.int32)  # is_ranked stays 1
        found[:, 0] = packed[chosen, LogprobColumn.RANK]
        found[:, 2 : 2 + count] = packed[chosen, LogprobColumn.IDS : LogprobColumn.IDS + count]
        found[:, 2 + count :] = packed[chosen, LogprobColumn.VALUES : LogprobColumn.VALUES + count]
        pieces = iter_unpack(f"{found.itemsize * found.shape[1]}s", found.tobytes())
        for row, (piece,) in zip(of_count, pieces, strict=True):
            yield row, piece


def read_dense(logprobs: np.ndarray, target: int, num_logprobs: int, mask: np.ndarray | None = None) -> TokenLogprobs:
    """The same from the logprobs of a whole vocabulary.

    Args:
      logprobs: f32[V].
      target: the token that is there.
      num_logprobs: beside the target; -1: all.
      mask: i32[words] of a grammar, whose tokens are all that may have been there.
    """
    if mask is not None:
        is_allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logprobs)).astype(bool)
        probability = np.exp(logprobs[is_allowed], dtype=np.float64).sum()
        logprobs = np.where(is_allowed, logprobs - np.log(probability), -np.inf).astype(np.float32)
    count = len(logprobs) if num_logprobs < 0 else min(num_logprobs, len(logprobs))
    order = np.argsort(-logprobs, kind="stable")[:count]
    rank = int(np.count_nonzero(logprobs >= logprobs[target]))
    return TokenLogprobs([target, *order.tolist()], [float(logprobs[target]), *logprobs[order].tolist()], rank)
