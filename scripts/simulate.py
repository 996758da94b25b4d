"""Simulate a request trace on a device that is not there: throughput, latencies, pre-emptions, padding by policy.

    python scripts/simulate.py --trace azure_conv.csv --policy powers_of_two linear one_shape --plot out.png
    python scripts/simulate.py --synthetic requests=2000 rate=8 prompt=1000 output=200 --cost measured.json

The trace is an Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or a Mooncake JSONL file. --cost is a JSON file of
measured steps, {"samples": [{"kind", "T", "R", "context_tokens", "ms"}, ...]}, or of scripts/compare_buckets.py --json;
without it a roofline guess stands in (8B bfloat16 weights on one H200).
"""

import argparse
import json
import logging
from pathlib import Path

import numpy as np

from scheduler.buckets import BucketPolicy, linear, load_policy, one_shape, powers_of_two
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.cost_model import CostModel, load_cost_model, roofline
from scheduler.simulate import Simulation, SimulationReport
from scheduler.trace import TraceRequest, load_trace, synthetic_trace

POLICIES = {"powers_of_two": powers_of_two, "linear": linear, "one_shape": one_shape}
H200_BYTES_PER_S, H200_FLOPS_PER_S = 4.0e12, 6.0e14  # what large kernels reach, not the data sheet
LLAMA_8B_WEIGHT_BYTES, LLAMA_8B_KV_BYTES = 16.1e9, 131_072
SYNTHETIC = {"requests": 1000.0, "rate": 5.0, "prompt": 1000.0, "output": 200.0, "seed": 0.0}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path)
    source.add_argument("--synthetic", nargs="*", metavar="KEY=VALUE", help=f"any of {', '.join(SYNTHETIC)}")
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--speedup", type=float, default=1.0, help="requests arrive so many times faster")
    parser.add_argument("--policy", nargs="+", default=["powers_of_two"], help=f"{', '.join(POLICIES)}, or a JSON file")
    parser.add_argument("--cost", type=Path, help="JSON of measured steps")
    parser.add_argument("--host-ms", type=float, default=0.5, help="time of the host a step")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=131_072)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=57_000, help="of the KV pool")
    parser.add_argument(
        "--priority", action="store_true", help="the priority policy instead of first come first served"
    )
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--sync", action="store_true", help="without async scheduling")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    return parser.parse_args()


def read_requests(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace:
        trace = load_trace(args.trace, args.limit)
    else:
        given = dict(item.split("=", 1) for item in args.synthetic)
        if unknown := given.keys() - SYNTHETIC.keys():
            raise SystemExit(f"--synthetic knows {', '.join(SYNTHETIC)}; not {', '.join(sorted(unknown))}.")
        values = SYNTHETIC | {key: float(value) for key, value in given.items()}
        trace = synthetic_trace(
            int(values["requests"]), values["rate"], int(values["prompt"]), int(values["output"]), int(values["seed"])
        )[: args.limit]
    return [
        TraceRequest(r.arrival_s / args.speedup, r.num_prompt_tokens, r.num_output_tokens, r.hash_ids) for r in trace
    ]


def make_policy(name: str, args: argparse.Namespace) -> BucketPolicy:
    if name in POLICIES:
        return POLICIES[name](args.max_num_seqs, args.max_num_batched_tokens)
    return load_policy(name)


def make_cost_model(path: Path | None, policy: BucketPolicy) -> CostModel:
    if path:
        return load_cost_model(path)
    return roofline(
        policy.keys(),
        weight_bytes=LLAMA_8B_WEIGHT_BYTES,
        kv_bytes_per_token=LLAMA_8B_KV_BYTES,
        bytes_per_s=H200_BYTES_PER_S,
        flops_per_s=H200_FLOPS_PER_S,
        overhead_ms=1.0,
    )


def simulate(trace: list[TraceRequest], name: str, args: argparse.Namespace) -> SimulationReport:
    policy = make_policy(name, args)
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        policy="priority" if args.priority else "fcfs",
        async_scheduling=not args.sync,
    )
    cache_config = CacheConfig(args.block_size, args.num_blocks, not args.no_prefix_caching)
    cost_model = make_cost_model(args.cost, policy)
    return Simulation(trace, policy, cost_model, config, cache_config, host_ms=args.host_ms).run()


def print_table(tables: dict[str, dict[str, str]]) -> None:
    width = max(18, *(len(name) + 2 for name in tables))
    print(f"{'':28}" + "".join(f"{name:>{width}}" for name in tables))
    for row in next(iter(tables.values())):
        print(f"{row:28}" + "".join(f"{table[row]:>{width}}" for table in tables.values()))


def plot(reports: dict[str, SimulationReport], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8))
    keys = sorted(set().union(*(report.bucket_steps for report in reports.values())))
    for name, report in reports.items():
        plot_distribution(axes[0, 0], report.ttft_s, name)
        plot_distribution(axes[0, 1], report.inter_token_s, name)
        (line,) = axes[1, 0].plot(report.timeline.time_s, report.timeline.num_running, label=name, linewidth=0.8)
        axes[1, 0].plot(report.timeline.time_s, report.timeline.num_waiting, ":", color=line.get_color(), linewidth=0.8)
        axes[1, 1].plot([report.bucket_steps.get(key, np.nan) for key in keys], "o", label=name, alpha=0.7)
    axes[0, 0].set(title="time to first token", xlabel="ms", ylabel="share of requests", xscale="log")
    axes[0, 1].set(title="inter-token latency", xlabel="ms", ylabel="share of tokens", xscale="log")
    axes[1, 0].set(title="running (dotted: waiting) requests", xlabel="s")
    axes[1, 1].set(title="steps by bucket", yscale="log")
    axes[1, 1].set_xticks(range(len(keys)), [str(key) for key in keys], rotation=90, fontsize=5)
    for axis in axes.flat:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_distribution(axis, seconds: np.ndarray, name: str) -> None:
    shares = np.linspace(0, 100, 400)
    if len(seconds):
        axis.plot(np.maximum(np.percentile(seconds, shares) * 1000, 1e-3), shares / 100, label=name)


def main() -> None:
    args = parse_args()
    logging.disable(logging.WARNING)  # requests that fill the pool are counted in the table
    trace = read_requests(args)
    reports = {name: simulate(trace, name, args) for name in args.policy}
    tables = {Path(name).stem: report.rows() for name, report in reports.items()}
    print_table(tables)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1) + "\n")
    if args.plot:
        plot(reports, args.plot)


if __name__ == "__main__":
    main()
