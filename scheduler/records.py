"""The record that the device keeps for each request: one int32 row, floats as bit views, 64-bit seeds as two words.

Both sides index it with the same constants: the batch writes it at admission, the sampler reads its columns.
"""

from enum import IntEnum

import numpy as np

from scheduler.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams


class RecordField(IntEnum):
    """Columns of a record; the stop ids follow from STOP_IDS on."""

    NUM_PROMPT_TOKENS = 0
    TEMPERATURE = 1  # float32 bits; 0: greedy
    TOP_K = 2  # 0: off
    TOP_P = 3  # float32 bits; 1: off
    MIN_P = 4  # float32 bits; 0: off
    SEED_LO = 5
    SEED_HI = 6
    MIN_TOKENS = 7
    NUM_STOP_IDS = 8
    HAS_GRAMMAR = 9  # 1: its row of grammar_masks counts
    STOP_IDS = 10


MAX_MASKED_IDS = MAX_STOP_TOKEN_IDS + 1  # the stop ids and EOS
RECORD_WIDTH = RecordField.STOP_IDS + MAX_MASKED_IDS
_INT32_MAX = 2**31 - 1


def make_record(params: SamplingParams, num_prompt_tokens: int, eos_token_id: int | None, seed: int) -> np.ndarray:
    """The record of a request.

    Args:
      params: its sampling parameters.
      num_prompt_tokens: output index of a token = its position - num_prompt_tokens.
      eos_token_id: masked together with the stop ids until min_tokens outputs exist; None: no such token.
      seed: of this request's random numbers; taken modulo 2**64.

    Returns: i32[RECORD_WIDTH].
    """
    masked_ids = list(params.stop_token_ids or ())
    if eos_token_id is not None and eos_token_id not in masked_ids:
        masked_ids.append(eos_token_id)
    record = np.zeros(RECORD_WIDTH, np.int32)
    floats = record.view(np.float32)
    floats[RecordField.TEMPERATURE] = params.temperature
    floats[RecordField.TOP_P] = params.top_p
    floats[RecordField.MIN_P] = params.min_p
    words = np.array([seed % 2**64], np.uint64).view(np.int32)  # little endian: low word first
    record[RecordField.NUM_PROMPT_TOKENS] = num_prompt_tokens
    record[RecordField.TOP_K] = min(params.top_k, _INT32_MAX)
    record[RecordField.SEED_LO], record[RecordField.SEED_HI] = words
    record[RecordField.MIN_TOKENS] = min(params.min_tokens, _INT32_MAX)
    record[RecordField.NUM_STOP_IDS] = len(masked_ids)
    record[RecordField.HAS_GRAMMAR] = params.structured_outputs is not None
    record[RecordField.STOP_IDS : RecordField.STOP_IDS + len(masked_ids)] = masked_ids
    return record
