"""The comparison as a table, as JSON, and as a picture."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxvllm.buckets.compare import Result
from scheduler.cost_model import StepSample

HEAD = ["policy", "programs", "compile s", "workspace MB", "token waste", "row waste"]
HEAD += ["mean step ms", "p99 ITL ms", "running", "out tok/s"]


def table(results: Sequence[Result]) -> str:
    """The results as aligned text."""
    rows = [
        [
            r.policy + (" (estimated)" if r.is_estimated else ""), str(r.num_programs),
            "-" if r.compile_s is None else f"{r.compile_s:.1f}",
            "-" if r.workspace_bytes is None else f"{r.workspace_bytes / 1e6:.1f}",
            f"{r.token_waste:.1%}", f"{r.row_waste:.1%}", f"{r.mean_step_ms:.2f}", f"{r.p99_inter_token_ms:.1f}",
            f"{r.mean_running:.1f}", f"{r.tokens_per_s:.0f}",
        ]
        for r in results
    ]  # fmt: skip
    return aligned([HEAD, *rows])


def step_times(results: Sequence[Result]) -> str:
    """A line a policy and kind: the median step time of each bucket that ran."""
    lines = []
    for result in results:
        for kind in ("decode", "mixed"):
            buckets = sorted((size, ms) for name, ms in result.step_ms.items() for size in _sizes(name, kind))
            if buckets:
                times = ", ".join(f"{T} x {R}: {ms:.2f}" for (T, R), ms in buckets)
                lines.append(f"{result.policy} {kind}: {times}")
    return "\n".join(lines)


def _sizes(name: str, kind: str) -> list[tuple[int, int]]:
    """(T, R) in a bucket's name, if it is of that kind."""
    return [(int(T), int(R)) for T, R in re.findall(rf"^{kind}\(T=(\d+), R=(\d+)\)$", name)]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, each column as wide as it has to be."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def write_json(results: Sequence[Result], samples: Sequence[StepSample], path: str | Path, **about: Any) -> None:
    """Everything that was measured, the samples too; scheduler.cost_model.load_cost_model reads it."""
    rows = [asdict(s.key) | {"context_tokens": s.context_tokens, "ms": s.ms} for s in samples]
    whole = {**about, "results": [asdict(r) for r in results], "samples": rows}
    Path(path).write_text(json.dumps(whole, indent=1) + "\n")


def plot(results: Sequence[Result], path: str | Path) -> None:
    """One bar chart a measure, policies side by side, and the step time by bucket size: a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7))
    measures = {
        "padding waste of tokens, %": [r.token_waste * 100 for r in results],
        "padding waste of rows, %": [r.row_waste * 100 for r in results],
        "programs": [r.num_programs for r in results],
        "compile time, s": [r.compile_s or 0.0 for r in results],
        "largest workspace, MB": [(r.workspace_bytes or 0) / 1e6 for r in results],
        "p99 inter-token latency, ms": [r.p99_inter_token_ms for r in results],
        "output tokens / s": [r.tokens_per_s for r in results],
    }
    names = [r.policy + ("*" if r.is_estimated else "") for r in results]
    for axis, (title, values) in zip(axes.flat, measures.items(), strict=False):
        axis.bar(names, values, color=[f"C{i}" for i in range(len(names))])
        axis.set_title(title)
        axis.tick_params(axis="x", labelrotation=30)
    last = axes.flat[-1]
    for result in results:
        sizes = sorted((size, ms) for name, ms in result.step_ms.items() for size, _ in _sizes(name, "mixed"))
        if sizes:
            last.plot(*zip(*sizes, strict=True), marker="o", label=result.policy)
    last.set(title="time of mixed steps by bucket, ms", xlabel="T", xscale="log", yscale="log")
    last.legend()
    if any(r.is_estimated for r in results):
        figure.text(0.99, 0.005, "* estimated from measured step times", ha="right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=110)
