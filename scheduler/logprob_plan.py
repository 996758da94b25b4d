"""Which logprobs a step is to give, and the positions whose logits take a program of their own.

A step's own program gives the logprobs of sampled tokens, up to MAX_STEP_LOGPROBS a position. Prompt positions, and
larger numbers, are computed from the step's hidden states by further programs, chunk by chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.batch import Batch
from scheduler.records import needs_dense_logprobs

POSITION_FIELDS = ("hidden_index", "target", "num_logprobs")


@dataclass(slots=True)
class PositionRange:
    """Consecutive positions of one request whose next token's logprobs are wanted.

    Attributes:
      hidden_index: of the first one in the step's tokens.
      start: of the prompt tokens, which one the first position predicts; -1: the position predicts a sampled token.
      targets: the prompt tokens predicted, i32; empty for a sampled token.
      num_logprobs: beside the target; -1: the whole vocabulary.
    """

    request_id: str
    hidden_index: int
    start: int
    targets: np.ndarray
    num_logprobs: int

    @property
    def is_sample(self) -> bool:
        """Whether it is the position of a sampled token."""
        return self.start < 0

    @property
    def num_positions(self) -> int:
        """How many positions it holds."""
        return 1 if self.is_sample else len(self.targets)

    @property
    def is_dense(self) -> bool:
        """Whether whole rows of the vocabulary go to the host."""
        return needs_dense_logprobs(self.num_logprobs)


@dataclass(slots=True)
class LogprobPlan:
    """The logprobs of one step.

    Attributes:
      sampled: (row of the step, entries, logprob_token_ids or None) of each request whose logprobs the step gives.
      ranges: what further programs give.
    """

    sampled: list[tuple[int, int, list[int] | None]] = field(default_factory=list)
    ranges: list[PositionRange] = field(default_factory=list)

    def chunks(self, size: int, *, is_dense: bool) -> Iterator[np.ndarray]:
        """The positions of the dense or of the other ranges, in order: i32[size, 3], columns POSITION_FIELDS.

        The last chunk is padded with position 0.
        """
        pieces = []
        for r in self.ranges:
            if r.is_dense == is_dense:
                piece = np.zeros((r.num_positions, len(POSITION_FIELDS)), np.int32)
                piece[:, 0] = np.arange(r.hidden_index, r.hidden_index + r.num_positions)
                if not r.is_sample:
                    piece[:, 1] = r.targets
                piece[:, 2] = r.num_logprobs + 1
                pieces.append(piece)
        positions = np.concatenate(pieces) if pieces else np.zeros((0, len(POSITION_FIELDS)), np.int32)
        for start in range(0, len(positions), size):
            chunk = np.zeros((size, len(POSITION_FIELDS)), np.int32)
            chunk[: len(positions) - start] = positions[start : start + size]
            yield chunk


def plan_logprobs(
    batch: Batch,
    request_ids: list[str],
    rows: np.ndarray,
    num_computed: np.ndarray,
    num_scheduled: np.ndarray,
) -> LogprobPlan:
    """The logprobs that a step gives; its arguments but the batch are in the order of the step's rows."""
    plan = LogprobPlan()
    ends = np.cumsum(num_scheduled)
    for index, row in enumerate(rows.tolist()):
        if row not in batch.wants_logprobs:
            continue
        request_id, first, n = request_ids[index], int(num_computed[index]), int(num_scheduled[index])
        record, num_known = batch.records[request_id], int(batch.num_known_tokens[row])
        if first + n >= num_known:
            if record.num_logprobs:
                plan.sampled.append((index, record.num_logprobs, record.listed_ids))
            if record.dense_logprobs is not None:
                plan.ranges.append(PositionRange(request_id, int(ends[index]) - 1, -1, rows[:0], record.dense_logprobs))
        # With outputs known the request has been through its prompt before, and its prompt's logprobs are delivered.
        if record.prompt_logprobs is not None and num_known == record.num_prompt_tokens:
            known = batch.known_token_ids[row]
            assert known is not None
            targets = known[first + 1 : first + n + 1]
            if len(targets):
                plan.ranges.append(
                    PositionRange(request_id, int(ends[index]) - n, first + 1, targets, record.prompt_logprobs)
                )
    return plan
