"""Time the benchmark workloads through Engine.generate on one GPU, beside vLLM's figures and the hardware floor.

    python scripts/bench_throughput.py --model qwen3-0.6b --out scripts/results/h200/throughput_qwen3-0.6b.json

The set-up is the anchors': dummy weights, bf16, prompts as token ids, ignore_eos, no detokenising, prefix caching off,
max_model_len 16384. Before anything is timed, one mixed batch is run through the model with the chosen attention
backend and with the XLA reference, and the logits are compared.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import records
import workloads

from jaxvllm import Engine, SamplingParams
from jaxvllm.metrics import Counter, Gauge

HERE = Path(__file__).parent
# Seconds each workload needs if nothing but bytes over 4.51 TB/s and FLOPs over 806 TFLOP/s counts.
FLOOR_S = {
    ("qwen3-0.6b", "latency1"): 0.069,
    ("qwen3-0.6b", "mixed256"): 3.64,
    ("qwen3-0.6b", "decode64"): 1.15,
    ("qwen3-0.6b", "prefill"): 0.592,
    ("qwen3-0.6b", "throughput1k"): 4.82,
    ("llama-3.1-8b", "latency1"): 0.853,
    ("llama-3.1-8b", "mixed256"): 9.50,
    ("llama-3.1-8b", "decode64"): 4.24,
    ("llama-3.1-8b", "prefill"): 5.24,
    ("llama-3.1-8b", "throughput1k"): 22.5,
}


@dataclass
class Row:
    """One timed workload; times in seconds, ratios are speed against the other (above 1: faster than it)."""

    model: str
    kind: str
    s: float
    all_s: list[float]
    out_tok_s: float
    total_tok_s: float
    vllm_s: float
    vllm_ratio: float
    floor_s: float
    floor_ratio: float


def vllm_seconds(model: str, kind: str) -> float:
    """vLLM 0.22.1's time for the workload on one H200."""
    anchors = json.loads((HERE / "anchors_h200.json").read_text())
    return next(r["s"] for r in anchors["results"] if (r["model"], r["kind"]) == (model, kind))


def time_workload(engine: Engine, model: str, kind: str, repeats: int, temperature: float) -> Row:
    """Run one workload `repeats` times after one untimed run; every request must return all its tokens."""
    prompts, lengths = workloads.workload(kind)
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False) for n in lengths]
    inputs = [{"prompt_token_ids": p} for p in prompts]
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        outputs = engine.generate(inputs, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
        got = [len(o.outputs[0].token_ids) for o in outputs]
        if got != lengths:
            raise AssertionError(f"{model} {kind}: {sum(got)} tokens came back, {sum(lengths)} were asked for.")
    seconds = min(times[1:])
    num_in, num_out = sum(map(len, prompts)), sum(lengths)
    vllm, floor = vllm_seconds(model, kind), FLOOR_S[model, kind]
    return Row(
        model=model,
        kind=kind,
        s=seconds,
        all_s=times[1:],
        out_tok_s=num_out / seconds,
        total_tok_s=(num_in + num_out) / seconds,
        vllm_s=vllm,
        vllm_ratio=vllm / seconds,
        floor_s=floor,
        floor_ratio=floor / seconds,
    )


def check_backend(model: str) -> dict:
    """scripts/check_backend.py in a process of its own, since the engine's core will want the whole GPU."""
    command = [sys.executable, str(HERE / "check_backend.py"), "--model", model]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(args: argparse.Namespace) -> None:
    """Check, start the engine, time every workload; prints a line each and keeps it, whatever becomes of the next."""
    check = check_backend(args.model)
    print("check:", json.dumps(check), flush=True)
    start = time.perf_counter()
    engine = Engine(
        str(workloads.write_config(args.model)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=16384,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=False,
    )
    startup = time.perf_counter() - start
    print(f"engine ready after {startup:.1f} s", flush=True)
    record = {
        "options": {"temperature": args.temperature, "gpu_memory_utilization": args.gpu_memory_utilization},
        "startup_s": startup,
        "check": check,
    }
    for kind in args.workload:
        row = time_workload(engine, args.model, kind, args.repeats, args.temperature)
        print(
            f"{row.model:14} {row.kind:13} {row.s:8.3f} s  vLLM {row.vllm_s:7.3f} s  x{row.vllm_ratio:.2f}  "
            f"floor {row.floor_ratio:.0%}  {row.out_tok_s:8.0f} out tok/s",
            flush=True,
        )
        if args.out:
            keep_row(args.out, record, asdict(row))
    metrics = {metric.name: metric.value for metric in engine.get_metrics() if isinstance(metric, Counter | Gauge)}
    print("metrics:", json.dumps(metrics), flush=True)
    engine.shutdown()


def keep_row(path: Path, record: dict, row: dict) -> None:
    """Write a row beside those of other workloads, which may be of other commits; the rest is of this run."""
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    row = {"commit": records.provenance()["commit"], **row}
    rows = {kept_row["kind"]: kept_row for kept_row in kept} | {row["kind"]: row}
    records.write(path, record | {"results": [rows[kind] for kind in workloads.KINDS if kind in rows]})


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.MODELS, default="qwen3-0.6b")
    parser.add_argument("--workload", choices=workloads.KINDS, nargs="+", default=list(workloads.KINDS))
    parser.add_argument("--repeats", type=int, default=2, help="timed runs after one untimed run; the best counts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--out", type=Path, help="JSON file to write; rows of other workloads in it stay")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
