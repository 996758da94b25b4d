"""`jaxvllm chat`: talk with a model in the terminal, or through a pipe; with a server too."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxvllm.cli_args import (
    SAMPLING_OPTIONS,
    add_engine_options,
    add_sampling_options,
    conversation,
    flag,
    given_engine_args,
    make_engine,
    sampling_params,
)
from scheduler.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from jaxvllm.chat_backends import ChatBackend

HINT = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `jaxvllm`."""
    parser = commands.add_parser("chat", help="talk with the model; Ctrl-C stops an answer, Ctrl-D ends")
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="print the answer to this alone")
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="talk with the OpenAI-compatible server there, e.g. http://localhost:8000/v1")
    server.add_argument("--model-name", help="which of its models; default: the first")
    server.add_argument("--api-key", help="sent as a bearer token")
    add_sampling_options(parser.add_argument_group("sampling"))
    add_engine_options(parser.add_argument_group("engine"))
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):  # what no terminal can show, or nobody can read, ends nothing
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    with _backend(args) as backend:
        if args.quick is not None:
            return 0 if _answer(backend, conversation(args.system, args.quick)) else 1
        return _converse(backend, args.system)


def _converse(backend: "ChatBackend", system: str | None) -> int:
    """Answer line by line until the end; returns 1 if there was a line without an answer."""
    if sys.stdin.isatty():
        print(HINT, file=sys.stderr)
    start = conversation(system, "")[:-1]
    messages, status = list(start), 0
    for line in _lines():
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(start)
            continue
        if line == "/help":
            print(HINT, file=sys.stderr)
            continue
        messages.append({"role": "user", "content": line})
        answer = _answer(backend, messages)
        if answer is None:
            messages.pop()
            status = 1
        else:
            messages.append({"role": "assistant", "content": answer})
    return status


def _answer(backend: "ChatBackend", messages: list[dict[str, Any]]) -> str | None:
    """Print an answer as it comes. Returns it, as far as Ctrl-C let it come; None if there can be none."""
    pieces: list[str] = []
    try:
        with contextlib.closing(backend.answer(messages)) as answer:
            for piece in answer:
                pieces.append(piece)
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        print(f"jaxvllm: error: {error}", file=sys.stderr)
        return None
    print(flush=True)
    return "".join(pieces)


def _lines() -> Iterator[str]:
    """What the user types, line by line, until the end of input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines and remembers them once this is loaded
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(f"\n{HINT}", file=sys.stderr)
            continue
        if line:
            yield line


@contextlib.contextmanager
def _backend(args: argparse.Namespace) -> "Iterator[ChatBackend]":
    _check_options(args)
    if args.url is None:
        from jaxvllm.chat_backends import EngineChat

        with make_engine(args) as engine:
            params = sampling_params(args, engine.llm_engine.model.default_sampling)
            params.output_kind = RequestOutputKind.DELTA
            yield EngineChat(engine, params)
        return
    from jaxvllm.chat_backends import server_chat

    sampling_params(args, {})  # a bad value is refused here
    fields = {name: getattr(args, name) for name in SAMPLING_OPTIONS if getattr(args, name) is not None}
    fields |= {"stop": args.stop} if args.stop else {}
    fields |= {"ignore_eos": True} if args.ignore_eos else {}
    with server_chat(args.url, args.api_key, args.model_name, fields) as backend:
        if sys.stdin.isatty():
            print(f"Model: {backend.model}", file=sys.stderr)
        yield backend


def _check_options(args: argparse.Namespace) -> None:
    given = [flag(name) for name in given_engine_args(args)]
    if args.url is not None and given:
        raise ValueError(f"{given[0]} is for an engine of this command, --url for a server's: give one of them.")
    for name in ("model_name", "api_key"):
        if args.url is None and getattr(args, name) is not None:
            raise ValueError(f"{flag(name)} is for a server: give its --url.")
