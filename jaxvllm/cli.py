"""The command line: `jaxvllm COMMAND`; each command lives in a module of its own and is listed here."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version

from jaxvllm.errors import EngineDeadError
from jaxvllm.interrupt import immediate_interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    with immediate_interrupt():
        parser = _parser()
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, NotImplementedError, ImportError, OSError, EngineDeadError) as error:
        print(f"jaxvllm: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    # Late: these take most of a start, and main() decides what a Ctrl-C does meanwhile.
    from jaxvllm import chat_cli, generate_cli
    from jaxvllm.bench import cli as bench_cli
    from jaxvllm.buckets import cli as buckets_cli
    from jaxvllm.server import cli as server_cli

    parser = argparse.ArgumentParser(prog="jaxvllm", description="LLM inference in JAX.")
    parser.add_argument("--version", action="version", version=version("jaxvllm"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate_cli, chat_cli, server_cli, bench_cli, buckets_cli):
        command.add_parser(commands)  # which sets `run`
    return parser


if __name__ == "__main__":
    sys.exit(main())
