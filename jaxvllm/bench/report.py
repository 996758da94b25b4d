"""What a benchmark of a server found: numbers, vLLM's table, and the JSON file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxvllm.bench.client import RequestResult

# key -> title, name, heading of the table
METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
WIDTH = 50


@dataclass(frozen=True)
class ServeReport:
    """The figures of one run.

    Attributes:
      samples_ms: for each key of METRICS, all measured values in milliseconds.
      max_output_tokens_per_s: most pieces of answers that came within one second (by the clock from the start).
      max_concurrent_requests: most requests under way at once.
      request_goodput: requests a second that met all service levels; None: none were given.
    """

    completed: int
    failed: int
    duration_s: float
    total_input: int
    total_output: int
    samples_ms: dict[str, np.ndarray]
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    request_goodput: float | None

    @property
    def request_throughput(self) -> float:
        """Completed requests a second."""
        return self.completed / self.duration_s

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return self.total_output / self.duration_s

    @property
    def total_throughput(self) -> float:
        """Prompt and output tokens a second."""
        return (self.total_input + self.total_output) / self.duration_s


def make_report(
    results: Sequence[RequestResult], duration_s: float, goodput_ms: dict[str, float] | None = None
) -> ServeReport:
    """Count what requests came to; failed ones are counted and nothing else.

    Args:
      duration_s: from the start to the end of the last request.
      goodput_ms: service levels: key of METRICS but itl -> most milliseconds.
    """
    done = [result for result in results if result.error is None]
    samples = {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done if r.num_output_tokens > 1],
        "itl": [itl for r in done for itl in r.itls_s],
        "e2el": [r.latency_s for r in done],
    }
    good = None
    if goodput_ms:
        good = sum(_is_good(result, goodput_ms) for result in done) / duration_s
    return ServeReport(
        completed=len(done),
        failed=len(results) - len(done),
        duration_s=duration_s,
        total_input=sum(r.num_prompt_tokens for r in done),
        total_output=sum(r.num_output_tokens for r in done),
        samples_ms={name: 1000 * np.asarray(values, np.float64) for name, values in samples.items()},
        max_output_tokens_per_s=_most_in_a_second(done),
        max_concurrent_requests=_most_at_once(done),
        request_goodput=good,
    )


def _is_good(result: RequestResult, limits_ms: dict[str, float]) -> bool:
    values = {"ttft": result.ttft_s, "tpot": result.tpot_s, "e2el": result.latency_s}
    return all(1000 * values[name] <= limit for name, limit in limits_ms.items())


def piece_times(result: RequestResult) -> np.ndarray:
    """When each piece of an answer came, in seconds from the start."""
    return result.start_s + result.ttft_s + np.cumsum([0.0, *result.itls_s])


def _most_in_a_second(results: Sequence[RequestResult]) -> float:
    if not results:
        return 0.0
    seconds = np.concatenate([piece_times(result) for result in results]).astype(int)
    return float(np.bincount(seconds).max())


def _most_at_once(results: Sequence[RequestResult]) -> int:
    changes = sorted(change for r in results for change in ((r.start_s, 1), (r.start_s + r.latency_s, -1)))
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """{"ttft": 500.0} from ["ttft:500"].

    Raises: ValueError for anything else.
    """
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or limits[name] < 0:
            raise ValueError(f"--goodput {pair}: give ttft:MS, tpot:MS or e2el:MS, with milliseconds of at least 0.")
    return limits


def table(
    report: ServeReport,
    *,
    rate: float,
    max_concurrency: int | None,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> str:
    """The report in vLLM's layout."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line("Successful requests:", report.completed), _line("Failed requests:", report.failed)]
    if max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", max_concurrency))
    if rate != float("inf"):
        lines.append(_line("Request rate configured (RPS):", rate))
    lines += [
        _line("Benchmark duration (s):", report.duration_s),
        _line("Total input tokens:", report.total_input),
        _line("Total generated tokens:", report.total_output),
        _line("Request throughput (req/s):", report.request_throughput),
    ]
    if report.request_goodput is not None:
        lines.append(_line("Request goodput (req/s):", report.request_goodput))
    lines += [
        _line("Output token throughput (tok/s):", report.output_throughput),
        _line("Peak output token throughput (tok/s):", report.max_output_tokens_per_s),
        _line("Peak concurrent requests:", float(report.max_concurrent_requests)),
        _line("Total token throughput (tok/s):", report.total_throughput),
    ]
    for name in metrics:
        title, short = METRICS[name]
        lines.append(f"{title:-^{WIDTH}}")
        lines += [_line(f"{word} {short} (ms):", value) for word, value in _figures(report, name, percentiles).items()]
    return "\n".join([*lines, "=" * WIDTH])


def _figures(report: ServeReport, name: str, percentiles: Sequence[float]) -> dict[str, float]:
    values = report.samples_ms[name]
    if not len(values):
        values = np.zeros(1)
    figures = {"Mean": float(values.mean()), "Median": float(np.median(values))}
    return figures | {f"P{_number(p)}": float(np.percentile(values, p)) for p in percentiles}


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _line(words: str, value: float) -> str:
    return f"{words:<40} {value:<10}" if isinstance(value, int) else f"{words:<40} {value:<10.2f}"


def to_json(
    report: ServeReport,
    results: Sequence[RequestResult],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    *,
    is_detailed: bool,
) -> dict[str, Any]:
    """The report under vLLM's keys; is_detailed: with every request's figures and text."""
    data: dict[str, Any] = {
        "duration": report.duration_s,
        "completed": report.completed,
        "failed": report.failed,
        "total_input_tokens": report.total_input,
        "total_output_tokens": report.total_output,
        "request_throughput": report.request_throughput,
        "request_goodput": report.request_goodput,
        "output_throughput": report.output_throughput,
        "total_token_throughput": report.total_throughput,
        "max_output_tokens_per_s": report.max_output_tokens_per_s,
        "max_concurrent_requests": report.max_concurrent_requests,
    }
    for name in metrics:
        figures = _figures(report, name, percentiles)
        data |= {f"{word.lower()}_{name}_ms": value for word, value in figures.items()}
        data[f"std_{name}_ms"] = float(np.std(report.samples_ms[name])) if len(report.samples_ms[name]) else 0.0
    if is_detailed:
        data |= {
            "input_lens": [r.num_prompt_tokens for r in results],
            "output_lens": [r.num_output_tokens for r in results],
            "start_times": [r.start_s for r in results],
            "ttfts": [r.ttft_s for r in results],
            "itls": [r.itls_s for r in results],
            "generated_texts": [r.text for r in results],
            "errors": [r.error or "" for r in results],
        }
    return data
