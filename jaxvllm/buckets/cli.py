"""`jaxvllm buckets compare | measure | tune`."""

import argparse
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jaxvllm.bucket_choice import STRATEGIES, choose_policy
from jaxvllm.cli_args import add_engine_options, check_at_least, given_engine_args
from jaxvllm.engine_args import EngineArgs
from jaxvllm.output_files import check_can_plot, check_can_write
from scheduler.buckets import DEFAULT_MAX_PROGRAMS, BucketKey, BucketPolicy, StepShape, explicit, load_policy
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.cost_model import CostModel, load_cost_model
from scheduler.simulate import Simulation, SimulationReport
from scheduler.trace import TraceRequest, load_trace
from scheduler.tuning import TuningOptions, tune

if TYPE_CHECKING:
    from jaxvllm.compile_cache import ProgramKey
    from jaxvllm.executor import DeviceExecutor
    from jaxvllm.model_runner import ModelRunner

DEFAULT_POLICIES = ("one_shape", "powers_of_two", "linear", "geometric", "explicit", "tuned")
# A Llama small enough for a CPU, where no model is named.
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True, "torch_dtype": "float32",
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
TINY_LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20}


def add_parser(commands: Any) -> None:
    """Add `buckets` and what follows it."""
    parser = commands.add_parser("buckets", help="padded shapes: compare policies, measure steps, tune to a trace")
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(kinds.add_parser("compare", help="one workload under several policies: table, JSON, picture"))
    _add_measure(kinds.add_parser("measure", help="step times by bucket, for tune and for the simulation"))
    _add_tune(kinds.add_parser("tune", help="the sizes that cost a trace the least time, without a device"))


def _add_compare(parser: argparse.ArgumentParser) -> None:
    choices = ", ".join(DEFAULT_POLICIES)
    parser.add_argument("--policies", nargs="+", default=DEFAULT_POLICIES, help=f"any of {choices}, or JSON files")
    parser.add_argument("--decode-sizes", type=int, nargs="+", help="of the explicit policy")
    parser.add_argument("--mixed-sizes", type=int, nargs="+", help="of the explicit policy, in tokens")
    parser.add_argument("--max-programs", type=int, default=DEFAULT_MAX_PROGRAMS, help="budget of the tuned policy")
    parser.add_argument("--trace", type=Path, help="Azure CSV or Mooncake JSONL; requests come at its times")
    parser.add_argument("--speedup", type=float, default=1.0, help="the trace's requests arrive so many times faster")
    parser.add_argument("--num-requests", type=int, default=40, help="of the trace, or of the synthetic workload")
    parser.add_argument("--input-len", type=int, default=60, help="mean, synthetic")
    parser.add_argument("--output-len", type=int, default=40, help="mean, synthetic")
    parser.add_argument("--arrivals-per-step", type=float, default=0.2, help="synthetic")
    parser.add_argument(
        "--time-limit",
        type=float,
        help="seconds; the first policy runs in any case, those without time to run are estimated",
    )
    parser.add_argument("--json", type=Path, help="write the results here, after every policy")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    _add_engine_options(parser)
    parser.set_defaults(run=run_compare)


def _add_measure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", nargs="+", default=["geometric"], help="whose buckets to time")
    parser.add_argument("--out", type=Path, required=True, help="JSON of samples")
    _add_engine_options(parser)
    parser.set_defaults(run=run_measure, decode_sizes=None, mixed_sizes=None)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="Azure CSV or Mooncake JSONL")
    parser.add_argument("--out", type=Path, required=True, help="the policy, for the engine's --bucket-policy")
    parser.add_argument("--cost", type=Path, help="JSON of `measure` or of `compare` (default: Qwen3-0.6B on one H200)")
    parser.add_argument("--running", type=float, help="speed arrivals up until so many requests run at once on average")
    parser.add_argument(
        "--speedup", type=float, default=1.0, help="requests arrive so many times faster; with --running: the first try"
    )
    parser.add_argument("--limit", type=int, default=4000, help="only the first so many requests")
    parser.add_argument("--max-programs", type=int, default=DEFAULT_MAX_PROGRAMS)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=40_960)
    parser.add_argument("--num-blocks", type=int, default=60_000, help="of the KV pool, 16 tokens each")
    parser.add_argument("--host-ms", type=float, default=0.5, help="time of the host a step")
    parser.add_argument("--padding-price", type=float, default=2.0, help="see scheduler.tuning.TuningOptions")
    parser.add_argument("--prior-share", type=float, default=0.03, help="see scheduler.tuning.TuningOptions")
    parser.add_argument("--rounds", type=int, default=2, help="tune, simulate the tuned policy, and tune again")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.set_defaults(run=run_tune)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    model = "local Hugging Face folder, GGUF file or hub id (default: a Llama small enough for a CPU, random weights)"
    group = parser.add_argument_group("engine")
    add_engine_options(group, leave_out=("bucket_policy", "compile_ahead"), model=model)


def run_compare(args: argparse.Namespace) -> int:
    """Compare the policies and print the table."""
    if args.time_limit is not None and not args.time_limit >= 0:
        raise ValueError(f"--time-limit {args.time_limit} must be at least 0; without it there is no limit.")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        check_can_write(option, path)
    if args.plot:
        check_can_plot()
    deadline = time.monotonic() + (math.inf if args.time_limit is None else args.time_limit)
    with running_executor(args) as (executor, num_blocks):
        _compare(args, executor, num_blocks, deadline)
    return 0


def _compare(args: argparse.Namespace, executor: "DeviceExecutor", num_blocks: int, deadline: float) -> None:
    from jaxvllm.buckets.arrivals import sped_up
    from jaxvllm.buckets.compare import synthetic_workload, trace_workload
    from jaxvllm.buckets.comparison import Comparison
    from jaxvllm.buckets.report import plot, step_times, table, write_json

    config = executor.config
    assert executor.model_config is not None
    vocab_size, max_model_len = executor.model_config.vocab_size, config.scheduler.max_model_len
    if args.trace:
        trace = sped_up(load_trace(args.trace, args.num_requests), args.speedup)
        workload = trace_workload(trace, vocab_size, max_model_len)
    else:
        lengths = (args.num_requests, args.input_len, args.output_len, args.arrivals_per_step)
        workload = synthetic_workload(*lengths, vocab_size, max_model_len)
    known = {name: _policy(name, config, args) for name in args.policies if name != "tuned"}
    comparison = Comparison(executor, num_blocks, workload, deadline)
    given = {name: str(value) for name, value in vars(args).items() if name not in ("run", "json", "plot")}
    about = {"device": executor.runner.device_kind, "args": given}
    for name in args.policies:
        comparison.add(known[name] if name in known else comparison.tuned(args.max_programs))
        if args.json:
            write_json(comparison.results, comparison.samples, args.json, **about)
        if args.plot:
            plot(comparison.results, args.plot)
    print(f"\n{args.num_requests} requests on {about['device']}")
    print(table(comparison.results))
    print("\nms a step by bucket, T x R\n" + step_times(comparison.results))


def run_measure(args: argparse.Namespace) -> int:
    """Time the buckets of the policies and write the samples."""
    check_can_write("--out", args.out)
    with running_executor(args) as (executor, num_blocks):
        _measure(args, executor, num_blocks)
    return 0


def _measure(args: argparse.Namespace, executor: "DeviceExecutor", num_blocks: int) -> None:
    from jaxvllm.buckets.measure import measure_steps

    runner = executor.runner
    keys = _programs(runner, [_policy(name, executor.config, args) for name in args.policies])
    executor.prepare(keys)
    runner.initialize_kv_cache(num_blocks)
    samples = []
    for sample in measure_steps(runner, [key for key in keys if isinstance(key, BucketKey)]):
        samples.append(asdict(sample.key) | {"context_tokens": sample.context_tokens, "ms": sample.ms})
        print(f"{sample.key!s:24} {sample.context_tokens:9,} context tokens {sample.ms:9.3f} ms", flush=True)
    args.out.write_text(json.dumps({"device": runner.device_kind, "samples": samples}, indent=1) + "\n")


def run_tune(args: argparse.Namespace) -> int:
    """Tune to a trace, simulate, print both policies side by side, and save the tuned one."""
    check_at_least(1, args, "limit", "rounds")
    for option, path in (("--out", args.out), ("--json", args.json)):
        check_can_write(option, path)
    with _silent_scheduler():
        return _tune(args)


@contextmanager
def _silent_scheduler() -> Iterator[None]:
    """No warning for each request that fills the pool: the table counts them."""
    scheduler = logging.getLogger("scheduler")
    level = scheduler.level
    scheduler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        scheduler.setLevel(level)


def _tune(args: argparse.Namespace) -> int:
    from jaxvllm.buckets.arrivals import from_start, scale_to_running, sped_up, tune_to_trace

    limits = SchedulerConfig(
        args.max_num_seqs,
        args.max_num_batched_tokens,
        args.max_model_len,
        num_growth_tokens=EngineArgs.num_growth_tokens,
    )
    base, geometric = (choose_policy(name, "gpu", limits) for name in ("powers_of_two", "geometric"))
    cost = load_cost_model(args.cost) if args.cost else guessed_cost(base)
    everything = load_trace(args.trace)
    trace, unseen = everything[: args.limit], from_start(everything[args.limit : 2 * args.limit])
    options = TuningOptions(args.max_programs, padding_price=args.padding_price, prior_share=args.prior_share)

    def simulate(requests: Sequence[TraceRequest], policy: BucketPolicy) -> SimulationReport:
        pool = CacheConfig(16, args.num_blocks, True)
        return Simulation(requests, policy, cost, limits, pool, host_ms=args.host_ms).run()

    def tuned(steps: Mapping[StepShape, int]) -> BucketPolicy:
        return tune(steps, cost, *_sizes(limits), options)

    if args.running is None:
        speedup = args.speedup
        policy = tuned(simulate(sped_up(trace, speedup), base).step_shapes)
    else:
        first, _ = scale_to_running(trace, base, simulate, args.running, args.speedup)
        policy, speedup, _ = tune_to_trace(trace, base, simulate, tuned, args.running, first, args.rounds)
    reports = {p.name: simulate(sped_up(trace, speedup), p) for p in (base, geometric, policy)}
    if unseen:
        reports["tuned, unseen requests"] = simulate(sped_up(unseen, speedup), policy)
    tables = {name: {"requests running": f"{r.mean_running:.1f}"} | r.rows() for name, r in reports.items()}
    _print_columns(tables)
    print(f"\narrivals {speedup:.2f} times as fast; {len(policy.keys())} programs")
    print(f"decode sizes {list(policy.decode_sizes)}\nmixed sizes (T, R) {list(policy.mixed_sizes)}")
    policy.save(args.out)
    if args.json:
        args.json.write_text(json.dumps({"speedup": speedup, "policies": tables}, indent=1) + "\n")
    return 0


@contextmanager
def running_executor(args: argparse.Namespace) -> "Iterator[tuple[DeviceExecutor, int]]":
    """The device side of an engine in this process, its programs not yet compiled, and its number of blocks."""
    from jaxvllm.model_source import resolve

    with TemporaryDirectory(prefix="jaxvllm-tiny-") as folder:
        given = given_engine_args(args)
        if given.get("model") is None:
            (Path(folder) / "config.json").write_text(json.dumps(TINY))
            given = {"load_format": "dummy", **TINY_LIMITS} | given | {"model": folder}
        engine_args = EngineArgs(**given, compile_ahead=False)
        source = resolve(engine_args.model, revision=engine_args.revision, download_dir=engine_args.download_dir)
        config = engine_args.create_engine_config(source.config.max_context)
        with config.applied_core_environment():
            from jaxvllm.executor import DeviceExecutor  # not before: JAX reads the environment when it is imported

            executor = DeviceExecutor(config)
            num_blocks = executor.initialize()
    try:
        yield executor, num_blocks
    finally:
        executor.shutdown()


def guessed_cost(policy: BucketPolicy) -> CostModel:
    """Lines through the times of Qwen3-0.6B on one H200 (scripts/results/h200/step_times_qwen3-0.6b.json)."""
    keys = policy.keys()
    decode = {key: 1.05 + 0.0016 * key.R for key in keys if key.kind == "decode"}
    mixed = {key: 1.1 + 0.0018 * key.T + 0.0005 * key.R for key in keys if key.kind == "mixed"}
    return CostModel(decode | mixed, ms_per_context_token=2.5e-5)


def _programs(runner: "ModelRunner", policies: Iterable[BucketPolicy]) -> "list[ProgramKey]":
    """All buckets of the policies, and the program that admits many requests at once if there is one."""
    keys: dict[ProgramKey, None] = {key: None for policy in policies for key in policy.keys()}  # noqa: SIM118
    return [*keys, *(key for key in runner.program_keys() if key == "admit")]


def _policy(name: str, config: Any, args: argparse.Namespace) -> BucketPolicy:
    limits = config.scheduler
    if name == "explicit":
        decode, mixed = args.decode_sizes, args.mixed_sizes
        sizes = _sizes(limits)
        return explicit(*sizes, decode or [min(8, sizes[0]), sizes[0]], mixed or [min(64, sizes[1]), sizes[1]])
    if name in STRATEGIES or not Path(name).is_file():
        return choose_policy(name, config.device, limits)
    return load_policy(name).restricted(*_sizes(limits))


def _sizes(limits: SchedulerConfig) -> tuple[int, int]:
    return limits.max_num_seqs, limits.max_num_batched_tokens


def _print_columns(tables: dict[str, dict[str, str]]) -> None:
    from jaxvllm.buckets.report import aligned

    names = list(tables)
    rows = [["", *names]] + [[row, *(tables[name][row] for name in names)] for row in tables[names[0]]]
    print(aligned(rows))
