"""A histogram: how often values fell between given bounds, and their sum."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Distribution:
    """Counts of observed values.

    Attributes:
      bounds: upper bounds of the buckets, ascending; a value equal to a bound lies below it. Infinity is implied.
      counts: len(bounds) + 1 numbers, the last of values above all bounds; not cumulative.
      sum: of all values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


def one_two_five(max_value: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to max_value: vLLM's bounds for numbers of tokens."""
    bounds, power = [], 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > max_value:
                return bounds
            bounds.append(float(factor * power))
        power *= 10
