"""Options that commands share: those of the engine and those of sampling."""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any, get_args, get_origin

from jaxvllm.engine_args import EngineArgs
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.engine import Engine

DEFAULT_MAX_TOKENS = 256
_LARGE = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
NO_OPTION = ("executor", "skip_tokenizer_init")
ENGINE_HELP = {
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
    "kv_cache_dtype": "auto (the model's) or fp8: half the memory and traffic of the KV cache, at some accuracy",
    "num_gpu_blocks_override": "size of the KV cache in blocks",
    "long_prefill_token_threshold": "most tokens of one prompt in a step; 0: no limit",
    "enable_chunked_prefill": "spread a long prompt over steps (the default)",
    "scheduler_reserve_full_isl": "admit a prompt only if the KV cache has room for all of it (the default)",
    "num_growth_tokens": "beside running requests admit one only if these may grow by so many tokens (vLLM: 0)",
    "scheduling_policy": "fcfs or priority",
    "async_scheduling": "schedule a step while the one before it runs (the default)",
    "generation_config": "auto (the model's), vllm (none), or a folder with a generation_config.json, "
    "whose max_new_tokens is then the most that a server gives to any request",
    "override_generation_config": "JSON with keys of generation_config.json, in the place of what it says; "
    "max_new_tokens is then the most that a server gives to any request",
    "chat_template": "Jinja text, or a file of it, in the place of the model's own",
    "max_logprobs": "most logprobs a position that a request may ask for; -1: all (default: 20)",
    "logits_processors": "custom logits processors, module:attribute each",
    "reasoning_config": "JSON with reasoning_start_str and reasoning_end_str, for thinking_token_budget",
    "attention_backend": "mosaic_gpu or reference (default: by the device)",
    "disable_log_stats": "no line of statistics every 10 seconds (the default)",
    "tensor_parallel_size": "devices that share the model; above 1 only on a CPU",
    "bucket_policy": "geometric (the default on a GPU), powers_of_two (on a CPU), linear, one_shape, or a file of "
    "`jaxvllm buckets tune`",
    "compile_ahead": "compile all programs before the first request (the default on a GPU)",
    "strict_compile": "a compile while serving is an error",
    "program_cache_dir": "where compiled programs are kept (default: on a GPU in the user's cache folder)",
    "multiprocess": "run the engine core in a process of its own (the default)",
}
SAMPLING_OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy, the default where the model's generation config names none"),
    "top_p": (float, "smallest set of tokens with this probability"),
    "top_k": (int, "most likely tokens to choose from"),
    "min_p": (float, "least probability, relative to the likeliest token"),
    "max_tokens": (int, f"longest answer in tokens (default: {DEFAULT_MAX_TOKENS})"),
    "min_tokens": (int, "shortest answer in tokens"),
}


def human_int(text: str) -> int:
    """A number as vLLM's options take it: 4096, 4k (4000), 4K (4096), 1.5M."""
    found = re.fullmatch(r"([0-9.]+)([kmgtKMGT]?)", text)
    try:
        if found is None:
            return int(text)
        size = 1024 if found.group(2).isupper() else 1000
        value = Decimal(found.group(1)) * size ** " kmgt".index(found.group(2).lower() or " ")
    except (ValueError, ArithmeticError):
        value = Decimal("0.5")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number such as 4096, 4k (4000) or 4K (4096).")
    return int(value)


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def check_at_least(least: int, args: argparse.Namespace, *names: str) -> None:
    """Refuse fields that are smaller. None is not given.

    Raises: ValueError that names option, value and limit.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} {value} must be at least {least}.")


def add_engine_options(group: Any, leave_out: Iterable[str] = (), **texts: str) -> None:
    """One option for every field of EngineArgs; one that is not given keeps the field's default.

    Args:
      group: a parser or an argument group.
      leave_out: fields that the command has a way of its own for.
      texts: help for a field that means something else to the command.
    """
    words = ENGINE_HELP | texts
    for f in fields(EngineArgs):
        if f.name in NO_OPTION or f.name in leave_out:
            continue
        group.add_argument(flag(f.name), default=argparse.SUPPRESS, help=words.get(f.name), **_how(f))


def _how(f: Field) -> dict[str, Any]:
    """How argparse reads a field of EngineArgs, by its type."""
    kind: Any = next(kind for kind in get_args(f.type) or (f.type,) if kind is not type(None))
    if f.name in _LARGE:
        return {"type": human_int}
    if get_origin(kind) is list:
        return {"nargs": "+"}
    if get_origin(kind) is dict:
        return {"type": json_object, "metavar": "JSON"}
    return {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}


def json_object(text: str) -> dict[str, Any]:
    """An option's value that is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object.")
    return value


def given_engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineArgs that the command line gives."""
    given = vars(args)
    return {f.name: given[f.name] for f in fields(EngineArgs) if f.name in given}


def make_engine(args: argparse.Namespace) -> "Engine":
    """The engine that a command line asks for; bad sampling options are refused before the model is loaded."""
    sampling_params(args, {})
    from jaxvllm.engine import Engine  # late: `jaxvllm --help` needs no tokenizer library

    return Engine(**given_engine_args(args))


def add_sampling_options(group: Any) -> None:
    """The options that sampling_params() reads."""
    for name, (kind, text) in SAMPLING_OPTIONS.items():
        group.add_argument(flag(name), type=kind, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the options say, over the model's defaults, over the command line's own."""
    values = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS} | dict(defaults)
    values |= {name: getattr(args, name) for name in SAMPLING_OPTIONS if getattr(args, name) is not None}
    return SamplingParams(**values, stop=args.stop, ignore_eos=args.ignore_eos)


def conversation(system: str | None, prompt: str) -> list[dict[str, Any]]:
    """One user message, behind a system message if there is one."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]
