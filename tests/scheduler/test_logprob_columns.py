"""A step's logprobs on their way from the device's columns to the front end."""

import numpy as np

from scheduler.logprob_columns import LOGPROBS_WIDTH, LogprobColumn, read_logprobs, read_step
from scheduler.outputs import TokenLogprobs


def test_rows_read_together_and_packed_are_those_read_one_by_one():
    rng = np.random.default_rng(0)
    columns = rng.integers(0, 151_936, (11, LOGPROBS_WIDTH)).astype(np.int32)
    columns.view(np.float32)[:, LogprobColumn.VALUES :] = -rng.random((11, LOGPROBS_WIDTH - LogprobColumn.VALUES))
    rows = [(0, 6, None), (3, 1, None), (4, 6, None), (5, 3, [4, 70_000]), (8, 21, None), (10, 6, None)]
    read = {row: TokenLogprobs.unpack(packed) for row, packed in read_step(columns, rows)}
    assert read == {row: read_logprobs(columns[row], count, listed) for row, count, listed in rows}
    assert [read[5].is_ranked, read[8].is_ranked, len(read[8].token_ids)] == [False, True, 21]
