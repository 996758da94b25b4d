"""The computing side of the prefill kernel: one warpgroup's part of a query tile against all key tiles that it sees.

An online softmax in base 2: the scores of a key tile are computed while the values of the one before are added. A card
at its power limit clocks as high as the work allows, so it matters how little is done, and hardly in which order: q is
read from registers; sums stay apart by column until the end; and weights are relative to a maximum that follows the
scores only when one exceeds it by MAX_GROWTH (FlashAttention-4's idea), so that next to nothing has to be rescaled.

Letters: H head_dim. A row is one query head of one token; a warpgroup has 64.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import LOG2E, Ref, across_columns, div, full, pl, plgpu, tanh
from pallas_kernels.layer_slice import place_in
from pallas_kernels.prefill_products import (
    finish_before_what_follows,
    hide_columns,
    multiply_if_needed,
    start_product,
)
from pallas_kernels.prefill_sizes import PrefillInputs, PrefillScratch, PrefillSizes, QueryTile
from pallas_kernels.work_lists import ROWS_PER_WARPGROUP

# Where a maximum starts: below all real scores, and so far above hidden ones that their weights are 0 in a row that
# sees no key of its first tiles.
_LOWEST_MAXIMUM = -1e20
# In log2: weights are at most 256, which costs no precision, since the division at the end takes it out.
MAX_GROWTH = 8.0
# A row's sum of weights is kept by column modulo 8: adding up what different threads hold takes shuffles.
_SUM_COLUMNS = 8
_WGMMA = plgpu.Layout.WGMMA
_BY_ROW = _WGMMA.reduce(1)


class Progress(NamedTuple):
    """After the scores of a key tile, before its values are added."""

    acc: jax.Array  # f32[64, H] weighted sum of the values of the tiles before
    rescale: jax.Array  # f32[64] what acc has to be multiplied with first
    p: jax.Array | None  # [64, tile] weights of this tile; None: they are in shared memory
    highest: jax.Array  # f32[64] what scores are relative to, times log2(e)
    total: jax.Array  # f32[64, 8] sums of the weights, this tile's included


@dataclass(frozen=True)
class Part:
    """A warpgroup's part of a query tile, and what it works with."""

    sizes: PrefillSizes
    inputs: PrefillInputs
    scratch: PrefillScratch
    query: QueryTile
    warpgroup: jax.Array | int
    q: Any  # [64, H] in registers, or a reference to shared memory
    done: jax.Array  # key tiles of the query tiles before

    @property
    def first(self) -> jax.Array | int:
        """The first key tile."""
        return self.sizes.first_step(self.query)

    @property
    def end(self) -> jax.Array:
        """One past the last key tile."""
        return self.sizes.end_step(self.query)

    @property
    def first_position(self) -> jax.Array:
        """Of the warpgroup's first token, in its request."""
        return self.query.position + self.warpgroup * self.sizes.tokens

    @property
    def lowest_key(self) -> jax.Array | int:
        """The first key that a token of the query tile sees; negative if it sees all."""
        window = self.sizes.sliding_window
        return 0 if window is None else self.query.position + 1 - window

    def slot_of(self, i: jax.Array | int) -> jax.Array:
        """Where key tile i lies in the rings."""
        return lax.rem(self.done + (i - self.first), jnp.int32(self.sizes.config.stages))


def attend_tiles(part: Part) -> jax.Array:
    """Attention of the warpgroup's rows over all key tiles: f32[64, H], normalised."""
    inputs = part.inputs
    progress = _first_scores(part)
    masked, unmasked = (functools.partial(_step, part, is_masked=is_masked) for is_masked in (True, False))
    begin, unmasked_begin, unmasked_end, end = _ranges(part)
    if part.sizes.sliding_window is not None:
        at_window = functools.partial(_step, part, is_masked=True, is_after_first=True)
        progress = lax.fori_loop(begin, unmasked_begin, at_window, progress)
    progress = lax.fori_loop(unmasked_begin, unmasked_end, unmasked, progress)
    progress = lax.fori_loop(unmasked_end, end, masked, progress)
    acc = _last_values(part, progress)
    total = progress.total.sum(axis=1)
    if inputs.sinks is not None:
        sink = plgpu.load(inputs.sinks.at[part.query.head], layout=_BY_ROW, optimized=False)
        total = total + jnp.exp2(sink * LOG2E - progress.highest)
    weight = 1.0 / total
    if inputs.kv_scale is not None:
        weight = weight * inputs.kv_scale[place_in(inputs.kv_scale, inputs.layer[0]), 1]
    return acc * across_columns(weight, acc)


def _ranges(part: Part) -> tuple[jax.Array | int, ...]:
    """The second key tile; the first and one past the last that need no mask; one past the last tile."""
    sizes, tile, begin, end = part.sizes, part.sizes.config.tile, part.first + 1, part.end
    unmasked_begin = begin
    if sizes.sliding_window is not None:
        # Behind the last tile that hides a key from the warpgroup's last token, and behind the first values' step.
        hidden = jnp.maximum(part.first_position + sizes.tokens - sizes.sliding_window, 0)
        unmasked_begin = jnp.clip(div(hidden + (tile - 1), tile), begin + 1, end)
    num_full = jnp.minimum(div(part.first_position + 1, tile), div(part.query.num_keys, tile))
    return begin, unmasked_begin, jnp.clip(num_full, unmasked_begin, end), end


def _first_scores(part: Part) -> Progress:
    """Scores of the first key tile. There are no values to add yet."""
    rows, slot = (ROWS_PER_WARPGROUP,), part.slot_of(part.first)
    plgpu.barrier_wait(part.scratch.k_full.at[slot])
    scores = start_product(part.q, part.scratch.k.at[slot], interpret=part.sizes.is_interpreted)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(part.scratch.k_free.at[slot])
    # Not right behind the loads of q: their bank conflicts last for about 1000 cycles, and the next q would land on
    # what they have not read yet. By now the product has used all of it.
    plgpu.barrier_arrive(part.scratch.q_free.at[part.warpgroup])
    acc, nothing = (full((*rows, columns), 0.0, _WGMMA) for columns in (part.sizes.head_dim, _SUM_COLUMNS))
    lowest = full(rows, _LOWEST_MAXIMUM, _BY_ROW)
    p, highest, total, _ = _softmax(part, jnp.int32(part.first), scores, lowest, nothing, is_masked=True)
    return Progress(acc, full(rows, 1.0, _BY_ROW), _hand_over(part, p), highest, total)


def _step(part: Part, i: jax.Array, before: Progress, *, is_masked: bool, is_after_first: bool = False) -> Progress:
    """Scores of key tile i while the values of tile i - 1 are added, which may be the first if `is_after_first`."""
    sizes, scratch, slot = part.sizes, part.scratch, part.slot_of(i)
    plgpu.barrier_wait(scratch.k_full.at[slot])

    def body(acc_ref: Ref) -> tuple[jax.Array, ...]:
        scores = start_product(part.q, scratch.k.at[slot], interpret=sizes.is_interpreted)
        acc = _rescaled(part, before)  # the tensor cores are busy meanwhile
        _start_values(part, acc_ref, acc, before.p, i - 1, is_first=is_after_first)
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(scratch.k_free.at[slot])
        p, highest, total, rescale = _softmax(part, i, scores, before.highest, before.total, is_masked=is_masked)
        if not sizes.is_interpreted:
            finish_before_what_follows(total)
        return lax.optimization_barrier((_finish_values(part, acc_ref, acc), rescale, p, highest, total))

    acc, rescale, p, highest, total = pl.run_scoped(body, _accumulator(part))
    plgpu.barrier_arrive(scratch.v_free.at[part.slot_of(i - 1)])
    return Progress(acc, rescale, _hand_over(part, p), highest, total)


def _last_values(part: Part, before: Progress) -> jax.Array:
    """The accumulator with the values of the last key tile: f32[64, H]."""
    last = part.end - 1

    def body(acc_ref: Ref) -> jax.Array:
        acc = _rescaled(part, before)
        is_first = part.sizes.sliding_window is not None
        _start_values(part, acc_ref, acc, before.p, last, is_first=is_first, is_last=True)
        return _finish_values(part, acc_ref, acc)

    acc = pl.run_scoped(body, _accumulator(part))
    plgpu.barrier_arrive(part.scratch.v_free.at[part.slot_of(last)])
    return acc


def _softmax(
    part: Part, i: jax.Array, scores: jax.Array, highest: jax.Array, total: jax.Array, *, is_masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """f32 weights of tile i, the new `highest` and `total`, and the factor of what was summed before."""
    sizes = part.sizes
    factor: Any = sizes.scale
    kv_scale = part.inputs.kv_scale
    if kv_scale is not None:
        factor = factor * kv_scale[place_in(kv_scale, part.inputs.layer[0]), 0]
    to_base_2 = factor * LOG2E
    if sizes.soft_cap is not None:
        scores, to_base_2 = tanh(scores, factor * (1.0 / sizes.soft_cap)), sizes.soft_cap * LOG2E
    if is_masked:
        scores = _hide_unseen(part, i, scores)
    maximum = scores.max(axis=1) * to_base_2
    new_highest = jnp.where(maximum - highest > MAX_GROWTH, maximum, highest)
    rescale = jnp.exp2(highest - new_highest)
    p = jnp.exp2(scores * to_base_2 - across_columns(new_highest, scores))
    added = functools.reduce(jnp.add, [p[:, c : c + _SUM_COLUMNS] for c in range(0, p.shape[1], _SUM_COLUMNS)])
    return p, new_highest, total * across_columns(rescale, total) + added, rescale


def _hide_unseen(part: Part, i: jax.Array, scores: jax.Array) -> jax.Array:
    """Scores of tile i without those that lie behind a row's token or before its window."""
    sizes = part.sizes
    token = div(plgpu.broadcasted_iota(jnp.int32, (ROWS_PER_WARPGROUP,), 0, layout=_BY_ROW), sizes.group)
    num_seen = token + (part.first_position + 1 - i * sizes.config.tile)
    num_hidden = None if sizes.sliding_window is None else num_seen - sizes.sliding_window
    return hide_columns(scores, num_hidden, num_seen, interpret=sizes.is_interpreted)


def _hand_over(part: Part, p: jax.Array) -> jax.Array | None:
    """Weights for the next product, in registers or in shared memory."""
    p = p.astype(part.sizes.dtype)
    if part.sizes.config.p_in_registers:
        return p
    part.scratch.p[part.warpgroup] = p
    plgpu.commit_smem()
    return None


def _rescaled(part: Part, progress: Progress) -> jax.Array:
    """The accumulator relative to the present maximum."""
    if part.sizes.is_interpreted:
        return progress.acc * across_columns(progress.rescale, progress.acc)
    return multiply_if_needed(progress.acc, progress.rescale)


def _accumulator(part: Part) -> Any:
    return plgpu.ACC((ROWS_PER_WARPGROUP, part.sizes.head_dim), jnp.float32)


def _start_values(
    part: Part,
    acc_ref: Ref,
    acc: jax.Array,
    p: jax.Array | None,
    i: jax.Array,
    *,
    is_first: bool = False,
    is_last: bool = False,
) -> None:
    """Begin to add the values of tile i, weighted by p, to acc.

    Only the query tile's first and last key tile, which `is_first` and `is_last` say that i may be, have keys that no
    token sees.
    """
    slot, scratch, tile = part.slot_of(i), part.scratch, part.sizes.config.tile
    if not part.sizes.is_interpreted:  # which cannot set an accumulator: it starts from zeros
        acc_ref[...] = acc
    plgpu.barrier_wait(scratch.v_full.at[slot])
    unseen = [part.lowest_key > i * tile] if is_first else []
    unseen += [part.query.num_keys < part.end * tile] if is_last else []
    if unseen:
        pl.when(functools.reduce(jnp.logical_or, unseen))(lambda: _zero_unseen_values(part, i))
    plgpu.wgmma(acc_ref, scratch.p.at[part.warpgroup] if p is None else p, scratch.v.at[slot])


def _finish_values(part: Part, acc_ref: Ref, acc: jax.Array) -> jax.Array:
    new = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
    return acc + new if part.sizes.is_interpreted else new


def _zero_unseen_values(part: Part, i: jax.Array) -> None:
    """Zero the values of tile i that no token sees: their weights are 0, but 0 * NaN is NaN.

    The warpgroups share the work, 64 keys at a time, and each waits for all. 64 columns at a time: few registers.
    """
    sizes, scratch, slot = part.sizes, part.scratch, part.slot_of(i)
    for begin in range(0, sizes.config.tile, 64):

        @pl.when(part.warpgroup == begin // 64 % sizes.config.warpgroups)
        def _(begin: int = begin):
            key = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=_BY_ROW) + (i * sizes.config.tile + begin)
            is_seen = jnp.logical_and(key < part.query.num_keys, key >= part.lowest_key)
            for column in range(0, sizes.head_dim, 64):
                here = pl.ds(begin, 64), pl.ds(column, 64)
                values = plgpu.load(scratch.v.at[slot, *here], layout=_WGMMA)
                scratch.v[slot, *here] = jnp.where(across_columns(is_seen, values), values, jnp.zeros_like(values))

    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.v_zeroed)
    plgpu.barrier_wait(scratch.v_zeroed)
