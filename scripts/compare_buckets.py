"""Compare JIT bucket strategies: padding waste, programs, compile time, memory, step time, throughput.

    uv run --group test python scripts/compare_buckets.py --plot buckets.png --json buckets.json

Runs the same workload with a tiny random Llama through scheduler, planner and model runner once a policy, on whatever
device JAX finds. Requests arrive by step number, so every policy schedules the same steps and only the shapes differ.
A policy is powers_of_two, linear, explicit (--decode-sizes, --mixed-sizes), one_shape, or a JSON file (a tuned one).
"""

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_runner import ModelRunner, RunnerConfig
from jaxvllm.models.registry import get_model_class
from jaxvllm.weights.dummy import dummy_params
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketPolicy, StepShape, explicit, linear, load_policy, one_shape, powers_of_two
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.plan import Planner
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import make_scheduler

BLOCK_SIZE = 16


@dataclass
class Workload:
    """Requests and the step at which each arrives."""

    prompts: list[list[int]]
    num_outputs: list[int]
    arrival_steps: list[int]


@dataclass
class Result:
    """What one policy did with the workload. Times in seconds unless the name says otherwise."""

    policy: str
    num_programs: int
    compile_s: float
    program_bytes: int  # largest workspace of a program beside weights and pool
    num_steps: int
    token_waste: float
    row_waste: float
    total_s: float
    tokens_per_s: float
    mean_step_ms: float
    p99_inter_token_ms: float
    step_ms: dict[str, float] = field(default_factory=dict)  # mean by bucket
    steps: dict[str, int] = field(default_factory=dict)  # count by bucket


def make_workload(args: argparse.Namespace, vocab_size: int, max_model_len: int) -> Workload:
    """Log-normal lengths, exponential gaps between arrivals."""
    rng = np.random.default_rng(args.seed)

    def lengths(mean: int) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - 0.5, 1.0, args.num_requests)
        return np.clip(drawn.astype(int), 1, max_model_len // 2 - 1)

    prompt_lens, num_outputs = lengths(args.input_len), lengths(args.output_len)
    arrivals = np.cumsum(rng.exponential(1 / args.arrivals_per_step, args.num_requests)).astype(int)
    prompts = [rng.integers(1, vocab_size, n).tolist() for n in prompt_lens]
    return Workload(prompts, num_outputs.tolist(), (arrivals - arrivals[0]).tolist())


def model_config(args: argparse.Namespace) -> ModelConfig:
    """A Llama small enough for a CPU."""
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 1024,
            "hidden_size": args.hidden_size,
            "intermediate_size": 3 * args.hidden_size,
            "num_hidden_layers": args.num_layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": args.hidden_size // 8,
            "max_position_embeddings": args.max_model_len,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
        }
    )


def make_policy(name: str, args: argparse.Namespace) -> BucketPolicy:
    """The policy of a name or a file, for the limits given."""
    limits = (args.max_num_seqs, args.max_num_batched_tokens)
    if name == "explicit":
        return explicit(*limits, args.decode_sizes or [1, args.max_num_seqs], args.mixed_sizes or [64, limits[1]])
    by_name = {"powers_of_two": powers_of_two, "linear": linear, "one_shape": one_shape}
    if name in by_name:
        return by_name[name](*limits)
    if Path(name).is_file():
        return load_policy(name)
    raise ValueError(f"policy {name!r} must be one of {[*by_name, 'explicit']} or a JSON file.")


def run_policy(policy: BucketPolicy, workload: Workload, config: ModelConfig, args: argparse.Namespace) -> Result:
    """Compile the policy's programs, run the workload, and measure."""
    limits = BatchLimits(args.max_num_seqs, args.max_model_len, BLOCK_SIZE)
    num_blocks = 1 + limits.max_blocks * args.max_num_seqs
    model = get_model_class(config.architecture)(config)  # pyright: ignore[reportCallIssue]
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, jnp.dtype(config.dtype))
    params = dummy_params(param_specs(model))
    runner = ModelRunner(
        lambda traced: bind(model, traced),  # pyright: ignore[reportArgumentType]
        params,
        RunnerConfig(limits, policy, spec, config.num_heads, strict_compile=True),
    )
    runner.initialize_kv_cache(num_blocks)
    start = time.perf_counter()
    list(runner.warm_up())
    compile_s = time.perf_counter() - start
    serve(runner, Planner(limits, policy, seed=0), workload, num_blocks, args)  # once untimed: first runs allocate
    shapes, step_s, gaps, total_s = serve(runner, Planner(limits, policy, seed=0), workload, num_blocks, args)

    by_bucket: dict[str, list[float]] = defaultdict(list)
    for shape, seconds in zip(shapes, step_s, strict=True):
        by_bucket[str(policy.select(*shape))].append(seconds * 1e3)
    waste = policy.padding_waste(shapes)
    analyses = [program.memory_analysis() for program in runner.programs.programs().values()]
    return Result(
        policy=policy.name,
        num_programs=len(runner.programs.programs()),
        compile_s=compile_s,
        program_bytes=max(analysis.temp_size_in_bytes for analysis in analyses if analysis is not None),
        num_steps=len(shapes),
        token_waste=waste.tokens,
        row_waste=waste.rows,
        total_s=total_s,
        tokens_per_s=sum(workload.num_outputs) / total_s,
        mean_step_ms=float(np.mean(step_s)) * 1e3,
        p99_inter_token_ms=float(np.percentile(gaps, 99)) * 1e3,
        step_ms={name: float(np.mean(times)) for name, times in sorted(by_bucket.items())},
        steps={name: len(times) for name, times in sorted(by_bucket.items())},
    )


def serve(
    runner: ModelRunner, planner: Planner, workload: Workload, num_blocks: int, args: argparse.Namespace
) -> tuple[list[StepShape], list[float], list[float], float]:
    """Run the workload step by step; gives the steps' shapes and times, the gaps between tokens, and the whole time."""
    limits = SchedulerConfig(args.max_num_seqs, args.max_num_batched_tokens, args.max_model_len, async_scheduling=False)
    scheduler = make_scheduler(limits, CacheConfig(BLOCK_SIZE, num_blocks, enable_prefix_caching=False))
    waiting = list(zip(workload.arrival_steps, workload.prompts, workload.num_outputs, strict=True))[::-1]
    shapes: list[StepShape] = []
    step_s, gaps = [], []
    last_token_at: dict[str, float] = {}
    step, begin = 0, time.perf_counter()
    while waiting or scheduler.has_requests():
        while waiting and waiting[-1][0] <= step:
            _, prompt, n = waiting.pop()
            params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
            scheduler.add_request(Request(f"r{len(waiting)}", prompt, params))
        step += 1
        start = time.perf_counter()
        output = scheduler.schedule()
        plan = planner.build(output)
        if plan is None:
            continue
        sampled = runner.execute(plan).wait()
        scheduler.update_from_output(output, sampled)
        now = time.perf_counter()
        num_decodes = sum(n == 1 for n in output.num_scheduled_tokens.values())
        is_decode = num_decodes == plan.num_reqs and not output.scheduled_new_requests
        shapes.append(StepShape("decode" if is_decode else "mixed", plan.num_tokens, plan.num_reqs))
        step_s.append(now - start)
        gaps += [now - last_token_at[i] for i in sampled.sampled_token_ids if i in last_token_at]
        last_token_at |= dict.fromkeys(sampled.sampled_token_ids, now)
    return shapes, step_s, gaps, time.perf_counter() - begin


def table(results: list[Result]) -> str:
    """The results as aligned text."""
    head = ["policy", "programs", "compile s", "workspace MB", "token waste", "row waste"]
    head += ["mean step ms", "p99 ITL ms", "out tok/s"]
    rows = [
        [
            r.policy, str(r.num_programs), f"{r.compile_s:.1f}", f"{r.program_bytes / 1e6:.1f}",
            f"{r.token_waste:.1%}", f"{r.row_waste:.1%}", f"{r.mean_step_ms:.2f}", f"{r.p99_inter_token_ms:.1f}",
            f"{r.tokens_per_s:.0f}",
        ]
        for r in results
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [head, *rows])


def plot(results: list[Result], path: str) -> None:
    """One bar chart a measure, policies side by side, and the mean step time by bucket size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7))
    measures = {
        "padding waste of tokens, %": [r.token_waste * 100 for r in results],
        "programs": [r.num_programs for r in results],
        "compile time, s": [r.compile_s for r in results],
        "mean step, ms": [r.mean_step_ms for r in results],
        "output tokens / s": [r.tokens_per_s for r in results],
    }
    names = [r.policy for r in results]
    for axis, (title, values) in zip(axes.flat, measures.items(), strict=False):
        axis.bar(names, values, color=[f"C{i}" for i in range(len(names))])
        axis.set_title(title)
        axis.tick_params(axis="x", labelrotation=20)
    last = axes.flat[-1]
    for result in results:
        sizes = sorted((int(name.split("T=")[1].split(",")[0]), ms) for name, ms in result.step_ms.items())
        last.plot(*zip(*sizes, strict=True), marker="o", label=result.policy)
    last.set(title="step time by bucket, ms", xlabel="T", xscale="log", yscale="log")
    last.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["one_shape", "powers_of_two", "linear", "explicit"])
    parser.add_argument("--decode-sizes", type=int, nargs="+", help="of the explicit policy")
    parser.add_argument("--mixed-sizes", type=int, nargs="+", help="of the explicit policy")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--input-len", type=int, default=60, help="mean")
    parser.add_argument("--output-len", type=int, default=40, help="mean")
    parser.add_argument("--arrivals-per-step", type=float, default=0.2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--plot", help="write a PNG here (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[Result]:
    """Compare the policies and print the table."""
    args = parse_args(argv)
    config = model_config(args)
    workload = make_workload(args, config.vocab_size, args.max_model_len)
    results = []
    for name in args.policies:
        results.append(run_policy(make_policy(name, args), workload, config, args))
        print(f"{results[-1].policy}: done in {results[-1].compile_s + results[-1].total_s:.1f} s", flush=True)
    print(f"\n{args.num_requests} requests, {results[0].num_steps} steps, on {jax.devices()[0].device_kind}")
    print(table(results))
    if args.json:
        summary = {"device": jax.devices()[0].device_kind, "args": vars(args), "results": [asdict(r) for r in results]}
        Path(args.json).write_text(json.dumps(summary, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)
    return results


if __name__ == "__main__":
    main()
