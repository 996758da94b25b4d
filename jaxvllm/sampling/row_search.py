"""The threshold of a filter among all tokens of a row, in a kernel with one program a row.

A sample of the row guesses two thresholds around it. A pass over the row says on which side of them it lies, exactly,
and one writes down the logits between; what is left is found bit by bit among these, usually a few thousand. Where the
sample misleads, more are left: that takes longer and finds the same.

Letters: V vocab
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.sampling.groups import GROUP_SIZE
from jaxvllm.sampling.row_kernel import CHUNK, Ref, ScaledRow, num_groups
from jaxvllm.sampling.thresholds import LIMB_BITS, limbs, ordered_bits
from pallas_kernels.lazy import pl, triton

_SAMPLED_GROUPS = 128
# Tokens a step of what is left between the guesses: with CHUNK a program spills where the vocabulary is above 131,072.
_CHUNK_BETWEEN = CHUNK // 2
# Of what is summed: 5 standard deviations of the share that a sample of 8192 tokens of like weights finds.
_MARGIN = 0.015

_NUM_LIMBS = len(LIMB_BITS)
Sums = list[jax.Array]  # u32[] of each limb


@dataclass(frozen=True)
class RowSearch:
    """The largest t for which the tokens of at least rank t weigh enough.

    Attributes:
      row: the logits.
      between: f32[R, V] room to write.
      weigh: f32 in [0, 1] of scaled logits; they are summed as thresholds.limbs, exactly.
      is_enough: of the sums of the tokens of some rank and above, and those of all; once it fails it never holds again.
      share: about which share of all weights is enough; f32[].
      interpret: as of the kernel.
    """

    row: ScaledRow
    between: Ref
    weigh: Callable[[jax.Array], jax.Array]
    is_enough: Callable[[Sums, Sums], jax.Array]
    share: jax.Array
    interpret: bool

    def threshold(self) -> jax.Array:
        """u32[]; 0 if not even all tokens weigh enough."""
        low, high = self._guess()
        totals, of_low, of_high = self._sums(self.row.fold, CHUNK, [jnp.uint32(0), low, high])
        is_low, is_high = self.is_enough(of_low, totals), self.is_enough(of_high, totals)
        above = [jnp.where(is_low, jnp.where(is_high, 0, b), a) for a, b in zip(of_low, of_high, strict=True)]
        end = jnp.where(is_high, jnp.uint32(0xFFFFFFFF), jnp.where(is_low, high, low))
        start = jnp.where(is_high, high, jnp.where(is_low, low, jnp.uint32(0)))
        count = self._write_between(start, end)

        def fold(visit: Callable[[jax.Array, jax.Array, Any], Any], state: Any) -> Any:
            def step(i: jax.Array, state: Any) -> Any:
                places = i * _CHUNK_BETWEEN + jnp.arange(_CHUNK_BETWEEN)
                mask = places < count
                return visit(triton.load(self.between.at[self.row.number, places], mask=mask, other=0.0), mask, state)

            return lax.fori_loop(0, pl.cdiv(count, _CHUNK_BETWEEN), step, state)

        def find_digit(i: jax.Array, found: jax.Array) -> jax.Array:
            shift = (30 - 2 * i).astype(jnp.uint32)
            tried = [found | jnp.uint32(candidate) << shift for candidate in (1, 2, 3)]
            digit = jnp.uint32(0)
            for sums in self._sums(fold, _CHUNK_BETWEEN, tried):
                sums = [a + b for a, b in zip(sums, above, strict=True)]
                digit += self.is_enough(sums, totals).astype(jnp.uint32)
            return found | digit << shift

        return lax.fori_loop(0, 16, find_digit, jnp.uint32(0))

    def _guess(self) -> tuple[jax.Array, jax.Array]:
        """A threshold that is probably too low, and one that is probably too high."""
        lanes = jnp.arange(_SAMPLED_GROUPS * GROUP_SIZE)
        groups = lanes // GROUP_SIZE * num_groups(self.row.vocab_size) // _SAMPLED_GROUPS
        values = self.row.load(groups * GROUP_SIZE + lanes % GROUP_SIZE)
        weights, rank = self.weigh(values), ordered_bits(values)
        total = jnp.sum(weights)
        targets = (self.share + _MARGIN) * total, (self.share - _MARGIN) * total

        def find_bit(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            tried = [t | jnp.uint32(1) << (31 - i).astype(jnp.uint32) for t in found]
            sums = [jnp.sum(jnp.where(rank >= t, weights, 0.0)) for t in tried]
            return tuple(jnp.where(s >= w, t, f) for s, w, t, f in zip(sums, targets, tried, found, strict=True))

        low, high = lax.fori_loop(0, 32, find_bit, (jnp.uint32(0), jnp.uint32(0)))
        return low, high

    def _sums(self, fold: Callable[..., Any], width: int, thresholds: list[jax.Array]) -> list[Sums]:
        """The sums of what has at least the rank of each threshold; fold visits `width` tokens a step."""

        def add(values: jax.Array, mask: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rank = ordered_bits(values)
            parts = [jnp.where(mask, part, jnp.uint32(0)) for part in limbs(self.weigh(values))]
            found = [jnp.where(rank >= t, part, jnp.uint32(0)) for t in thresholds for part in parts]
            return tuple(total + part for total, part in zip(sums, found, strict=True))

        start = tuple(jnp.zeros(width, jnp.uint32) for _ in range(len(thresholds) * _NUM_LIMBS))
        sums = [jnp.sum(total) for total in fold(add, start)]
        return [sums[i : i + _NUM_LIMBS] for i in range(0, len(sums), _NUM_LIMBS)]

    def _write_between(self, start: jax.Array, end: jax.Array) -> jax.Array:
        """Write down the logits whose rank is in [start, end); how many."""
        room = self.between.shape[1]

        def write(values: jax.Array, mask: jax.Array, count: jax.Array) -> jax.Array:
            rank = ordered_bits(values)
            is_between = mask & (rank >= start) & (rank < end)
            number = jnp.cumsum(is_between.astype(jnp.int32))
            # The interpreter writes back what it read for the others: not where one that is meant writes.
            places = jnp.where(is_between, count + number - 1, room)
            triton.store(self.between.at[self.row.number, places], values, mask=is_between)
            return count + jnp.max(number)

        count = self.row.fold(write, jnp.int32(0))
        if not self.interpret:  # which runs one thing after the other
            triton.debug_barrier()
        return count
