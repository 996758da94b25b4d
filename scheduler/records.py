"""The record that the device keeps for each request: one int32 row, floats as bit views, 64-bit seeds as two words.

Both sides index it with the same constants: the batch writes it at admission, the sampler reads its columns.
"""

from enum import IntEnum

import numpy as np

from scheduler.sampling_params import SamplingParams

MAX_STEP_LOGPROBS = 20  # a step gives so many beside the sampled token; more take a program of their own


class RecordField(IntEnum):
    """Columns of a record. Counts of lists say what of the row's token lists (scheduler.token_lists) is valid."""

    NUM_PROMPT_TOKENS = 0
    TEMPERATURE = 1  # float32 bits; 0: greedy
    TOP_K = 2  # 0: off
    TOP_P = 3  # float32 bits; 1: off
    MIN_P = 4  # float32 bits; 0: off
    SEED_LO = 5
    SEED_HI = 6
    MIN_TOKENS = 7
    REPETITION_PENALTY = 8  # float32 bits; 1: off
    PRESENCE_PENALTY = 9  # float32 bits; 0: off
    FREQUENCY_PENALTY = 10  # float32 bits; 0: off
    THINKING_BUDGET = 11  # -1: off
    NUM_LOGPROBS = 12  # entries a position, the sampled token included; 0: none asked of the step
    PROCESSORS = 13  # bit i: custom processor i applies
    NUM_STOP_IDS = 14
    NUM_BIAS_IDS = 15
    NUM_ALLOWED_IDS = 16  # 0: all are allowed
    NUM_BAD_WORD_IDS = 17
    NUM_LISTED_IDS = 18  # logprob_token_ids


RECORD_WIDTH = len(RecordField)
_INT32_MAX = 2**31 - 1
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)  # smaller ones are 0 on a device
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def make_record(
    params: SamplingParams, num_prompt_tokens: int, seed: int, list_counts: dict[RecordField, int], processors: int = 0
) -> np.ndarray:
    """The record of a request.

    Args:
      params: its sampling parameters.
      num_prompt_tokens: output index of a token = its position - num_prompt_tokens.
      seed: of this request's random numbers; taken modulo 2**64.
      list_counts: the NUM_*_IDS columns; absent ones are 0.
      processors: the PROCESSORS column.

    Returns: i32[RECORD_WIDTH].
    """
    record = np.zeros(RECORD_WIDTH, np.int32)
    floats = record.view(np.float32)
    # What float32 cannot hold is brought to the nearest that it can: 0 and infinity would mean something else.
    floats[RecordField.TEMPERATURE] = min(params.temperature, _FLOAT32_MAX)
    floats[RecordField.TOP_P] = max(params.top_p, _FLOAT32_TINY)
    floats[RecordField.MIN_P] = params.min_p
    floats[RecordField.REPETITION_PENALTY] = min(max(params.repetition_penalty, _FLOAT32_TINY), _FLOAT32_MAX)
    floats[RecordField.PRESENCE_PENALTY] = params.presence_penalty
    floats[RecordField.FREQUENCY_PENALTY] = params.frequency_penalty
    words = np.array([seed % 2**64], np.uint64).view(np.int32)  # little endian: low word first
    record[RecordField.NUM_PROMPT_TOKENS] = num_prompt_tokens
    record[RecordField.TOP_K] = min(params.top_k, _INT32_MAX)
    record[RecordField.SEED_LO], record[RecordField.SEED_HI] = words
    record[RecordField.MIN_TOKENS] = min(params.min_tokens, _INT32_MAX)
    budget = params.thinking_token_budget
    record[RecordField.THINKING_BUDGET] = -1 if budget is None else min(budget, _INT32_MAX)
    record[RecordField.NUM_LOGPROBS] = num_step_logprobs(params)
    record[RecordField.PROCESSORS] = processors
    for column, count in list_counts.items():
        record[column] = count
    return record


def num_step_logprobs(params: SamplingParams) -> int:
    """How many logprobs a position the step itself gives; 0 if none are wanted or a program of its own gives them."""
    if params.logprob_token_ids:
        return 1 + len(params.logprob_token_ids)
    if params.logprobs is None or needs_dense_logprobs(params.logprobs):
        return 0
    return 1 + params.logprobs


def needs_dense_logprobs(num_logprobs: int | None) -> bool:
    """Whether so many logprobs a position (-1: all) are taken from whole rows of the vocabulary, on the host."""
    return num_logprobs is not None and not 0 <= num_logprobs <= MAX_STEP_LOGPROBS
