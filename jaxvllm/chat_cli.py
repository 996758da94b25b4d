"""`jaxvllm chat`: talk with the model line by line."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxvllm.cli_args import add_engine_options, add_sampling_options, conversation, make_engine, sampling_params
from scheduler.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxvllm.engine import Engine


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `jaxvllm`."""
    parser = commands.add_parser("chat", help="talk with the model; Ctrl-C stops an answer, Ctrl-D ends")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling_options(parser.add_argument_group("sampling"))
    add_engine_options(parser.add_argument_group("engine"))
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    with make_engine(args) as engine:
        params = sampling_params(args, engine.llm_engine.model.default_sampling)
        params.output_kind = RequestOutputKind.DELTA
        messages = conversation(args.system, "")[:-1]
        for number, line in enumerate(_lines()):
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(engine, str(number), messages, params)})
    return 0


def _answer(engine: "Engine", request_id: str, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Prints the answer as it comes and returns it. Ctrl-C ends it early, and the conversation goes on."""
    core, answer = engine.llm_engine, ""
    try:
        core.add_request(request_id, engine.render_chat(messages), params)
        while core.has_unfinished_requests():
            for output in core.step():
                answer += output.outputs[0].text
                print(output.outputs[0].text, end="", flush=True)
    except KeyboardInterrupt:
        core.drop_requests([request_id])
    print()
    return answer


def _lines() -> Iterator[str]:
    """What the user types, line by line, until the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line
