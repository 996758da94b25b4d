"""Grammar masks of a step, packed for the program that applies them: a buffer of places and masks a call."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.grammar import StepMasks

SMALL_CALL, LARGE_CALL = 8, 64  # masks; a mask of 151,936 tokens is 19 KB


def masks_per_call(num_rows: int) -> tuple[int, ...]:
    """The numbers of masks that there are programs for, behind a step of so many rows."""
    return (SMALL_CALL, min(num_rows, LARGE_CALL)) if num_rows > 2 * SMALL_CALL else (SMALL_CALL,)


def mask_buffer_size(num_masks: int, mask_words: int) -> int:
    """Length of the i32 buffer of a call: i32[num_masks] places, then i32[num_masks, mask_words] masks."""
    return num_masks * (1 + mask_words)


@dataclass(slots=True)
class MaskPlan:
    """The masks of one step, made when they are asked for: its model runs meanwhile.

    Attributes:
      places: the row in the step of each mask, in the order of `masks`.
      masks: where they come from.
      num_rows: R of the step's bucket; as a place it is that of a pad.
      mask_words: words of 32 tokens, as many as hold the model's vocabulary.
    """

    places: list[int]
    masks: StepMasks
    num_rows: int
    mask_words: int
    _calls: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def buffers(self) -> Iterator[tuple[int, np.ndarray]]:
        """(masks of the call, its buffer), see mask_buffer_size; to be read once. Blocks as StepMasks.fill does."""
        start, num_masks = 0, len(self.places)
        while start < num_masks:
            # Two small calls cost about what a large one does, and send a fourth.
            size = masks_per_call(self.num_rows)[-1 if num_masks - start > 2 * SMALL_CALL else 0]
            buffer = np.empty(mask_buffer_size(size, self.mask_words), np.int32)
            places, masks = buffer[:size], buffer[size:].reshape(size, self.mask_words)
            places.fill(self.num_rows)
            of_call = self.places[start : start + size]
            counts = self.masks.fill(start, masks[: len(of_call)])
            places[: len(of_call)] = np.where(counts, of_call, self.num_rows)
            self._calls.append((places, masks))
            start += size
            yield size, buffer

    def mask_of(self, place: int) -> np.ndarray | None:
        """i32[mask_words] of a row of the step, once buffers() has been read; None if it has none."""
        for places, masks in self._calls:
            for index in np.flatnonzero(places == place):
                return masks[index]
        return None
