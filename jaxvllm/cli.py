"""The command line: `jaxvllm generate PROMPT...` and `jaxvllm chat`."""

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

from jaxvllm.config import EngineArgs
from jaxvllm.errors import EngineDeadError
from scheduler.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxvllm.engine import Engine

DEFAULT_MAX_TOKENS = 256
_NO_OPTION = ("override_generation_config", "executor", "skip_tokenizer_init")
_ENGINE_HELP = {
    "model": "local Hugging Face folder, GGUF file or hub id (default: SmolLM2-135M-Instruct)",
    "dtype": "auto, float32, bfloat16 or float16 (auto: float32 on a CPU, the checkpoint's own on a GPU)",
    "device": "auto, cpu or gpu",
    "max_model_len": "longest prompt and answer together, in tokens",
    "max_num_seqs": "most requests in a step",
    "max_num_batched_tokens": "most tokens in a step",
    "gpu_memory_utilization": "share of the GPU's memory that the engine may use",
    "seed": "of the random choice; the same seed gives the same answers",
    "load_format": "auto, safetensors, gguf or dummy (random weights)",
    "tokenizer": "folder, GGUF file or hub id of another tokenizer",
    "tokenizer_mode": "auto or hf",
    "revision": "branch, tag or commit of the model on the hub",
    "tokenizer_revision": "branch, tag or commit of the tokenizer on the hub",
    "download_dir": "where downloads are cached",
    "block_size": "tokens in a block of the KV cache: 16, 32, 64 or 128",
    "enable_prefix_caching": "keep the KV blocks of prompts for later requests (the default)",
    "kv_cache_memory_bytes": "size of the KV cache (default: 1 GiB on a CPU, what is free on a GPU)",
    "num_gpu_blocks_override": "size of the KV cache in blocks",
    "long_prefill_token_threshold": "most tokens of one prompt in a step; 0: no limit",
    "enable_chunked_prefill": "spread a long prompt over steps (the default)",
    "scheduler_reserve_full_isl": "admit a prompt only if the KV cache has room for all of it (the default)",
    "scheduling_policy": "fcfs or priority",
    "async_scheduling": "schedule a step while the one before it runs (the default)",
    "generation_config": "auto (the model's), vllm (none), or a folder with a generation_config.json",
    "chat_template": "Jinja text, or a file of it, in the place of the model's own",
    "attention_backend": "mosaic_gpu or reference (default: by the device)",
    "disable_log_stats": "no line of statistics every 10 seconds (the default)",
    "tensor_parallel_size": "GPUs that share the model",
    "multiprocess": "run the engine core in a process of its own (the default)",
}
_SAMPLING_OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy, the default where the model's generation config names none"),
    "top_p": (float, "smallest set of tokens with this probability"),
    "top_k": (int, "most likely tokens to choose from"),
    "min_p": (float, "least probability, relative to the likeliest token"),
    "max_tokens": (int, f"longest answer in tokens (default: {DEFAULT_MAX_TOKENS})"),
    "min_tokens": (int, "shortest answer in tokens"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, NotImplementedError, ImportError, OSError, EngineDeadError) as error:
        print(f"jaxvllm: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxvllm", description="LLM inference in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="complete prompts and print the texts")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    generate.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="progress bar on standard error"
    )
    generate.set_defaults(run=_generate)
    chat = commands.add_parser("chat", help="talk with the model; Ctrl-C stops an answer, Ctrl-D ends")
    chat.set_defaults(run=_chat)
    for command in (generate, chat):
        command.add_argument("--system", metavar="TEXT", help="system message of the conversation")
        _add_sampling_options(command.add_argument_group("sampling"))
        _add_engine_options(command.add_argument_group("engine"))
    return parser


def _add_sampling_options(group: Any) -> None:
    for name, (kind, text) in _SAMPLING_OPTIONS.items():
        group.add_argument(_flag(name), type=kind, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")


def _add_engine_options(group: Any) -> None:
    """One option for every field of EngineArgs; one that is not given keeps the field's default."""
    for f in fields(EngineArgs):
        if f.name in _NO_OPTION:
            continue
        kind = next(kind for kind in get_args(f.type) or (f.type,) if kind is not type(None))
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        group.add_argument(_flag(f.name), default=argparse.SUPPRESS, help=_ENGINE_HELP.get(f.name), **how)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _make_engine(args: argparse.Namespace) -> "Engine":
    _sampling_params(args, {})  # a bad value is refused before the model is loaded
    from jaxvllm.engine import Engine  # late: `jaxvllm --help` needs no tokenizer library

    given = vars(args)
    return Engine(**{f.name: given[f.name] for f in fields(EngineArgs) if f.name in given})


def _sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the options say, over the model's defaults, over the command line's own."""
    values = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS} | dict(defaults)
    values |= {name: getattr(args, name) for name in _SAMPLING_OPTIONS if getattr(args, name) is not None}
    return SamplingParams(**values, stop=args.stop, ignore_eos=args.ignore_eos)


def _generate(args: argparse.Namespace) -> int:
    with _make_engine(args) as engine:
        params = _sampling_params(args, engine.llm_engine.model.default_sampling)
        tokenizer = engine.llm_engine.tokenizer
        if args.raw or tokenizer is None or not tokenizer.has_chat_template:
            if args.system is not None:
                raise ValueError("--system needs a chat template: leave out --raw, or name a model that has one.")
            outputs = engine.generate(args.prompts, params, use_tqdm=args.progress)
        else:
            conversations = [_conversation(args.system, prompt) for prompt in args.prompts]
            outputs = engine.chat(conversations, params, use_tqdm=args.progress)
    for prompt, output in zip(args.prompts, outputs, strict=True):
        if len(outputs) > 1:
            print(f">>> {prompt}")
        print(output.outputs[0].text)
    return 0


def _conversation(system: str | None, prompt: str) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def _chat(args: argparse.Namespace) -> int:
    with _make_engine(args) as engine:
        params = _sampling_params(args, engine.llm_engine.model.default_sampling)
        params.output_kind = RequestOutputKind.DELTA
        messages = _conversation(args.system, "")[:-1]
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


if __name__ == "__main__":
    sys.exit(main())
