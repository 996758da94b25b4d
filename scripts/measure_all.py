"""Measure most of what is on record anew on one GPU, the most wanted first.

    python scripts/measure_all.py --out scripts/results/h200
    python scripts/measure_all.py --out new --parts "throughput qwen3-0.6b" kernels --budget-s 560

Each part is one of the other scripts, or the tests that need a GPU, in a process of its own with a limit. What it
prints goes to OUT/logs, its end to the terminal. A part that the budget has no time for is left out.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
NUM_LINES = 25  # of a part's output that the terminal shows


@dataclass(frozen=True)
class Part:
    """A process of a run.

    Attributes:
      expected_s: what it takes on an H200, cold start included; it is given up after half as much again.
      command: arguments of Python, in which {out} stands for the folder.
    """

    expected_s: int
    command: str


def throughput(model: str) -> str:
    return f"{HERE}/bench_throughput.py --model {model} --out {{out}}/throughput_{model}.json"


def profile(model: str) -> str:
    batches = "--requests 1 64 256 --context 384 2048 800 --kind decode mixed"
    return f"{HERE}/profile_step.py --model {model} {batches} --out {{out}}/profile_{model}.json"


BUCKETS = (
    "--model qwen3-0.6b --dtype bfloat16 --max-model-len 16384 --num-requests 300 --input-len 1155 --output-len 100 "
    "--arrivals-per-step 0.64 --time-limit 210 --policies geometric tuned powers_of_two explicit linear one_shape "
    "--decode-sizes 8 64 256 1024 --mixed-sizes 512 2048 16384 "
    "--json {out}/buckets_qwen3-0.6b.json --plot {out}/buckets_qwen3-0.6b.png"
)
PARTS = {
    "throughput qwen3-0.6b": Part(150, throughput("qwen3-0.6b")),
    "throughput llama-3.1-8b": Part(290, throughput("llama-3.1-8b")),
    "start": Part(60, "-m pytest -q -m gpu tests/engine/test_gpu_start.py"),
    "profile qwen3-0.6b": Part(90, profile("qwen3-0.6b")),
    "profile llama-3.1-8b": Part(100, profile("llama-3.1-8b")),
    "kernels": Part(170, f"{HERE}/bench_kernels.py --out {{out}}/kernels.json"),
    "row products": Part(80, f"{HERE}/bench_rows.py --decode 16 32 64 96 128 256 --out {{out}}/row_products.json"),
    "buckets": Part(220, f"{HERE}/compare_buckets.py {BUCKETS}"),
    "structured output": Part(70, f"{HERE}/bench_structured_output.py --out {{out}}/structured_output.json"),
    "sampling": Part(60, f"{HERE}/bench_sampling.py --out {{out}}/sampling.json"),
    "products": Part(120, f"{HERE}/bench_matmul.py --out {{out}}/matmul.json"),
    "norms and gates": Part(80, f"{HERE}/bench_rows.py --out {{out}}/rows.json"),
    "dispatch": Part(120, f"{HERE}/bench_dispatch.py --out {{out}}/dispatch.json"),
    "kernel tests": Part(400, "-m pytest -q -m gpu tests/pallas_kernels tests/engine/test_sampling_kernels.py"),
}


def run(name: str, out: Path, limit_s: float) -> int:
    """Run a part and show the end of what it printed; its exit code, 124 if it was given up."""
    log = out / "logs" / f"{name.replace(' ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *shlex.split(PARTS[name].command.format(out=shlex.quote(str(out))))]
    paths = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cuda"}
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=HERE.parent, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            code = 124
    print(f"=== {name}: exit {code} after {time.monotonic() - start:.0f} s", flush=True)
    lines = [line[:400] for line in log.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
    print("\n".join(lines[-NUM_LINES:]), flush=True)
    return code


def main() -> int:
    """Run the parts; exit code 1 if one fails, is given up or left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in this order")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds for all of them")
    args = parser.parse_args()
    end = time.monotonic() + args.budget_s
    failed = False
    for name in args.parts:
        left_s = end - time.monotonic()
        if PARTS[name].expected_s > left_s:
            print(f"=== {name}: left out, {left_s:.0f} s left", flush=True)
            failed = True
            continue
        failed |= run(name, args.out.resolve(), min(1.5 * PARTS[name].expected_s, left_s)) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
