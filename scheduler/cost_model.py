"""How long a step takes, by its bucket: a table fitted from measured step times.

A padded step does the same work whatever is in it, except for attention, which reads the real context. So the time of
a step is its bucket's own time plus a time for each context token, the same for every bucket.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scheduler.buckets import BucketKey


class StepSample(NamedTuple):
    """A measured step: its bucket, the context tokens that its requests attend to in all, and its time."""

    key: BucketKey
    context_tokens: int
    ms: float


@dataclass(frozen=True)
class CostModel:
    """Step times by bucket. A bucket that was not measured lies on the line between its neighbours of the same kind.

    Attributes:
      bucket_ms: time of a step without context.
      ms_per_context_token: added for each context token of the step.
    """

    bucket_ms: Mapping[BucketKey, float]
    ms_per_context_token: float = 0.0

    def step_ms(self, key: BucketKey, context_tokens: int) -> float:
        """Time of a step in milliseconds."""
        known = self.bucket_ms.get(key)
        if known is None:
            known = self._interpolate(key)
        return known + self.ms_per_context_token * context_tokens

    def completed(self, keys: Iterable[BucketKey]) -> "CostModel":
        """The same model with an entry for each key, so that the simulation does not interpolate in every step."""
        table = {key: self.bucket_ms.get(key, None) for key in keys}
        filled = {key: self._interpolate(key) if ms is None else ms for key, ms in table.items()}
        return CostModel({**self.bucket_ms, **filled}, self.ms_per_context_token)

    @cached_property
    def _ms_per_row(self) -> dict[str, float]:
        """Kind -> what a row costs beyond its token: from buckets of other R at the same T, or between two; else 0."""
        lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for key, ms in sorted(self.bucket_ms.items()):
            lines.setdefault((key.kind, key.R), []).append((key.T, ms))
        slopes: dict[str, list[float]] = {kind: [] for kind, _ in lines}
        for key, ms in self.bucket_ms.items():
            for (kind, R), line in lines.items():
                if kind == key.kind and key.R > R and line[0][0] <= key.T <= line[-1][0]:
                    with_fewer = float(np.interp(key.T, [T for T, _ in line], [ms for _, ms in line]))
                    slopes[kind].append((ms - with_fewer) / (key.R - R))
        return {kind: max(float(np.median(found)), 0.0) if found else 0.0 for kind, found in slopes.items()}

    def _interpolate(self, key: BucketKey) -> float:
        per_row = self._ms_per_row.get(key.kind, 0.0)
        points: dict[int, tuple[int, float]] = {}
        for other, ms in self.bucket_ms.items():
            if other.kind == key.kind:
                points[other.T] = max(points.get(other.T, (0, 0.0)), (other.R, ms))  # of several R, the most rows
        if not points:
            raise ValueError(f"no step of kind {key.kind!r} was measured, so {key} has no time; measure one.")
        sizes = sorted(points)
        tokens_ms = [points[size][1] - per_row * points[size][0] for size in sizes]
        largest = sizes[-1]
        if largest < key.T:
            return tokens_ms[-1] * key.T / largest + per_row * key.R
        return float(np.interp(key.T, sizes, tokens_ms)) + per_row * key.R


def fit(samples: Iterable[StepSample]) -> CostModel:
    """Least squares over all samples: a time for each bucket, and one time for each context token.

    Raises:
      ValueError: there is no sample.
    """
    rows = list(samples)
    if not rows:
        raise ValueError("a cost model needs at least one measured step.")
    keys = sorted({row.key for row in rows})
    column = {key: index for index, key in enumerate(keys)}
    matrix = np.zeros((len(rows), len(keys) + 1))
    for index, row in enumerate(rows):
        matrix[index, column[row.key]] = 1.0
        matrix[index, -1] = row.context_tokens * 1e-6
    ms = np.array([row.ms for row in rows])
    solution = np.linalg.lstsq(matrix, ms, rcond=None)[0]
    if solution[-1] < 0:  # noise: more context is never faster
        solution = np.append(np.linalg.lstsq(matrix[:, :-1], ms, rcond=None)[0], 0.0)
    # Noise again: no bucket is free.
    least = {key: min(row.ms for row in rows if row.key == key) / 10 for key in keys}
    bucket_ms = {key: max(ms, least[key]) for key, ms in zip(keys, solution[:-1].tolist(), strict=True)}
    return CostModel(bucket_ms, float(solution[-1]) * 1e-6)


def load_cost_model(path: str | Path) -> CostModel:
    """Fit the model to a JSON file of measured steps.

    The file is what `jaxvllm buckets measure` or `compare --json` writes:
    {"samples": [{"kind", "T", "R", "context_tokens", "ms"}, ...], ...}.

    Raises:
      ValueError: the file is of neither form; names the file and what is wrong.
    """
    try:
        measured: dict[str, Any] = json.loads(Path(path).read_text())
        return fit(map(_read_sample, measured["samples"]))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no step times: {error!r}") from error


def _read_sample(row: dict[str, Any]) -> StepSample:
    sample = StepSample(BucketKey(row["kind"], row["T"], row["R"]), row["context_tokens"], row["ms"])
    sizes = (sample.key.T, sample.key.R)
    is_bucket = sample.key.kind in ("decode", "mixed") and all(isinstance(n, int) and n >= 1 for n in sizes)
    if not is_bucket or not 0 <= sample.context_tokens < math.inf or not 0 < sample.ms < math.inf:
        raise ValueError(f"{row} is no step of a bucket with a time above 0")
    return sample


def roofline(
    keys: Iterable[BucketKey],
    *,
    weight_bytes: float,
    kv_bytes_per_token: float,
    bytes_per_s: float,
    flops_per_s: float,
    overhead_ms: float = 0.0,
) -> CostModel:
    """A guess for a device that was not measured: the longer of reading the weights and of multiplying by them.

    Args:
      weight_bytes: of bfloat16 weights, each used once a token.
      kv_bytes_per_token: of all layers.
      overhead_ms: added to every step.
    """
    table = {
        key: overhead_ms + 1000 * max(weight_bytes / bytes_per_s, key.T * weight_bytes / flops_per_s) for key in keys
    }
    return CostModel(table, 1000 * kv_bytes_per_token / bytes_per_s)
