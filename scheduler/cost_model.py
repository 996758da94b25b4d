"""How long a step takes, by its bucket: a table fitted from measured step times.

A padded step does the same work whatever is in it, except for attention, which reads the real context. So the time of
a step is its bucket's own time plus a time for each context token, the same for every bucket.
"""

import json
import re
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
        """Kind -> what a row costs beyond its token: from buckets of one T that differ in R; 0 if there are none."""
        result = {}
        for kind in {key.kind for key in self.bucket_ms}:
            ends: dict[int, list[tuple[int, float]]] = {}
            for key, ms in self.bucket_ms.items():
                if key.kind == kind:
                    ends.setdefault(key.T, []).append((key.R, ms))
            pairs = [(min(points), max(points)) for points in ends.values() if len(points) > 1]
            slopes = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in pairs]
            result[kind] = max(float(np.median(slopes)), 0.0) if slopes else 0.0
        return result

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
    return CostModel(dict(zip(keys, solution[:-1].tolist(), strict=True)), float(solution[-1]) * 1e-6)


def load_cost_model(path: str | Path) -> CostModel:
    """Fit the model to a JSON file of measured steps.

    The file is {"samples": [{"kind", "T", "R", "context_tokens", "ms"}, ...]}, or what scripts/compare_buckets.py
    --json writes: mean step times by bucket, their context unknown and so part of the bucket's own time.

    Raises:
      ValueError: the file is of neither form; names the file and what is wrong.
    """
    try:
        measured: dict[str, Any] = json.loads(Path(path).read_text())
        read = _read_bucket_means if "results" in measured else _read_samples
        return fit(read(measured))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no step times: {error!r}") from error


def _read_samples(measured: dict[str, Any]) -> list[StepSample]:
    return [
        StepSample(BucketKey(row["kind"], row["T"], row["R"]), row["context_tokens"], row["ms"])
        for row in measured["samples"]
    ]


def _read_bucket_means(measured: dict[str, Any]) -> list[StepSample]:
    samples = []
    for result in measured["results"]:
        for name, ms in result["step_ms"].items():
            match = re.fullmatch(r"(decode|mixed)\(T=(\d+), R=(\d+)\)", name)
            if match is None:
                raise ValueError(f"{name!r} names no bucket")
            kind, num_tokens, num_rows = match.groups()
            samples.append(StepSample(BucketKey(kind, int(num_tokens), int(num_rows)), 0, ms))  # type: ignore[arg-type]
    return samples


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
