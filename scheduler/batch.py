"""The host's mirror of the device rows: which request owns which row, and what changed since the last step.

A request keeps its row from admission to its end or pre-emption, so the device can keep its block table, last token
and sampling parameters, and a step sends only what changed. The batch sees SchedulerOutputs and nothing else.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler.outputs import NewRequestData, SchedulerOutput
from scheduler.records import make_record, needs_dense_logprobs, num_step_logprobs
from scheduler.sampling_params import SamplingParams
from scheduler.token_lists import first_history_token, make_token_lists


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What sizes the persistent device state.

    Attributes:
      vocab_size: of the model's logits; 0 where nothing is kept for each token of the vocabulary.
      processors: (name, number of parameters) of each custom logits processor, in the order of their bits.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocab_size: int = 0
    processors: tuple[tuple[str, int], ...] = ()

    @property
    def mask_words(self) -> int:
        """Length of a row's grammar mask: words of 32 tokens."""
        return -(-self.vocab_size // 32)

    @property
    def max_blocks(self) -> int:
        """Length of a row's block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_processor_params(self) -> int:
        """Numbers that all custom processors take of a request."""
        return sum(count for _, count in self.processors)


@dataclass(slots=True)
class SamplingRecord:
    """What sampling needs of a request, in the device's form; kept while the request is pre-empted.

    Attributes:
      record: i32[RECORD_WIDTH].
      token_lists: i32[list_width], or None.
      first_history_token: from which token on the sampler reads the request's tokens; None: not at all.
      num_prompt_tokens: length of the prompt.
      num_logprobs: entries a sampled position that the step gives; 0: none.
      dense_logprobs: the request's `logprobs` where the step cannot give so many; else None.
      prompt_logprobs: as the request has it.
      is_plain: the most likely token is all that is wanted of a step.
      processed_until: while the request has fewer tokens than this, its logits are changed before a token is chosen.
      listed_ids: logprob_token_ids, which then make up num_logprobs - 1 of them.
    """

    record: np.ndarray
    token_lists: np.ndarray | None
    first_history_token: int | None
    num_prompt_tokens: int
    num_logprobs: int
    dense_logprobs: int | None
    prompt_logprobs: int | None
    listed_ids: list[int] | None
    is_plain: bool
    processed_until: int

    @classmethod
    def make(
        cls, params: SamplingParams, num_prompt_tokens: int, eos_token_id: int | None, seed: int, limits: BatchLimits
    ) -> "SamplingRecord":
        """Of a new request."""
        token_lists, counts, bits = make_token_lists(params, eos_token_id, limits.processors)
        is_dense = not params.logprob_token_ids and needs_dense_logprobs(params.logprobs)
        return cls(
            record=make_record(params, num_prompt_tokens, seed, counts, bits),
            token_lists=token_lists,
            first_history_token=first_history_token(params, num_prompt_tokens),
            num_prompt_tokens=num_prompt_tokens,
            num_logprobs=num_step_logprobs(params),
            dense_logprobs=params.logprobs if is_dense else None,
            prompt_logprobs=params.prompt_logprobs,
            listed_ids=params.logprob_token_ids or None,
            is_plain=params.is_greedy
            and token_lists is None
            and not _has_penalties(params)
            and params.logprobs is None
            and params.structured_outputs is None,
            processed_until=_processed_until(params, num_prompt_tokens),
        )


def _processed_until(params: SamplingParams, num_prompt_tokens: int) -> int:
    derived = params.derived is not None and params.derived.changes_all_logits
    if _has_penalties(params) or params.logit_bias or params.allowed_token_ids or derived:
        return np.iinfo(np.int64).max
    return num_prompt_tokens + params.min_tokens if params.min_tokens else 0


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


@dataclass(slots=True)
class BatchChanges:
    """What a step must write to the device before it runs.

    Attributes:
      admitted: request id -> row, rewritten in full; the rows of new and resumed requests.
      appends: (row, index in its block table, block id) for each block that a known request got.
    """

    admitted: dict[str, int] = field(default_factory=dict)
    appends: list[tuple[int, int, int]] = field(default_factory=list)


class Batch:
    """Rows of the device state and their NumPy mirrors.

    A finished or pre-empted request's row is free at once: the device runs steps in order, so a step in flight has
    read the row before the next one overwrites it. Resuming is admission again, with the same seed.

    Attributes:
      row_of: request id -> row, for requests that hold one.
      block_tables: i32[max_num_seqs, max_blocks]; entries past a request's blocks are 0, the null block.
      num_known_tokens: i32[max_num_seqs] tokens known to the host at admission; later ones are on the device only.
      known_token_ids: those tokens, one i32 array a row (None: free row).
      records: by request id, kept while a request is pre-empted.
      wants_logprobs: the rows whose request asked for logprobs of any kind.
      wants_sampling: the rows whose request needs more of a step than the most likely token.
      processed_until: i64[max_num_seqs] see SamplingRecord, by row.
    """

    def __init__(self, limits: BatchLimits, seed: int | None = None) -> None:
        """Make an empty batch.

        Args:
          limits: size of the device state.
          seed: of the generator that draws seeds for requests that bring none; None: entropy of the system.
        """
        self.limits = limits
        self.row_of: dict[str, int] = {}
        self.block_tables = np.zeros((limits.max_num_seqs, limits.max_blocks), np.int32)
        self.num_known_tokens = np.zeros(limits.max_num_seqs, np.int32)
        self.known_token_ids: list[np.ndarray | None] = [None] * limits.max_num_seqs
        self.records: dict[str, SamplingRecord] = {}
        self.wants_logprobs: set[int] = set()
        self.wants_sampling: set[int] = set()
        self.processed_until = np.zeros(limits.max_num_seqs, np.int64)
        self._num_blocks = [0] * limits.max_num_seqs
        self._free_rows = list(range(limits.max_num_seqs))[::-1]
        self._seeds = np.random.default_rng(seed)

    def update(self, scheduler_output: SchedulerOutput) -> BatchChanges:
        """Apply one SchedulerOutput to the rows; every output must pass here, in order, with or without tokens."""
        for request_id in scheduler_output.preempted_request_ids:
            self._release_row(request_id)
        for request_id in scheduler_output.finished_request_ids:
            self._release_row(request_id)
            self.records.pop(request_id, None)
        changes = BatchChanges()
        self._append_blocks(scheduler_output, changes)
        for new in scheduler_output.scheduled_new_requests:
            self._make_record(new)
            row = self._admit(new.request_id, new.prompt_token_ids, new.block_ids)
            changes.admitted[new.request_id] = row
        return changes

    def _append_blocks(self, scheduler_output: SchedulerOutput, changes: BatchChanges) -> None:
        cached = scheduler_output.scheduled_cached_requests
        for index, blocks in enumerate(cached.new_block_ids):
            if blocks is None:
                continue
            request_id = cached.request_ids[index]
            if request_id in cached.resumed_request_ids:
                row = self._admit(request_id, cached.all_token_ids[request_id], blocks)
                changes.admitted[request_id] = row
            else:
                row = self.row_of[request_id]
                start = self._num_blocks[row]
                self._num_blocks[row] = start + len(blocks)
                self.block_tables[row, start : start + len(blocks)] = blocks
                changes.appends += [(row, start + i, block) for i, block in enumerate(blocks)]

    def _make_record(self, new: NewRequestData) -> None:
        params: SamplingParams = new.sampling_params
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        self.records[new.request_id] = SamplingRecord.make(
            params, len(new.prompt_token_ids), new.eos_token_id, seed, self.limits
        )

    def _admit(self, request_id: str, token_ids: list[int], block_ids: list[int]) -> int:
        assert request_id not in self.row_of, f"{request_id} holds a row already"
        row = self._free_rows.pop()
        self.row_of[request_id] = row
        self.known_token_ids[row] = np.array(token_ids, np.int32)
        self.num_known_tokens[row] = len(token_ids)
        self.block_tables[row] = 0
        self.block_tables[row, : len(block_ids)] = block_ids
        self._num_blocks[row] = len(block_ids)
        record = self.records[request_id]
        if record.num_logprobs or record.dense_logprobs is not None or record.prompt_logprobs is not None:
            self.wants_logprobs.add(row)
        if not record.is_plain:
            self.wants_sampling.add(row)
        self.processed_until[row] = record.processed_until
        return row

    def _release_row(self, request_id: str) -> None:
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self.known_token_ids[row] = None
            self.wants_logprobs.discard(row)
            self.wants_sampling.discard(row)
            self._free_rows.append(row)
