"""`jaxvllm bench serve`: options of vLLM's `bench serve`, and a trace as a load."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxvllm.bench import loads
from jaxvllm.bench.loads import BenchRequest
from jaxvllm.bench.report import METRICS, ServeReport, make_report, parse_goodput, table, to_json
from jaxvllm.cli_args import check_at_least
from jaxvllm.output_files import check_can_plot, check_can_write

INFINITY = float("inf")


def add_parser(commands: Any) -> None:
    """Add `serve` to the subparsers of `jaxvllm bench`."""
    parser = commands.add_parser(
        "serve",
        help="benchmark a running OpenAI-compatible server",
        formatter_class=_HelpFormatter,
    )
    _add_server_options(parser.add_argument_group("server"))
    _add_load_options(parser.add_argument_group("load"))
    _add_request_options(parser.add_argument_group("requests"))
    _add_report_options(parser.add_argument_group("report"))
    parser.set_defaults(run=run)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def _add_server_options(group: Any) -> None:
    group.add_argument("--base-url", help="address of the server, in the place of host and port")
    group.add_argument("--host", default="127.0.0.1", help="where the server runs")
    group.add_argument("--port", type=int, default=8000, help="its port")
    group.add_argument(
        "--backend",
        choices=("openai", "vllm", "openai-chat"),
        default="openai",
        help="completions (openai; vllm is the same) or chat completions",
    )
    group.add_argument("--endpoint", help="path of the API; default: that of the backend")
    group.add_argument("--model", help="served name to ask for; default: the first that the server lists")
    group.add_argument("--api-key", help="sent as a bearer token")
    group.add_argument("--header", action="append", default=[], metavar="KEY=VALUE", help="further header; repeatable")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=600.0, help="how long to wait for the server; 0: not at all"
    )


def _add_load_options(group: Any) -> None:
    group.add_argument("--dataset-name", choices=("random", "sonnet"), default="random", help="what is asked")
    group.add_argument("--trace", metavar="FILE", help="recorded requests instead: Azure .csv or Mooncake .jsonl")
    group.add_argument("--trace-max-tokens", type=int, help="leave out requests of a trace that are longer in all")
    group.add_argument("--num-prompts", type=int, default=1000, help="requests to send")
    group.add_argument(
        "--request-rate", type=float, help="requests a second; default: inf (all at once), for a trace as recorded"
    )
    group.add_argument("--burstiness", type=float, default=1.0, help="of the rate; 1: Poisson, less: burstier")
    group.add_argument("--max-concurrency", type=int, help="most requests at once; default: no limit")
    group.add_argument("--seed", type=int, default=0, help="of prompts and times")
    group.add_argument("--random-input-len", type=int, default=1024, help="prompt tokens")
    group.add_argument("--random-output-len", type=int, default=128, help="output tokens")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share")
    group.add_argument("--random-prefix-len", type=int, default=0, help="shared tokens in front of the prompt")
    group.add_argument("--sonnet-input-len", type=int, default=550, help="prompt tokens")
    group.add_argument("--sonnet-output-len", type=int, default=150, help="output tokens")
    group.add_argument("--sonnet-prefix-len", type=int, default=200, help="tokens of the prompt that all share")
    group.add_argument("--dataset-path", metavar="FILE", help="lines for sonnet; default: six of Shakespeare's")


def _add_request_options(group: Any) -> None:
    group.add_argument("--ignore-eos", action="store_true", help="generate all output tokens")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    for name, kind in (("top-p", float), ("top-k", int), ("min-p", float)):
        group.add_argument(f"--{name}", type=kind, help="as in SamplingParams")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields of a request")


def _add_report_options(group: Any) -> None:
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="what the table shows")
    group.add_argument("--metric-percentiles", default="99", help="percentiles, with commas between")
    group.add_argument("--goodput", nargs="+", default=[], metavar="KEY:MS", help="levels of ttft, tpot, e2el")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with every request in it")
    group.add_argument("--result-dir", default=".", help="where it goes")
    group.add_argument("--result-filename", help="its name; default: backend, rate, model and time")
    group.add_argument("--label", help="goes into the file and its name; default: the backend")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="goes into the file")
    group.add_argument("--plot", metavar="PNG", help="draw the distributions and the course of the run")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its report; 1 if no request succeeded.

    Raises: ValueError, OSError, ImportError: an option, file or package that stands in its way.
    """
    _check(args)
    return asyncio.run(_run(args))


def _check(args: argparse.Namespace) -> None:
    args.metric_names = args.percentile_metrics.split(",")
    unknown = set(args.metric_names) - METRICS.keys()
    if unknown:
        raise ValueError(f"--percentile-metrics {args.percentile_metrics}: give some of {','.join(METRICS)}.")
    try:
        args.percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    except ValueError:
        args.percentiles = [-1.0]
    if not all(0 <= p <= 100 for p in args.percentiles):
        raise ValueError(f"--metric-percentiles {args.metric_percentiles}: give numbers from 0 to 100, commas between.")
    if args.request_rate is None and args.trace is None:  # from here on None is the times of a trace
        args.request_rate = INFINITY
    args.goodput_ms = parse_goodput(args.goodput)
    check_at_least(1, args, "num_prompts", "max_concurrency")
    args.headers = _pairs("--header", args.header)
    args.extra = _pairs("--metadata", args.metadata)
    if args.api_key:
        args.headers["Authorization"] = f"Bearer {args.api_key}"
    if args.plot:
        check_can_write("--plot", args.plot)
        check_can_plot()
    if args.save_result or args.save_detailed:
        Path(args.result_dir).mkdir(parents=True, exist_ok=True)
        check_can_write("--result-dir", Path(args.result_dir) / (args.result_filename or "result.json"))


def _pairs(option: str, pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"{option} {pair} must be KEY=VALUE.")
    return dict(pair.split("=", 1) for pair in pairs)


async def _run(args: argparse.Namespace) -> int:
    from jaxvllm.bench.client import BenchClient
    from jaxvllm.bench.serve import as_text, run_load, wait_until_ready

    names = ("temperature", "top_p", "top_k", "min_p")
    body = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.ignore_eos:
        body["ignore_eos"] = True
    requests = _load(args)
    is_chat = args.backend == "openai-chat"
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    async with BenchClient(
        base_url, is_chat=is_chat, headers=args.headers, extra_body=body | args.extra_body, endpoint=args.endpoint
    ) as client:
        first_model = await wait_until_ready(client, args.ready_check_timeout_sec)
        client.model = args.model or first_model
        if requests is None:
            requests = _at_rate(args, await _sonnets(args, client))
        if is_chat:
            requests = await as_text(client, requests)
        print("Starting initial single prompt test run...")
        # Backwards: the real first request shall not find its prompt in the prefix cache.
        first = replace(requests[0], prompt=requests[0].prompt[::-1], arrival_s=0.0)
        (test,), _ = await run_load(client, [first], max_concurrency=None, use_tqdm=False)
        if test.error is not None:
            raise ValueError(f"the initial test run failed, check the options: {test.error}")
        print("Initial test run completed. Starting main benchmark run...")
        _print_traffic(args)
        results, duration_s = await run_load(
            client, requests, max_concurrency=args.max_concurrency, use_tqdm=not args.disable_tqdm
        )
    report = make_report(results, duration_s, args.goodput_ms)
    shown = {"metrics": args.metric_names, "percentiles": args.percentiles}
    print(table(report, rate=args.request_rate or INFINITY, max_concurrency=args.max_concurrency, **shown))
    for error in dict.fromkeys(result.error for result in results if result.error is not None):
        print(f"jaxvllm: a request failed: {error}", file=sys.stderr)
    if args.save_result or args.save_detailed:
        _save(args, client.model, to_json(report, results, **shown, is_detailed=args.save_detailed))
    if args.plot:
        _plot(args, client.model, report, results)
    return 0 if report.completed else 1


def _load(args: argparse.Namespace) -> list[BenchRequest] | None:
    """The requests of a trace, or random ones; None for sonnets, whose tokens the server counts."""
    if args.trace is not None:
        requests, num_left_out = loads.trace_load(
            args.trace, args.num_prompts, max_tokens=args.trace_max_tokens, seed=args.seed
        )
        print(f"{args.trace}: {len(requests)} requests, {num_left_out} left out as too long")
    elif args.dataset_name == "sonnet":
        return None
    else:
        requests = loads.random_load(
            args.num_prompts,
            args.random_input_len,
            args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=args.seed,
        )
    return _at_rate(args, requests)


def _at_rate(args: argparse.Namespace, requests: list[BenchRequest]) -> list[BenchRequest]:
    if args.request_rate is None:
        return requests
    return loads.at_rate(requests, args.request_rate, args.burstiness, args.seed)


async def _sonnets(args: argparse.Namespace, client: Any) -> list[BenchRequest]:
    path = Path(args.dataset_path) if args.dataset_path else loads.SONNETS
    loop = asyncio.get_running_loop()

    def count_tokens(texts: Sequence[str]) -> list[int]:
        return asyncio.run_coroutine_threadsafe(client.count_tokens(texts), loop).result()

    return await asyncio.to_thread(
        loads.sonnet_load,
        args.num_prompts,
        args.sonnet_input_len,
        args.sonnet_output_len,
        count_tokens,
        prefix_len=args.sonnet_prefix_len,
        path=path,
        seed=args.seed,
    )


def _print_traffic(args: argparse.Namespace) -> None:
    if args.request_rate is None:
        print("Traffic request rate: as recorded")
    else:
        process = "Poisson process" if args.burstiness == 1.0 else "Gamma distribution"
        print(f"Traffic request rate: {args.request_rate}\nBurstiness factor: {args.burstiness} ({process})")
    print(f"Maximum request concurrency: {args.max_concurrency}")


def _save(args: argparse.Namespace, model: str, figures: dict[str, Any]) -> None:
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    label = args.label or args.backend
    rate = args.request_rate
    rate_word = "recorded" if rate is None else str(rate)
    data = {
        "date": now,
        "backend": args.backend,
        "label": label,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": rate_word if rate in (None, INFINITY) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "trace": args.trace,
        **args.extra,
        **figures,
    }
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    name = args.result_filename or f"{label}-{rate_word}qps{concurrency}-{Path(model).name}-{now}.json"
    folder = Path(args.result_dir)
    (folder / name).write_text(json.dumps(data))
    print(f"Result: {folder / name}")


def _plot(args: argparse.Namespace, model: str, report: ServeReport, results: list) -> None:
    from jaxvllm.bench.plot import plot

    load = Path(args.trace).name if args.trace else args.dataset_name
    rate = "all at once" if args.request_rate == INFINITY else f"{args.request_rate} req/s"
    if args.request_rate is None:
        rate = "as recorded"
    title = f"{model}, {load}, {rate}: {report.request_throughput:.2f} req/s, {report.output_throughput:.1f} tok/s"
    plot(report, results, args.plot, title)
    print(f"Plot: {args.plot}")
