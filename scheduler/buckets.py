"""Buckets: the few padded shapes a step may have, and the policies that choose them.

Every BucketKey is one compiled program, so a policy trades padding waste against the number of programs. A policy is
plain data (sizes for decode steps, sizes for mixed steps), whatever strategy made it.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

StepKind = Literal["decode", "mixed"]

DEFAULT_MAX_PROGRAMS = 24
FEW_REQS = 32  # a mixed step of a few long prompts should not pay for max_num_seqs rows of logits
SOME_REQS = 256  # rows of the finer line of geometric
FINER_DECODE_SIZES = (96, 192)  # of geometric, too
MIN_FACTOR = 1.4  # of geometric; prompts are cut where buckets end, and below this more of them save next to nothing
ROW_COST_TOKENS = 0.3  # what a row of logits costs, in tokens; of Qwen3-0.6B (0.5 us of 1.9)
PADS_WORTH_A_STEP = 128  # simulated with measured times of Qwen3-0.6B, 64 to 256 are alike
# Below this, the weights' bytes bound a mixed step and rows of logits are nearly free: one R is enough.
MIN_TOKENS_FOR_FEW_REQS = 512
MIN_MIXED_TOKENS = 16


@dataclass(frozen=True, order=True, slots=True)
class BucketKey:
    """The shape of a step, one compiled program each.

    Attributes:
      kind: "decode": every row has exactly one token and nobody is admitted, R == T. "mixed": anything.
      T: padded number of tokens.
      R: padded number of rows (requests), at most T.
    """

    kind: StepKind
    T: int
    R: int

    def __str__(self) -> str:
        return f"{self.kind}(T={self.T}, R={self.R})"


class StepShape(NamedTuple):
    """The real size of one step."""

    kind: StepKind
    num_tokens: int
    num_reqs: int


class PaddingWaste(NamedTuple):
    """Pads as a fraction of what is computed: sum(T - num_tokens) / sum(T), and the same for rows."""

    tokens: float
    rows: float


@dataclass(frozen=True, slots=True)
class BucketPolicy:
    """Sizes that cover every step up to max_num_batched_tokens tokens and max_num_seqs requests.

    A bucket is one program of the model. The sampler has programs of its own, for each number of rows: with 24 buckets
    for 1024 requests there are 66 programs in all.

    Attributes:
      name: of the strategy, for logs and tables.
      max_num_seqs, max_num_batched_tokens: the limits that it covers.
      decode_sizes: ascending T (= R) of decode steps. A decode step runs in a mixed bucket where that is smaller than
        every decode bucket that holds it, or none does.
      mixed_sizes: ascending (T, R); the last one covers both limits.
      row_cost_tokens: what a row costs, in tokens; a mixed step runs in the bucket that costs the least by it.
      pads_worth_a_step: as many pads cost as much as a mixed step in the place of a decode step; see fitted_chunk.

    Raises:
      ValueError: sizes are not ascending, or some legal step has no bucket.
    """

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_sizes: tuple[int, ...]
    mixed_sizes: tuple[tuple[int, int], ...]
    row_cost_tokens: float = 0.0
    pads_worth_a_step: int = PADS_WORTH_A_STEP

    def __post_init__(self) -> None:
        for sizes in (self.decode_sizes, self.mixed_sizes):
            if list(sizes) != sorted(set(sizes)):
                raise ValueError(f"bucket sizes {list(sizes)} must be ascending and different.")
        if not all(isinstance(size, int) and size >= 1 for size in self.decode_sizes):
            raise ValueError(f"decode sizes {list(self.decode_sizes)} must be integers of at least 1.")
        largest = self.mixed_sizes[-1] if self.mixed_sizes else None
        if largest is None or largest[0] < self.max_num_batched_tokens:
            raise ValueError(
                f"the largest mixed bucket {largest} must hold max_num_batched_tokens={self.max_num_batched_tokens}: "
                "add a larger size or lower max_num_batched_tokens."
            )
        num_rows = min(largest[0], self.max_num_seqs)
        if largest[1] < num_rows:
            raise ValueError(f"the largest mixed bucket {largest} must have {num_rows} rows, for max_num_seqs.")
        for T, R in self.mixed_sizes:
            if not (isinstance(T, int) and isinstance(R, int) and 1 <= R <= T):
                raise ValueError(f"mixed bucket (T={T}, R={R}) must have 1 to T rows.")

    def select(self, kind: StepKind, num_tokens: int, num_reqs: int) -> BucketKey:
        """The cheapest bucket for a step.

        Raises:
          ValueError: the step exceeds the policy's limits.
        """
        if num_tokens > self.max_num_batched_tokens or num_reqs > min(self.max_num_seqs, num_tokens):
            raise ValueError(
                f"a step of {num_tokens} tokens and {num_reqs} requests exceeds the buckets' limits: "
                f"{self.max_num_batched_tokens} tokens, {self.max_num_seqs} requests."
            )
        size = None
        if kind == "decode" and self.decode_sizes and num_tokens <= self.decode_sizes[-1]:
            size = self.decode_sizes[bisect_left(self.decode_sizes, num_tokens)]
            if size <= self.mixed_sizes[0][0]:  # no mixed bucket is smaller
                return BucketKey("decode", size, size)
        fitting = (mixed for mixed in self.mixed_sizes if mixed[0] >= num_tokens and mixed[1] >= num_reqs)
        mixed = min(fitting, key=lambda mixed: (self._tokens(*mixed), mixed))
        if size is not None and self._tokens(size, size) <= self._tokens(*mixed):
            return BucketKey("decode", size, size)
        return BucketKey("mixed", *mixed)

    def fitted_chunk(self, num_before: int, num_new: int, num_reqs: int) -> int:
        """How much of a prompt to compute at the end of a step: all that fits, or as much as fills a smaller bucket.

        What is left then makes the next step a mixed one, if that would not be one anyway. Where no other request needs
        that step, a prompt stays whole.

        Args:
          num_before: tokens that the step has without it.
          num_new: tokens of the prompt that the step could take.
          num_reqs: requests of the step, with it.
        """
        num_tokens = num_before + num_new
        num_pads = self.select("mixed", num_tokens, num_reqs).T - num_tokens
        if num_reqs == 1 or num_pads <= self.pads_worth_a_step:
            return num_new
        smaller = (T for T, R in self.mixed_sizes if num_before < T < num_tokens and num_reqs <= R)
        return max(smaller, default=num_tokens) - num_before

    def _tokens(self, T: int, R: int) -> float:
        """What a bucket costs, in tokens."""
        return T + self.row_cost_tokens * R

    def keys(self) -> list[BucketKey]:
        """All buckets, always in the same order: largest first, so that the slowest compile starts first."""
        decode = [BucketKey("decode", size, size) for size in self.decode_sizes]
        mixed = [BucketKey("mixed", T, R) for T, R in self.mixed_sizes]
        return [*reversed(mixed), *reversed(decode)]

    def padding_waste(self, steps: Iterable[StepShape]) -> PaddingWaste:
        """How much of what these steps compute is padding; (0, 0) for no steps."""
        tokens = rows = padded_tokens = padded_rows = 0
        for step in steps:
            key = self.select(*step)
            tokens, padded_tokens = tokens + step.num_tokens, padded_tokens + key.T
            rows, padded_rows = rows + step.num_reqs, padded_rows + key.R
        if not padded_tokens:
            return PaddingWaste(0.0, 0.0)
        return PaddingWaste(1 - tokens / padded_tokens, 1 - rows / padded_rows)

    def restricted(self, max_num_seqs: int, max_num_batched_tokens: int) -> "BucketPolicy":
        """The same sizes for limits that are not larger; sizes beyond the limits become the limits.

        Raises:
          ValueError: the limits exceed those that the policy covers.
        """
        if max_num_seqs > self.max_num_seqs or max_num_batched_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"the bucket policy {self.name!r} covers max_num_seqs={self.max_num_seqs} and max_num_batched_tokens="
                f"{self.max_num_batched_tokens}, not {max_num_seqs} and {max_num_batched_tokens}: lower the limits to "
                "these, or tune a policy for the larger ones."
            )
        decode = {min(size, max_num_seqs) for size in self.decode_sizes}
        mixed = {(min(T, max_num_batched_tokens), min(R, max_num_seqs)) for T, R in self.mixed_sizes}
        return BucketPolicy(
            self.name, max_num_seqs, max_num_batched_tokens, tuple(sorted(decode)), tuple(sorted(mixed)),
            self.row_cost_tokens, self.pads_worth_a_step,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


def load_policy(path: str | Path) -> BucketPolicy:
    """Read a policy that `BucketPolicy.save` (or a tuner) wrote.

    Raises:
      ValueError: the file is not a bucket policy; the message names the file and what is wrong.
    """
    try:
        data = json.loads(Path(path).read_text())
        data["decode_sizes"] = tuple(data["decode_sizes"])
        data["mixed_sizes"] = tuple((T, R) for T, R in data["mixed_sizes"])
        return BucketPolicy(**data)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a bucket policy: {error}") from error


def _mixed_rows(T: int, max_num_seqs: int, few_reqs: int) -> list[int]:
    if T < MIN_TOKENS_FOR_FEW_REQS:
        return [min(T, max_num_seqs)]
    return sorted({min(T, few_reqs, max_num_seqs), min(T, max_num_seqs)})


def _mixed_sizes(tokens: Iterable[int], max_num_seqs: int, few_reqs: int = FEW_REQS) -> tuple[tuple[int, int], ...]:
    return tuple((T, R) for T in sorted(set(tokens)) for R in _mixed_rows(T, max_num_seqs, few_reqs))


def _powers(first: int, last: int) -> list[int]:
    """Powers of two from `first` on, and `last` itself."""
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * 2, last))
    return sizes


def powers_of_two(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_programs: int = DEFAULT_MAX_PROGRAMS,
    min_decode_size: int = 1,
    min_mixed_size: int = MIN_MIXED_TOKENS,
) -> BucketPolicy:
    """Sizes double. The smallest mixed sizes are left out until the policy fits max_programs.

    Args:
      min_decode_size: the smallest decode size. On a GPU 8: XLA turns products with a single row into multiply and
        reduce, with the whole product in memory (622 MB for the logits of Qwen3-0.6B), and uses matmuls above that.
      min_mixed_size: the smallest T of mixed steps. On a GPU 256: below it a step costs the same, the time in which
        the weights are read, and every program costs seconds at start.

    Raises:
      ValueError: max_programs is too small even for one mixed size.
    """
    decode = _powers(min_decode_size, max_num_seqs)
    tokens = _powers(min_mixed_size, max_num_batched_tokens)
    while len(decode) + len(_mixed_sizes(tokens, max_num_seqs)) > max_programs:
        tokens = tokens[1:]
        if not tokens:
            raise ValueError(f"{max_programs=} is too small: {len(decode)} decode sizes and a mixed size are needed.")
    return BucketPolicy(
        "powers_of_two", max_num_seqs, max_num_batched_tokens, tuple(decode), _mixed_sizes(tokens, max_num_seqs)
    )


def geometric(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_programs: int = DEFAULT_MAX_PROGRAMS,
    min_decode_size: int = 1,
    min_mixed_size: int = MIN_MIXED_TOKENS,
) -> BucketPolicy:
    """Two lines of mixed sizes: powers of two with rows for all, and for up to SOME_REQS requests what is left of the
    budget, each size larger than the one before by the same factor, at least MIN_FACTOR. Decode sizes double, and there
    are more of them where a busy engine runs.

    Mixed steps cost in proportion to their tokens and mostly have few requests, so that is where programs pay.

    Args:
      min_decode_size, min_mixed_size: see powers_of_two.

    Raises:
      ValueError: max_programs is too small even for powers of two.
    """
    base = powers_of_two(max_num_seqs, max_num_batched_tokens, max_programs, min_decode_size, min_mixed_size)
    rows = min(SOME_REQS, max_num_seqs)
    smallest = base.mixed_sizes[0][0]
    # Where all rows are as few as some, one line serves both.
    many = {(T, min(T, max_num_seqs)) for T, _ in base.mixed_sizes if max_num_seqs <= T and rows < max_num_seqs}
    many.add((max_num_batched_tokens, min(max_num_batched_tokens, max_num_seqs)))
    room = max_programs - len(base.decode_sizes) - len(many)
    finer = [size for size in FINER_DECODE_SIZES if size < max_num_seqs][:room]
    decode = tuple(sorted({*base.decode_sizes, *finer}))
    ratio = max_num_batched_tokens / smallest
    num_few = min(max_programs - len(decode) - len(many), math.ceil(math.log(ratio, MIN_FACTOR)))
    factor = ratio ** (1 / max(num_few, 1))
    tokens = {min(-(-int(smallest * factor**i) // 32) * 32, max_num_batched_tokens) for i in range(num_few)}
    few = {(T, min(T, rows)) for T in tokens if max_num_batched_tokens > T}
    return BucketPolicy(
        "geometric", max_num_seqs, max_num_batched_tokens, decode, tuple(sorted(many | few)), ROW_COST_TOKENS
    )


def linear(
    max_num_seqs: int, max_num_batched_tokens: int, decode_step: int | None = None, mixed_step: int | None = None
) -> BucketPolicy:
    """Sizes grow by a constant step; by default an eighth of the limit, at most 24 programs.

    Raises:
      ValueError: a step is not positive.
    """
    decode_step = -(-max_num_seqs // 8) if decode_step is None else decode_step
    mixed_step = -(-max_num_batched_tokens // 8) if mixed_step is None else mixed_step
    if decode_step < 1 or mixed_step < 1:
        raise ValueError(f"{decode_step=} and {mixed_step=} must be at least 1.")
    decode = sorted({min(i, max_num_seqs) for i in range(decode_step, max_num_seqs + decode_step, decode_step)})
    last = max_num_batched_tokens
    tokens = (min(i, last) for i in range(mixed_step, last + mixed_step, mixed_step))
    return BucketPolicy("linear", max_num_seqs, last, tuple(decode), _mixed_sizes(tokens, max_num_seqs))


def explicit(
    max_num_seqs: int, max_num_batched_tokens: int, decode_sizes: Iterable[int], mixed_sizes: Iterable[int]
) -> BucketPolicy:
    """The sizes given; mixed ones as tokens.

    Raises:
      ValueError: the sizes do not cover the limits.
    """
    mixed = _mixed_sizes(mixed_sizes, max_num_seqs)
    return BucketPolicy("explicit", max_num_seqs, max_num_batched_tokens, tuple(sorted(set(decode_sizes))), mixed)


def one_shape(max_num_seqs: int, max_num_batched_tokens: int) -> BucketPolicy:
    """A single program: every step, decode steps too, is padded to the limits."""
    rows = min(max_num_seqs, max_num_batched_tokens)
    return BucketPolicy("one_shape", max_num_seqs, max_num_batched_tokens, (), ((max_num_batched_tokens, rows),))
