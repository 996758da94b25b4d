"""A benchmark of a server as a picture. Needs matplotlib (extra `plot`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxvllm.bench.client import RequestResult
from jaxvllm.bench.report import METRICS, ServeReport, piece_times

PERCENTILES = (50, 90, 99)


def plot(report: ServeReport, results: Sequence[RequestResult], path: str | Path, title: str) -> None:
    """Write a PNG: how TTFT, TPOT, ITL and E2EL are distributed, and tokens and requests over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 3).ravel()
    for axis, (name, (words, short)) in zip(axes, METRICS.items(), strict=False):
        values = np.sort(report.samples_ms[name])
        if len(values):
            axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
            for percentile in PERCENTILES:
                axis.axvline(np.percentile(values, percentile), color="0.7", linewidth=0.8)
        axis.set(title=words, xlabel=f"{short} (ms); lines: p50, p90, p99", ylabel="share of samples", ylim=(0, 1))
    done = [result for result in results if result.error is None]
    _plot_tokens(axes[4], done, report.duration_s)
    _plot_requests(axes[5], done)
    figure.savefig(path, format="png", dpi=120)


def _plot_tokens(axis, done: Sequence[RequestResult], duration_s: float) -> None:
    times = np.concatenate([piece_times(result) for result in done]) if done else np.zeros(0)
    edges = np.linspace(0, max(duration_s, 1e-9), 61)
    counts, _ = np.histogram(times, edges)
    axis.step(edges[:-1], counts / np.diff(edges), where="post")
    axis.set(title="Output", xlabel="time (s)", ylabel="tokens/s")


def _plot_requests(axis, done: Sequence[RequestResult]) -> None:
    changes = sorted(change for r in done for change in ((r.start_s, 1), (r.start_s + r.latency_s, -1)))
    if changes:
        times, steps = zip(*changes, strict=True)
        axis.step(times, np.cumsum(steps), where="post")
    axis.set(title="Requests under way", xlabel="time (s)", ylabel="requests")
