"""`jaxvllm generate PROMPT...`: complete prompts and print the texts."""

import argparse
from typing import Any

from jaxvllm.cli_args import add_engine_options, add_sampling_options, conversation, make_engine, sampling_params


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `jaxvllm`."""
    parser = commands.add_parser("generate", help="complete prompts and print the texts")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="progress bar on standard error"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling_options(parser.add_argument_group("sampling"))
    add_engine_options(parser.add_argument_group("engine"))
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    with make_engine(args) as engine:
        params = sampling_params(args, engine.llm_engine.model.default_sampling)
        tokenizer = engine.llm_engine.tokenizer
        if args.raw or tokenizer is None or not tokenizer.has_chat_template:
            if args.system is not None:
                raise ValueError("--system needs a chat template: leave out --raw, or name a model that has one.")
            outputs = engine.generate(args.prompts, params, use_tqdm=args.progress)
        else:
            conversations = [conversation(args.system, prompt) for prompt in args.prompts]
            outputs = engine.chat(conversations, params, use_tqdm=args.progress)
    for prompt, output in zip(args.prompts, outputs, strict=True):
        if len(outputs) > 1:
            print(f">>> {prompt}")
        print(output.outputs[0].text)
    return 0
