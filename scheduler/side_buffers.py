"""What few requests bring: token lists and token history, in buffers for programs that run before the step.

So neither a step's buffer nor an admission gets wider for requests that have none.
"""

import numpy as np

from scheduler.batch import Batch, BatchChanges
from scheduler.token_lists import list_width

LISTS_PER_CALL = 8  # rows of token lists written at once
HISTORY_PIECES_PER_CALL = 8
HISTORY_PIECE = 1024  # tokens
HISTORY_HEADER = ("row", "start", "count")


def side_buffers(changes: BatchChanges, batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token lists (StepPlan.token_lists) and histories (StepPlan.history) of the admitted requests that have them."""
    no_row = batch.limits.max_num_seqs
    lists, pieces = [], []
    for request_id, row in changes.admitted.items():
        record = batch.records[request_id]
        if record.token_lists is not None:
            lists.append((row, record.token_lists))
        if record.first_history_token is not None:
            pieces += _history_pieces(row, record.first_history_token, batch.known_token_ids[row])
    width = 1 + list_width(batch.limits.num_processor_params)
    list_buffers = [np.zeros((LISTS_PER_CALL, width), np.int32) for _ in range(-(-len(lists) // LISTS_PER_CALL))]
    for buffer in list_buffers:
        buffer[:, 0] = no_row
    for i, (row, token_lists) in enumerate(lists):
        list_buffers[i // LISTS_PER_CALL][i % LISTS_PER_CALL] = np.concatenate([[row], token_lists])
    return list_buffers, _history_buffers(pieces, no_row)


def _history_pieces(row: int, start: int, token_ids: np.ndarray | None) -> list[tuple[int, int, np.ndarray]]:
    assert token_ids is not None, "an admitted row is not free"
    return [(row, i, token_ids[i : i + HISTORY_PIECE]) for i in range(start, len(token_ids), HISTORY_PIECE)]


def _history_buffers(pieces: list[tuple[int, int, np.ndarray]], no_row: int) -> list[np.ndarray]:
    header = len(HISTORY_HEADER)
    buffers = []
    for first in range(0, len(pieces), HISTORY_PIECES_PER_CALL):
        buffer = np.zeros((HISTORY_PIECES_PER_CALL, header + HISTORY_PIECE), np.int32)
        buffer[:, 0] = no_row
        for i, (row, start, token_ids) in enumerate(pieces[first : first + HISTORY_PIECES_PER_CALL]):
            buffer[i, :header] = row, start, len(token_ids)
            buffer[i, header : header + len(token_ids)] = token_ids
        buffers.append(buffer)
    return buffers
