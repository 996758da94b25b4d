"""The lists of token ids that a request may bring: one wide int32 row a request, sent only where there is a list.

Both sides index a row with the same constants. How much of it is valid says the request's record; a request without
lists leaves the row of its predecessor as it is.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from scheduler.records import RecordField
from scheduler.sampling_params import (
    MAX_LISTED_IDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    MAX_THINK_IDS,
    DerivedParams,
    SamplingParams,
)

MAX_MASKED_IDS = MAX_STOP_TOKEN_IDS + 1  # the stop ids and EOS


class ListField(IntEnum):
    """First columns of the lists. The parameters of custom processors (float32 bits) follow from PROCESSORS on."""

    STOP_IDS = 0
    BIAS_IDS = STOP_IDS + MAX_MASKED_IDS
    BIAS_VALUES = BIAS_IDS + MAX_LISTED_IDS  # float32 bits
    ALLOWED_IDS = BIAS_VALUES + MAX_LISTED_IDS
    BAD_WORD_IDS = ALLOWED_IDS + MAX_LISTED_IDS  # all bad words in a row
    BAD_WORD_PLACES = BAD_WORD_IDS + MAX_LISTED_IDS  # d > 0: d places before the word's last token; -p: last, p before
    LISTED_IDS = BAD_WORD_PLACES + MAX_LISTED_IDS
    NUM_THINK_START = LISTED_IDS + MAX_LOGPROB_TOKEN_IDS
    THINK_START = NUM_THINK_START + 1
    NUM_THINK_END = THINK_START + MAX_THINK_IDS
    THINK_END = NUM_THINK_END + 1
    PROCESSORS = THINK_END + MAX_THINK_IDS


def list_width(num_processor_params: int) -> int:
    """Columns of a row."""
    return ListField.PROCESSORS + num_processor_params


def make_token_lists(
    params: SamplingParams, eos_token_id: int | None, processors: Sequence[tuple[str, int]]
) -> tuple[np.ndarray | None, dict[RecordField, int], int]:
    """The row of a request, None if it has no list; the counts for its record; which custom processors apply.

    Args:
      params: its sampling parameters.
      eos_token_id: masked together with the stop ids until min_tokens outputs exist; None: no such token.
      processors: (name, number of parameters) of each custom processor.
    """
    if not _has_lists(params):
        return None, {}, 0
    derived = params.derived or DerivedParams()
    row = np.zeros(list_width(sum(count for _, count in processors)), np.int32)
    floats = row.view(np.float32)
    lists = {
        RecordField.NUM_STOP_IDS: (ListField.STOP_IDS, _masked_ids(params, eos_token_id)),
        RecordField.NUM_BIAS_IDS: (ListField.BIAS_IDS, list(params.logit_bias or ())),
        RecordField.NUM_ALLOWED_IDS: (ListField.ALLOWED_IDS, params.allowed_token_ids or []),
        RecordField.NUM_BAD_WORD_IDS: (ListField.BAD_WORD_IDS, [i for word in derived.bad_words for i in word]),
        RecordField.NUM_LISTED_IDS: (ListField.LISTED_IDS, params.logprob_token_ids or []),
    }
    for start, ids in lists.values():
        row[start : start + len(ids)] = ids
    bias = list((params.logit_bias or {}).values())
    floats[ListField.BIAS_VALUES : ListField.BIAS_VALUES + len(bias)] = bias
    places = [place for word in derived.bad_words for place in _places(len(word))]
    row[ListField.BAD_WORD_PLACES : ListField.BAD_WORD_PLACES + len(places)] = places
    for count, start, ids in (
        (ListField.NUM_THINK_START, ListField.THINK_START, derived.think_start),
        (ListField.NUM_THINK_END, ListField.THINK_END, derived.think_end),
    ):
        row[count] = len(ids)
        row[start : start + len(ids)] = ids
    bits = _fill_processors(floats, derived, processors)
    counts = {column: len(ids) for column, (_, ids) in lists.items() if ids}
    return row, counts, bits


def _has_lists(params: SamplingParams) -> bool:
    return bool(
        params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids
        or params.logprob_token_ids
        or params.derived is not None
    )


def _masked_ids(params: SamplingParams, eos_token_id: int | None) -> list[int]:
    """What may not be sampled before min_tokens outputs exist; ends even where they are ignored, as in vLLM."""
    if params.min_tokens == 0:
        return []
    ends = [] if eos_token_id is None else [eos_token_id]
    ends += params.derived.ignored_ends if params.derived is not None else []
    return list(dict.fromkeys([*(params.stop_token_ids or ()), *ends]))


def _places(length: int) -> list[int]:
    return [*range(length - 1, 0, -1), 1 - length]


def _fill_processors(floats: np.ndarray, derived: DerivedParams, processors: Sequence[tuple[str, int]]) -> int:
    """Write the parameters of the custom processors that the request uses; returns their bits."""
    bits, start = 0, int(ListField.PROCESSORS)
    for index, (name, count) in enumerate(processors):
        if name in derived.processors:
            floats[start : start + count] = derived.processors[name]
            bits |= 1 << index
        start += count
    return bits


def first_history_token(params: SamplingParams, num_prompt_tokens: int) -> int | None:
    """From which token on the sampler reads a request's history; None: not at all."""
    if params.repetition_penalty != 1.0 or params.thinking_token_budget is not None:
        return 0
    derived = params.derived
    reads_outputs = params.presence_penalty or params.frequency_penalty or (derived is not None and derived.bad_words)
    return num_prompt_tokens if reads_outputs else None
