"""`jaxvllm bench serve | throughput | latency`."""

from typing import Any

from jaxvllm.bench import offline, serve_cli


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `jaxvllm`."""
    parser = commands.add_parser("bench", help="benchmark a server, or an engine without one")
    subcommands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    serve_cli.add_parser(subcommands)
    offline.add_parsers(subcommands)
