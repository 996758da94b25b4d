"""One step as the device sees it: a BucketKey and one padded int32 buffer.

`PlanLayout` says where each field lies in the buffer. The host packs through NumPy views and the jitted step unpacks
with static slices, both by the same layout. A pad never points at anything real: it reads and writes slot 0 of the
null block, has no row, and no negative index occurs (JAX wraps those).
"""

import math
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from scheduler.batch import Batch, BatchChanges, BatchLimits
from scheduler.buckets import BucketKey, BucketPolicy
from scheduler.logprob_plan import LogprobPlan, plan_logprobs
from scheduler.mask_plan import MaskPlan
from scheduler.outputs import SchedulerOutput
from scheduler.records import RECORD_WIDTH
from scheduler.side_buffers import side_buffers

ADMITS_PER_STEP = 16
HEADER = ("num_tokens", "num_reqs", "num_decodes")
# XLA hands a kernel a slice of the buffer without copying it, and GPU kernels want 256 bytes of alignment.
FIELD_ALIGNMENT = 64
ON_DEVICE = -1  # in input_ids: the token is the one that the row sampled last


def admit_width(limits: BatchLimits) -> int:
    """Width of an admission: row, record, whole block table."""
    return 1 + RECORD_WIDTH + limits.max_blocks


@dataclass(frozen=True)
class PlanLayout:
    """Place and shape of each field in the buffer of one bucket; static, so it is part of the compiled program.

    Fields, all int32: header[len(HEADER)], input_ids[T], positions[T], slot_mapping[T], query_start_loc[R + 1],
    seq_lens[R], logits_indices[R], rows[R], needs_sample[R], block_appends[R + T // block_size, 3] and, in a mixed
    bucket, admits[ADMITS_PER_STEP, admit_width]. Each starts at a multiple of FIELD_ALIGNMENT.
    """

    fields: dict[str, tuple[slice, tuple[int, ...]]]
    size: int

    @classmethod
    def make(cls, key: BucketKey, limits: BatchLimits) -> "PlanLayout":
        """The layout of a bucket."""
        T, R = key.T, key.R
        shapes: dict[str, tuple[int, ...]] = {
            "header": (len(HEADER),),
            "input_ids": (T,),
            "positions": (T,),
            "slot_mapping": (T,),
            "query_start_loc": (R + 1,),
            "seq_lens": (R,),
            "logits_indices": (R,),
            "rows": (R,),
            "needs_sample": (R,),
            # n new tokens in a row touch at most 1 + n // block_size blocks that the row did not have
            "block_appends": (R + T // limits.block_size, 3),
        }
        if key.kind == "mixed":
            shapes["admits"] = (ADMITS_PER_STEP, admit_width(limits))
        fields, offset = {}, 0
        for name, shape in shapes.items():
            length = math.prod(shape)
            fields[name] = (slice(offset, offset + length), shape)
            offset += -(-length // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
        return cls(fields, offset)

    def unpack(self, buffer: Any) -> dict[str, Any]:
        """The fields of a buffer: views of a NumPy buffer, static slices of a traced one."""
        return {
            name: buffer[where] if len(shape) == 1 else buffer[where].reshape(shape)
            for name, (where, shape) in self.fields.items()
        }

    def empty_buffer(self, no_row: int) -> np.ndarray:
        """A buffer of pads alone; no_row is the row number that scatters drop."""
        buffer = np.zeros(self.size, np.int32)
        fields = self.unpack(buffer)
        fields["rows"][:] = no_row
        fields["block_appends"][:, 0] = no_row
        if "admits" in fields:
            fields["admits"][:, 0] = no_row
        return buffer


@dataclass(slots=True)
class StepPlan:
    """One step, ready to run.

    Attributes:
      key: its bucket.
      buffer: i32[PlanLayout.size], owned by the plan (a transfer may still read it while later plans are built).
      overflow: i32[ADMITS_PER_STEP, admit_width] buffers, to be applied before the step.
      masks: of the grammars of its requests; None: there are none.
      token_lists: i32[LISTS_PER_CALL, 1 + list_width] buffers (row, token lists), to be applied before the step.
      history: i32[HISTORY_PIECES_PER_CALL, HISTORY_HEADER, HISTORY_PIECE tokens] buffers, likewise.
      logprobs: what the step gives beside tokens; None: nothing.
      is_plain: the most likely token is all that its requests want of it.
      has_processing: some request's logits are changed before a token is chosen.
      request_ids: of the real rows, in row order.
      needs_sample: bool[num_reqs] rows that sample a token; the others end in the middle of their prompt.
      num_reqs, num_tokens: real sizes.
    """

    key: BucketKey
    buffer: np.ndarray
    overflow: list[np.ndarray]
    request_ids: list[str]
    needs_sample: np.ndarray
    num_reqs: int
    num_tokens: int
    masks: MaskPlan | None = None
    token_lists: list[np.ndarray] = field(default_factory=list)
    history: list[np.ndarray] = field(default_factory=list)
    logprobs: LogprobPlan | None = None
    is_plain: bool = True
    has_processing: bool = False


@dataclass(slots=True)
class StepRows:
    """The requests of a step in row order: decode rows first. Arrays are i32[num_reqs].

    num_known: tokens that the host knows (prompt, and outputs before a resume); later ones are on the device.
    """

    request_ids: list[str]
    rows: np.ndarray
    num_computed: np.ndarray
    num_scheduled: np.ndarray
    num_known: np.ndarray
    num_decodes: int


@dataclass(slots=True)
class _Decodes:
    """A step of decode rows alone, whose tokens all are on the device: the next one differs in little from it.

    buffer: as it was before changes to the device rows were entered.
    """

    key: BucketKey
    step: StepRows
    needs_sample: np.ndarray
    buffer: np.ndarray


class Planner:
    """Turns SchedulerOutputs into StepPlans; owns the batch."""

    def __init__(self, limits: BatchLimits, policy: BucketPolicy, seed: int | None = None) -> None:
        """Make a planner.

        Args:
          limits: size of the device state.
          policy: chooses the bucket of a step.
          seed: see Batch.
        """
        self.batch = Batch(limits, seed)
        self._policy = policy
        self._layouts = {key: PlanLayout.make(key, limits) for key in policy.keys()}  # noqa: SIM118
        self._empty = {key: layout.empty_buffer(limits.max_num_seqs) for key, layout in self._layouts.items()}
        self._last: _Decodes | None = None

    def build(self, scheduler_output: SchedulerOutput) -> StepPlan | None:
        """Apply a SchedulerOutput to the batch and lay out its step; None if it schedules no token.

        Raises:
          ValueError: the step exceeds the policy's limits.
        """
        changes = self.batch.update(scheduler_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens == 0:
            return None
        step = self._order(scheduler_output, changes)
        num_reqs = len(step.request_ids)
        logprobs = None
        if self.batch.wants_logprobs:
            logprobs = plan_logprobs(self.batch, step.request_ids, step.rows, step.num_computed, step.num_scheduled)
        # Only a mixed step keeps its hidden states for the programs that compute further logprobs.
        is_decode = step.num_decodes == num_reqs and not (logprobs and logprobs.ranges)
        kind = "decode" if is_decode else "mixed"
        key = self._policy.select(kind, num_tokens, num_reqs)
        buffer, fields, needs_sample = self._fill(key, step, num_tokens)
        overflow = _fill_changes(fields, changes, self.batch)
        fields["header"][:] = (num_tokens, num_reqs, step.num_decodes)
        masks = _plan_masks(scheduler_output, step.request_ids, key.R, self.batch.limits.mask_words)
        is_plain, has_processing = _sampling(self.batch, step, needs_sample)
        return StepPlan(
            key,
            buffer,
            overflow,
            step.request_ids,
            needs_sample,
            num_reqs,
            num_tokens,
            masks,
            *(side_buffers(changes, self.batch) if changes.admitted else ([], [])),
            logprobs,
            is_plain,
            has_processing,
        )

    def _order(self, scheduler_output: SchedulerOutput, changes: BatchChanges) -> StepRows:
        """See order_rows; a step of the same decode rows as the last one takes them from there."""
        if changes.admitted:  # a request that comes back has another row
            self._last = None
        cached = scheduler_output.scheduled_cached_requests
        num_reqs = len(scheduler_output.num_scheduled_tokens)
        if (
            self._last is None
            or scheduler_output.total_num_scheduled_tokens != num_reqs
            or cached.request_ids != self._last.step.request_ids
        ):
            return order_rows(scheduler_output, self.batch, changes)
        last = self._last.step
        num_computed = np.fromiter(cached.num_computed_tokens, np.int32, num_reqs)
        return StepRows(last.request_ids, last.rows, num_computed, last.num_scheduled, last.num_known, num_reqs)

    def _fill(
        self, key: BucketKey, step: StepRows, num_tokens: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """A buffer with the step's tokens and rows, its fields, and needs_sample as bool[num_reqs]."""
        last = self._last
        if last is not None and step.rows is last.step.rows and key == last.key:
            buffer = last.buffer.copy()
            fields = self._layouts[key].unpack(buffer)
            _fill_positions(fields, step.rows, step.num_computed, self.batch)
            np.add(step.num_computed, 1, out=fields["seq_lens"][:num_tokens])
            return buffer, fields, last.needs_sample
        buffer = self._empty[key].copy()
        fields = self._layouts[key].unpack(buffer)
        _fill_tokens(fields, step, self.batch, num_tokens)
        needs_sample = _fill_rows(fields, step, num_tokens)
        if key.kind == "decode" and (step.num_computed >= step.num_known).all():
            self._last = _Decodes(key, step, needs_sample, buffer.copy())
        return buffer, fields, needs_sample


def order_rows(scheduler_output: SchedulerOutput, batch: Batch, changes: BatchChanges) -> StepRows:
    """Put decode rows (known before, one token) first, then prefill rows; each part keeps the scheduler's order."""
    cached = scheduler_output.scheduled_cached_requests
    scheduled = scheduler_output.num_scheduled_tokens
    num_reqs = len(scheduled)
    if not changes.admitted and scheduler_output.total_num_scheduled_tokens == num_reqs:
        ids, computed = cached.request_ids, cached.num_computed_tokens
        counts, num_decodes = repeat(1, num_reqs), num_reqs
    else:
        decodes, prefills = [], []
        for request_id, num_computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            n = scheduled[request_id]
            is_decode = n == 1 and request_id not in changes.admitted
            (decodes if is_decode else prefills).append((request_id, num_computed, n))
        for new in scheduler_output.scheduled_new_requests:
            prefills.append((new.request_id, new.num_computed_tokens, scheduled[new.request_id]))
        ids, computed, counts = zip(*decodes, *prefills, strict=True)
        num_decodes = len(decodes)
    rows = np.fromiter(map(batch.row_of.__getitem__, ids), np.int32, num_reqs)
    return StepRows(
        list(ids),
        rows,
        np.fromiter(computed, np.int32, num_reqs),
        np.fromiter(counts, np.int32, num_reqs),
        batch.num_known_tokens[rows],
        num_decodes,
    )


def _fill_tokens(fields: dict[str, np.ndarray], step: StepRows, batch: Batch, num_tokens: int) -> None:
    """input_ids, positions and slot_mapping of the real tokens; pads stay 0."""
    if step.num_decodes == len(step.rows):
        token_rows, positions = step.rows, step.num_computed
    else:
        token_rows = np.repeat(step.rows, step.num_scheduled)
        starts = np.cumsum(step.num_scheduled) - step.num_scheduled
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(step.num_computed - starts, step.num_scheduled)
    _fill_positions(fields, token_rows, positions, batch)
    _fill_input_ids(fields["input_ids"], step, batch)


def _fill_positions(fields: dict[str, np.ndarray], token_rows: np.ndarray, positions: np.ndarray, batch: Batch) -> None:
    """positions and slot_mapping of the real tokens, whose rows and positions these are."""
    block_size, n = batch.limits.block_size, len(positions)
    fields["positions"][:n] = positions
    block_indices = positions // block_size
    slots = batch.block_tables[token_rows, block_indices]
    slots -= block_indices  # the offset in the block is what the position has beyond that many blocks
    slots *= block_size
    np.add(slots, positions, out=fields["slot_mapping"][:n])


def _fill_input_ids(input_ids: np.ndarray, step: StepRows, batch: Batch) -> None:
    d = step.num_decodes
    input_ids[:d] = ON_DEVICE
    # The last token of a prompt may come alone: a decode row whose token the host knows.
    for i in (step.num_computed[:d] < step.num_known[:d]).nonzero()[0]:
        input_ids[i] = _known(batch, step.rows[i])[step.num_computed[i]]
    if d == len(step.rows):
        return
    start = d
    for row, computed, n in zip(step.rows[d:], step.num_computed[d:], step.num_scheduled[d:], strict=True):
        assert computed + n <= batch.num_known_tokens[row], "a prefill row's tokens are all known"
        input_ids[start : start + n] = _known(batch, row)[computed : computed + n]
        start += n


def _known(batch: Batch, row: int) -> np.ndarray:
    token_ids = batch.known_token_ids[row]
    assert token_ids is not None, "a scheduled row is not free"
    return token_ids


def _fill_rows(fields: dict[str, np.ndarray], step: StepRows, num_tokens: int) -> np.ndarray:
    """The per-row fields; returns needs_sample as bool[num_reqs]."""
    n = len(step.rows)
    seq_lens = step.num_computed + step.num_scheduled
    needs_sample = seq_lens >= step.num_known
    query_start_loc = fields["query_start_loc"]
    ends = query_start_loc[1 : n + 1]
    step.num_scheduled.cumsum(out=ends)
    query_start_loc[n + 1 :] = num_tokens
    np.subtract(ends, 1, out=fields["logits_indices"][:n])
    fields["seq_lens"][:n] = seq_lens
    fields["needs_sample"][:n] = needs_sample
    fields["rows"][:n] = step.rows
    return needs_sample


def _sampling(batch: Batch, step: StepRows, needs_sample: np.ndarray) -> tuple[bool, bool]:
    """See StepPlan.is_plain and has_processing."""
    if not batch.wants_sampling:
        return True, False
    rows = step.rows[needs_sample]
    if batch.wants_sampling.isdisjoint(rows.tolist()):
        return True, False
    seq_lens = (step.num_computed + step.num_scheduled)[needs_sample]
    return False, bool((seq_lens < batch.processed_until[rows]).any())


def _fill_changes(fields: dict[str, np.ndarray], changes: BatchChanges, batch: Batch) -> list[np.ndarray]:
    """block_appends and admits; returns the admissions that did not fit, in buffers of their own."""
    no_row = batch.limits.max_num_seqs
    appends = fields["block_appends"]
    assert len(changes.appends) <= len(appends), f"{len(changes.appends)} appended blocks exceed {len(appends)}"
    if changes.appends:
        appends[: len(changes.appends)] = changes.appends
    if "admits" not in fields:
        assert not changes.admitted, "a decode step admits nobody"
        return []
    chunks: list[np.ndarray] = [fields["admits"]]
    while len(chunks) * ADMITS_PER_STEP < len(changes.admitted):
        chunks.append(np.zeros_like(fields["admits"]))
        chunks[-1][:, 0] = no_row
    for i, (request_id, row) in enumerate(changes.admitted.items()):
        record = chunks[i // ADMITS_PER_STEP][i % ADMITS_PER_STEP]
        record[0] = row
        record[1 : 1 + RECORD_WIDTH] = batch.records[request_id].record
        record[1 + RECORD_WIDTH :] = batch.block_tables[row]
    return chunks[1:]


def _plan_masks(
    scheduler_output: SchedulerOutput, request_ids: list[str], num_rows: int, mask_words: int
) -> MaskPlan | None:
    """See StepPlan."""
    if scheduler_output.masks is None:
        return None
    places = {request_id: place for place, request_id in enumerate(request_ids)}
    of_masks = [places[request_id] for request_id in scheduler_output.grammars]
    return MaskPlan(of_masks, scheduler_output.masks, num_rows, mask_words)
