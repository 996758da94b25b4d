"""`jaxvllm bench throughput` and `jaxvllm bench latency`: an engine without a server."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from jaxvllm.bench import loads
from jaxvllm.cli_args import add_engine_options, check_at_least, given_engine_args
from jaxvllm.metrics import Counter
from jaxvllm.output_files import check_can_write
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.engine import Engine

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def add_parsers(commands: Any) -> None:
    """Add both to the subparsers of `jaxvllm bench`."""
    throughput = commands.add_parser("throughput", help="requests and tokens a second of one batch")
    throughput.add_argument("--dataset-name", choices=("random", "sonnet"), default="random", help="default: random")
    throughput.add_argument(
        "--trace", metavar="FILE", help="lengths of a trace (Azure .csv or Mooncake .jsonl) instead"
    )
    throughput.add_argument("--trace-max-tokens", type=int, help="leave out requests of it that are longer in all")
    throughput.add_argument("--num-prompts", type=int, default=1000, help="default: 1000")
    throughput.add_argument("--input-len", type=int, default=1024, help="prompt tokens; default: 1024")
    throughput.add_argument("--output-len", type=int, default=128, help="output tokens; default: 128")
    throughput.add_argument("--range-ratio", type=float, default=0.0, help="random lengths vary by this share")
    throughput.add_argument("--prefix-len", type=int, default=0, help="shared tokens in front of the prompts")
    throughput.set_defaults(run=run_throughput)
    latency = commands.add_parser("latency", help="time of one batch from start to end")
    latency.add_argument("--input-len", type=int, default=32, help="prompt tokens; default: 32")
    latency.add_argument("--output-len", type=int, default=128, help="output tokens; default: 128")
    latency.add_argument("--batch-size", type=int, default=8, help="default: 8")
    latency.add_argument("--n", type=int, default=1, help="completions a prompt; default: 1")
    latency.add_argument("--num-iters-warmup", type=int, default=10, help="default: 10")
    latency.add_argument("--num-iters", type=int, default=30, help="default: 30")
    latency.set_defaults(run=run_latency)
    for command in (throughput, latency):
        command.add_argument("--disable-detokenize", action="store_true", help="no text is made of the tokens")
        command.add_argument("--output-json", metavar="FILE", help="write the figures here too")
        add_engine_options(command.add_argument_group("engine"))


def run_throughput(args: argparse.Namespace) -> int:
    """Generate everything at once and print what it gave a second."""
    _check(args, "num_prompts", "input_len", "output_len")
    requests = _load(args)
    with _make_engine(args) as engine:
        if requests is None:
            requests = _sonnets(args, engine)
        for request in requests:
            _check_room(engine, request.num_prompt_tokens, request.num_output_tokens)
        params = [_params(args, request.num_output_tokens) for request in requests]
        prompts = [request.prompt for request in requests]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params)
        elapsed = time.perf_counter() - start
        _warn_of_compiles(engine, 0)
    failed = next((c for output in outputs for c in output.outputs if c.finish_reason == "error"), None)
    if failed is not None:
        raise ValueError(f"a request was refused: {failed.stop_reason}")
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    total = num_prompt + num_output
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}\nTotal num output tokens:  {num_output}")
    _write(
        args,
        {
            "elapsed_time": elapsed,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / elapsed,
            "tokens_per_second": total / elapsed,
            "output_tokens_per_second": num_output / elapsed,
        },
    )
    return 0


def run_latency(args: argparse.Namespace) -> int:
    """Time the same batch again and again; no prompt is found in the prefix cache."""
    _check(args, "input_len", "output_len", "batch_size", "num_iters", "n")
    check_at_least(0, args, "num_iters_warmup")
    params = _params(args, args.output_len, args.n)
    latencies, num_compiles = [], 0
    with _make_engine(args) as engine:
        _check_room(engine, args.input_len, args.output_len)
        num_iters = args.num_iters_warmup + args.num_iters
        for index in tqdm(range(num_iters), desc="Iterations, warm-up first", file=sys.stderr):
            if index == args.num_iters_warmup:
                num_compiles = _num_compiles(engine)
            load = loads.random_load(args.batch_size, args.input_len, args.output_len, seed=index)
            start = time.perf_counter()
            engine.generate([request.prompt for request in load], params, use_tqdm=False)
            if index >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - start)
        _warn_of_compiles(engine, num_compiles)
    average, percentiles = float(np.mean(latencies)), np.percentile(latencies, PERCENTAGES)
    print(f"Avg latency: {average} seconds")
    for percentage, value in zip(PERCENTAGES, percentiles, strict=True):
        print(f"{percentage}% percentile latency: {value} seconds")
    by_percentage = {str(p): float(v) for p, v in zip(PERCENTAGES, percentiles, strict=True)}
    _write(args, {"avg_latency": average, "latencies": latencies, "percentiles": by_percentage})
    return 0


def _check(args: argparse.Namespace, *names: str) -> None:
    check_at_least(1, args, *names)
    check_can_write("--output-json", args.output_json)


def _make_engine(args: argparse.Namespace) -> "Engine":
    from jaxvllm.engine import Engine  # late: `--help` needs no tokenizer library

    return Engine(**given_engine_args(args))


def _check_room(engine: "Engine", num_prompt_tokens: int, num_output_tokens: int) -> None:
    """Raises: ValueError for a request whose answer max_model_len would cut: that is another benchmark."""
    limit = engine.llm_engine.max_model_len
    if num_prompt_tokens + num_output_tokens > limit:
        raise ValueError(
            f"a prompt of {num_prompt_tokens} tokens and {num_output_tokens} of output exceed "
            f"max_model_len={limit}: shorten them (--trace-max-tokens leaves out those of a trace), or raise it."
        )


def _num_compiles(engine: "Engine") -> int:
    """Programs that the engine has compiled while it served."""
    found = (metric for metric in engine.get_metrics() if metric.name == "jaxvllm:late_compiles")
    return int(sum(metric.value for metric in found if isinstance(metric, Counter)))


def _warn_of_compiles(engine: "Engine", num_before: int) -> None:
    """Say so if the times that were taken are those of the compiler too."""
    num_compiles = _num_compiles(engine) - num_before
    if num_compiles > 0:
        print(
            f"{num_compiles} programs were compiled while this was timed: --compile-ahead does it before.",
            file=sys.stderr,
        )


def _params(args: argparse.Namespace, num_output_tokens: int, n: int = 1) -> SamplingParams:
    """Every token asked for, drawn at temperature 1, as vLLM's benchmarks do."""
    return SamplingParams(
        n=n, temperature=1.0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=not args.disable_detokenize
    )


def _load(args: argparse.Namespace) -> list[loads.BenchRequest] | None:
    """The requests of a trace, or random ones; None for sonnets, whose tokens the engine counts."""
    if args.trace is not None:
        requests, num_left_out = loads.trace_load(args.trace, args.num_prompts, max_tokens=args.trace_max_tokens)
        print(f"{args.trace}: {len(requests)} requests, {num_left_out} left out as too long")
        return requests
    if args.dataset_name == "sonnet":
        return None
    return loads.random_load(
        args.num_prompts, args.input_len, args.output_len, range_ratio=args.range_ratio, prefix_len=args.prefix_len
    )


def _sonnets(args: argparse.Namespace, engine: "Engine") -> list[loads.BenchRequest]:
    tokenizer = engine.llm_engine.tokenizer
    if tokenizer is None:
        raise ValueError("--dataset-name sonnet needs a tokenizer: use random.")

    def count_tokens(texts: Sequence[str]) -> list[int]:
        return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    return loads.sonnet_load(
        args.num_prompts, args.input_len, args.output_len, count_tokens, prefix_len=args.prefix_len
    )


def _write(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(figures, indent=4))
