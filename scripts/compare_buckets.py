"""Compare JIT bucket strategies: padding waste, programs, compile time, memory, step time, throughput, latency.

    uv run --group test python scripts/compare_buckets.py --plot buckets.png --json buckets.json
    python scripts/compare_buckets.py --model qwen3-0.6b --num-requests 600 --input-len 1155 --output-len 211

`jaxvllm buckets compare` with the models of the benchmarks by name, their weights drawn at random; without --model a
tiny Llama. Requests arrive by step number, so every policy schedules the same steps and only the shapes differ; with
--trace they arrive at the trace's times.
"""

import argparse
import json
import sys
from pathlib import Path

import records
import workloads

from jaxvllm.buckets.cli import add_parser


def arguments(argv: list[str]) -> list[str]:
    """The command line of `jaxvllm`: a benchmark model's name becomes a folder with its config."""
    result = ["buckets", "compare"]
    for before, word in zip(["", *argv], argv, strict=False):
        is_name = before == "--model" and word in workloads.MODELS
        result += [str(workloads.write_config(word)), "--load-format", "dummy"] if is_name else [word]
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(arguments(sys.argv[1:]))
    code = args.run(args)
    if getattr(args, "json", None):
        data = json.loads(args.json.read_text())
        data["args"]["model"] = Path(data["args"]["model"]).name  # not where its config was written
        records.write(args.json, data)
    sys.exit(code)
