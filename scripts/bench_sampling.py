"""What sampling costs a step, through the engine, and how often greedy ids differ between buckets.

    python scripts/bench_sampling.py --out scripts/results/h200/sampling.json             # one GPU
    python scripts/bench_sampling.py --model tiny --device cpu --requests 8 --context 32   # anywhere, in a minute
    python scripts/bench_sampling.py --trace --kinds greedy "logprobs 5"                   # and by kernel

All requests run at once; a step's time is the median time between two steps of the core, by the core's own clock,
while all requests decode; wall_ms is what a step takes until the caller has its outputs, host_ms the work of the core's
loop a step and dispatch_ms that of the thread beside it. Greedy is timed first and last, so that drift shows. Checked
beforehand: every token of a greedy request is the most likely one by its logprobs, and a fixed seed gives the same ids
in another order of requests. With --trace an engine in this process, one step at a time, then says which kernels each
kind adds to a greedy step.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import records
import workloads
from kernel_trace import Kernel, added_kernels, trace_kernels

from jaxvllm import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jaxvllm.metrics import Counter, Histogram

TINY = workloads.MODELS["qwen3-0.6b"] | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 20011, "torch_dtype": "float32",
}  # fmt: skip
KINDS: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "temperature, top-p 0.9, top-k 50": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "penalties": {
        "temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2,
    },
    "temperature": {"temperature": 0.8},
    "temperature, top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "logit bias": {"temperature": 0.0, "logit_bias": {7: 1.0}},
    "greedy again": {"temperature": 0.0},
}  # fmt: skip
GOAL = 1.05
MEASURED_BY_GOAL = ("temperature, top-p 0.9, top-k 50", "logprobs 5", "penalties")
BUCKET_SIZES = (1, 8, 32, 128, 256)
TRACED_STEPS = 4


def start(args: argparse.Namespace, **options: Any) -> LLMEngine:
    """The engine on dummy weights; prefix caching off, so that every run computes its prompts."""
    if args.model != "tiny":
        return start_model(args, workloads.write_config(args.model), **options)
    with tempfile.TemporaryDirectory() as folder:  # nothing is read of it once the engine has started
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        return start_model(args, Path(folder), **options)


def start_model(args: argparse.Namespace, folder: Path, **options: Any) -> LLMEngine:
    """The engine for the model of a folder."""
    sizes = {"max_num_seqs": args.requests, "max_model_len": args.context + args.steps + 64}
    if args.device == "gpu":
        # The limits of bench_throughput.py, whose programs serve here too if they were kept.
        sizes = {"dtype": "bfloat16", "max_model_len": 16384, "gpu_memory_utilization": 0.85}
    return LLMEngine.from_engine_args(
        EngineArgs(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            device=args.device,
            enable_prefix_caching=False,
            **sizes,
            **options,
        )
    )


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """One a request, as long as the context."""
    rng = np.random.default_rng(0)
    return [rng.integers(10, 20000, args.context).tolist() for _ in range(args.requests)]


@dataclass
class Run:
    """Tokens and logprobs of each request, and when the steps that gave every request a token came, in seconds."""

    tokens: list[list[int]]
    logprobs: list[list]
    core_times: list[float]
    wall_times: list[float]


def run(engine: LLMEngine, requests: Sequence[tuple[list[int], SamplingParams]]) -> Run:
    """Run requests together to their ends."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    found = Run([[] for _ in requests], [[] for _ in requests], [], [])
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if len(outputs) == len(requests):
            metrics = outputs[0].metrics
            assert metrics is not None
            found.core_times.append(metrics.last_token_ts)
            found.wall_times.append(time.perf_counter())
        for output in outputs:
            found.tokens[int(output.request_id)] += output.outputs[0].token_ids
            found.logprobs[int(output.request_id)] += output.outputs[0].logprobs or []
    return found


def make_params(steps: int, seed: int, fields: dict) -> SamplingParams:
    """A request that ends after `steps` tokens and nothing else."""
    return SamplingParams(
        max_tokens=steps, ignore_eos=True, detokenize=False, seed=seed, output_kind=RequestOutputKind.DELTA, **fields
    )


def time_kind(engine: LLMEngine, args: argparse.Namespace, fields: dict) -> dict[str, float]:
    """Times of a step in ms; but for the host's, the first quarter of the steps is left out."""
    texts = prompts(args)
    params = [make_params(args.steps, i, fields) for i in range(len(texts))]
    before = host_seconds(engine)
    found = run(engine, list(zip(texts, params, strict=True)))
    if any(len(token_ids) != args.steps for token_ids in found.tokens):
        raise AssertionError(f"{fields}: not every request gave {args.steps} tokens.")
    host_s, dispatch_s, num_steps = (b - a for a, b in zip(before, host_seconds(engine), strict=True))
    steady = found.core_times[len(found.core_times) // 4 :]
    wall = found.wall_times[len(found.wall_times) // 4 :]
    return {
        "step_ms": 1000 * float(np.median(np.diff(steady))),
        "wall_ms": 1000 * (wall[-1] - wall[0]) / (len(wall) - 1),
        "host_ms": 1000 * host_s / num_steps,
        "dispatch_ms": 1000 * dispatch_s / num_steps,
    }


def host_seconds(engine: LLMEngine) -> tuple[float, float, int]:
    """Work of the core's loop and of the dispatching thread so far, and in how many steps."""
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    loop, dispatch = metrics["jaxvllm:step_host_time_seconds"], metrics["jaxvllm:dispatch_seconds"]
    assert isinstance(loop, Histogram) and isinstance(dispatch, Counter)
    return loop.sum, dispatch.value, loop.count


def trace_kind(engine: LLMEngine, args: argparse.Namespace, fields: dict) -> dict[str, Kernel]:
    """Kernels of a decode step of all requests."""
    for index, prompt in enumerate(prompts(args)):
        engine.add_request(str(index), prompt, make_params(args.steps, index, fields))
    while len(engine.step()) < args.requests:
        pass
    for _ in range(TRACED_STEPS):
        engine.step()
    kernels = trace_kernels(engine.step, TRACED_STEPS)
    while engine.has_unfinished_requests():
        engine.step()
    return kernels


def trace(args: argparse.Namespace) -> dict[str, list[dict]]:
    """Kernels that each kind adds to a greedy step, printed and returned; the engine runs in this process."""
    engine = start(args, multiprocess=False, async_scheduling=False)
    base = trace_kind(engine, args, KINDS["greedy"])
    print(f"kernels of a greedy step: {sum(kernel.us for kernel in base.values()):.0f} us", flush=True)
    tables: dict[str, list[dict]] = {}
    for name in args.kinds or KINDS:
        added = added_kernels(trace_kind(engine, args, KINDS[name]), base)
        tables[name] = [{"name": kernel_name, **vars(kernel)} for kernel_name, kernel in added]
        print(f"{name} adds {sum(kernel.us for _, kernel in added):.0f} us:", flush=True)
        for kernel_name, kernel in added:
            print(f"  {kernel.us:9.1f} us {kernel.calls:6.2f} x {kernel_name[:60]:60} {kernel.details}", flush=True)
    engine.shutdown()
    return tables


def check(engine: LLMEngine, args: argparse.Namespace) -> dict[str, bool]:
    """What must hold on this device, on a short run."""
    texts, steps = prompts(args), 8
    greedy = run(engine, [(t, make_params(steps, 0, {"temperature": 0.0, "logprobs": 2})) for t in texts])
    most_likely = all(
        0 > position[token].logprob == max(entry.logprob for entry in position.values())
        for token_ids, positions in zip(greedy.tokens, greedy.logprobs, strict=True)
        for token, position in zip(token_ids, positions, strict=True)
    )
    drawn = [(t, make_params(steps, i, KINDS["temperature, top-p 0.9, top-k 50"])) for i, t in enumerate(texts)]
    forward, backward = run(engine, drawn).tokens, run(engine, drawn[::-1]).tokens[::-1]
    same = np.mean([a[0] == b[0] for a, b in zip(forward, backward, strict=True)])
    return {
        "greedy tokens are the most likely ones": most_likely,
        "seeded draws repeat in another order": bool(same > 0.9),
    }


def compare_buckets(engine: LLMEngine, args: argparse.Namespace) -> list[dict]:
    """How often greedy ids of the same requests differ between steps of few and of many rows."""
    texts, steps = prompts(args)[:8], 32
    params = make_params(steps, 0, {"temperature": 0.0})
    rows, reference = [], None
    for size in (size for size in BUCKET_SIZES if size <= args.requests):
        batches = [texts[i : i + size] for i in range(0, 8, size)]
        fillers = [[11 + i] * 16 for i in range(max(0, size - 8))]
        found: list[list[int]] = []
        for batch in batches:
            found += run(engine, [(t, params) for t in [*batch, *fillers]]).tokens[: len(batch)]
        reference = reference or found
        firsts = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None)
                  for pair in zip(found, reference, strict=True)]  # fmt: skip
        rows.append({
            "requests_at_once": size,
            "requests_that_differ_from_one_at_a_time": sum(first is not None for first in firsts),
            "of_requests": len(found),
            "first_different_token": [first for first in firsts if first is not None],
            "tokens_each": steps,
        })  # fmt: skip
    return rows


def compare_kinds(rows: dict[str, dict[str, Any]]) -> None:
    """Add to each kind what it costs in the place of greedy, whose runs count by their mean; prints a line each."""
    base_ms = [row["step_ms"] for name, row in rows.items() if name.startswith("greedy")]
    for name, row in rows.items():
        ratio = row["step_ms"] / float(np.mean(base_ms)) if base_ms else float("nan")
        row["ratio_to_greedy"] = ratio
        if name in MEASURED_BY_GOAL:
            row |= {"goal": GOAL, "is_met": ratio <= GOAL}
        print(
            f"{name:34} {row['step_ms']:8.3f} ms  x{ratio:.3f}  wall {row['wall_ms']:.3f}  loop {row['host_ms']:.3f}  "
            f"dispatch {row['dispatch_ms']:.3f}",
            flush=True,
        )


def measure(args: argparse.Namespace) -> dict:
    """Start, check, time every kind, compare buckets; prints a line each."""
    begin = time.perf_counter()
    engine = start(args)
    startup_s = time.perf_counter() - begin
    print(f"engine ready after {startup_s:.1f} s", flush=True)
    checks = check(engine, args)
    print("checks:", checks, flush=True)
    rows: dict[str, dict[str, Any]] = {name: time_kind(engine, args, KINDS[name]) for name in args.kinds or KINDS}
    compare_kinds(rows)
    buckets = compare_buckets(engine, args)
    print("buckets:", json.dumps(buckets), flush=True)
    engine.shutdown()
    return {
        "options": {"model": args.model, "requests": args.requests, "context": args.context, "steps": args.steps},
        "startup_s": startup_s,
        "checks": checks,
        "kinds": rows,
        "greedy_ids_between_buckets": buckets,
    }


def main() -> None:
    """Parse the command line, measure, write the JSON; exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", *workloads.MODELS], default="qwen3-0.6b")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="gpu")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each request")
    parser.add_argument("--steps", type=int, default=96, help="tokens each request gives")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="default: all")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--trace", action="store_true", help="also say which kernels each kind adds")
    args = parser.parse_args()
    result = measure(args)
    if args.trace:
        result["added_kernels"] = trace(args)
    if args.out:
        records.write(args.out, result)
    if not all(result["checks"].values()):
        raise SystemExit("a check failed")


if __name__ == "__main__":
    main()
