"""`jaxvllm serve MODEL`: the options of the server, with vLLM's names."""

import argparse
import json
import ssl
from typing import Any

from jaxvllm.chat import read_chat_template
from jaxvllm.cli_args import add_engine_options, flag, given_engine_args, json_object
from jaxvllm.config import DEFAULT_STEP_TIMEOUT_S, api_key_from_environment
from jaxvllm.engine_args import EngineArgs
from jaxvllm.interrupt import immediate_interrupt
from jaxvllm.server.config import DEFAULT_MAX_REQUEST_BYTES, ServerConfig
from jaxvllm.tool_parsers import get_tool_parser
from jaxvllm.vllm_args import NOT_BUILT

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
# Options of vLLM's server that are not built, with the value that asks for nothing.
_REFUSED: dict[str, Any] = {
    "lora_modules": None,
    "tool_parser_plugin": "",
    "tool_server": None,
    "log_config_file": None,
    "max_log_len": None,
    "enable_per_request_metrics": False,
    "enable_tokenizer_info_endpoint": False,
    "enable_log_outputs": False,
    "enable_log_deltas": True,
    "log_error_stack": False,
    "enable_ssl_refresh": False,
    "h11_max_incomplete_event_size": None,
    "h11_max_header_count": None,
    "enable_offline_docs": False,
    "enable_flash_late_interaction": True,
    "disable_frontend_multiprocessing": False,
    "headless": False,
    "api_server_count": 1,
    "grpc": False,
    "config": None,
    "fingerprint_mode": "none",
    "fingerprint_value": None,
}
_HERE = ("served_model_name", "shutdown_timeout")  # of vLLM's engine options, those that the server applies


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `jaxvllm`."""
    parser = commands.add_parser("serve", help="serve a model over HTTP, with OpenAI's API")
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="as --model")
    _add_address_options(parser.add_argument_group("address"))
    _add_api_options(parser.add_argument_group("API"))
    _add_log_options(parser.add_argument_group("log"))
    engine = parser.add_argument_group("engine")
    add_engine_options(engine, leave_out=("chat_template", "disable_log_stats"))
    engine.add_argument("-tp", dest="tensor_parallel_size", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    engine.add_argument(
        "--skip-tokenizer-init", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
        help="no tokenizer is loaded: prompts are token ids, and so are answers (return_token_ids)",
    )  # fmt: skip
    engine.add_argument("--disable-log-stats", action="store_true", help="no line of statistics every 10 seconds")
    engine.add_argument(
        "--step-timeout", type=float, default=DEFAULT_STEP_TIMEOUT_S, metavar="SECONDS",
        help="a core that ends no step for so long is taken for dead",
    )  # fmt: skip
    engine.add_argument("--restart-engine", action="store_true", help="start a new core in the place of a dead one")
    _add_refused_options(parser)
    parser.set_defaults(run=_run)


def _add_address_options(group: Any) -> None:
    group.add_argument("--host", help=f"address to listen on (default: {DEFAULT_HOST}; 0.0.0.0: all)")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0: any that is free (default: {DEFAULT_PORT})")
    group.add_argument("--uds", metavar="PATH", help="Unix socket in the place of host and port")
    group.add_argument("--root-path", default="", help="path under which a proxy mounts the server")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="key of the server's certificate")
    group.add_argument("--ssl-certfile", metavar="FILE", help="the server's certificate")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities that may sign certificates of clients")
    group.add_argument(
        "--ssl-cert-reqs", type=int, choices=[*map(int, ssl.VerifyMode)], default=int(ssl.CERT_NONE),
        help="2: clients need a certificate",
    )  # fmt: skip
    group.add_argument("--ssl-ciphers", help="cipher suites for TLS 1.2 and below")
    group.add_argument("--allowed-origins", type=_json_list, default=("*",), metavar="JSON", help="of browsers: CORS")
    group.add_argument("--allowed-methods", type=_json_list, default=("*",), metavar="JSON", help="CORS")
    group.add_argument("--allowed-headers", type=_json_list, default=("*",), metavar="JSON", help="CORS")
    group.add_argument("--allow-credentials", action="store_true", help="CORS")
    group.add_argument("--middleware", action="append", default=[], metavar="PATH", help="import path of a middleware")
    group.add_argument(
        "--shutdown-timeout", type=float, default=0.0, metavar="SECONDS",
        help="how long running requests may go on after SIGTERM or a first Ctrl-C (default: 0, they are aborted)",
    )  # fmt: skip


def _add_api_options(group: Any) -> None:
    group.add_argument("--api-key", nargs="+", action="extend", metavar="KEY", help="clients must show one of these")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names of the model for clients")
    group.add_argument(
        "--max-request-bytes", type=int, default=DEFAULT_MAX_REQUEST_BYTES, help="largest body of a request"
    )
    group.add_argument("--chat-template", help="Jinja text, or a file of it, in the place of the model's own")
    group.add_argument("--chat-template-content-format", choices=["auto", "string"], default="auto")
    group.add_argument("--trust-request-chat-template", action="store_true", help="take templates from requests, too")
    group.add_argument(
        "--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON", help="template variables"
    )
    group.add_argument("--response-role", default="assistant", help="role of answers")
    group.add_argument("--enable-auto-tool-choice", action="store_true", help="the model may choose to call tools")
    group.add_argument("--tool-call-parser", metavar="NAME", help="how the model writes calls: hermes, llama3_json")
    group.add_argument("--exclude-tools-when-tool-choice-none", action="store_true")
    group.add_argument("--enable-prompt-tokens-details", action="store_true", help="usage tells the cached tokens")
    group.add_argument("--enable-force-include-usage", action="store_true", help="every stream ends with usage")
    group.add_argument("--return-tokens-as-token-ids", action="store_true", help='logprobs name tokens "token_id:17"')
    group.add_argument("--enable-request-id-headers", action="store_true", help="answers carry X-Request-Id")
    group.add_argument("--enable-server-load-tracking", action="store_true", help="has no effect: /load always counts")
    group.add_argument("--disable-fastapi-docs", action="store_true", help="has no effect: there are none")


def _add_log_options(group: Any) -> None:
    levels = ["critical", "error", "warning", "info", "debug", "trace"]
    group.add_argument("--uvicorn-log-level", choices=levels, default="info")
    group.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each request")
    group.add_argument(
        "--disable-access-log-for-endpoints", metavar="PATHS", help="comma-separated paths without such lines"
    )


def _add_refused_options(parser: argparse.ArgumentParser) -> None:
    """vLLM's other options are known, so that each is refused by its own name unless it asks for the default."""
    taken = {action.dest for action in parser._actions}
    for name, default in {**NOT_BUILT, **_REFUSED}.items():
        if name not in taken and name not in _HERE:
            how: dict[str, Any] = {"type": _value, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            if isinstance(default, bool):
                how = {"action": argparse.BooleanOptionalAction} | {key: how[key] for key in ("default", "help")}
            parser.add_argument(flag(name), **how)


def _run(args: argparse.Namespace) -> int:
    refuse_options(args)
    engine_args = engine_args_of(args)
    config = server_config(args)
    try:
        with immediate_interrupt():
            from jaxvllm.server.run import serve
    except ImportError as error:
        raise ImportError(
            f"the server needs the extra 'server' ({error}): `uv run --extra server jaxvllm serve ...` in a clone, or "
            "pip install '.[server]' there."
        ) from error
    return serve(args, engine_args, config)


def refuse_options(args: argparse.Namespace) -> None:
    """Raises: NotImplementedError, ValueError for an option that is not built or two that contradict each other."""
    for name, default in _REFUSED.items():
        value = getattr(args, name, default)
        if value != default:
            raise NotImplementedError(f"{flag(name)} {value!r} is not supported: leave it out.")
    if args.enable_auto_tool_choice != (args.tool_call_parser is not None):
        raise ValueError("--enable-auto-tool-choice and --tool-call-parser need each other: give both.")
    if args.tool_call_parser is not None:
        get_tool_parser(args.tool_call_parser)
    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ValueError("--ssl-keyfile and --ssl-certfile need each other: give both.")
    for name in ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
        if getattr(args, name) and args.ssl_certfile is None:
            raise ValueError(f"{flag(name)} has no effect on plain HTTP: give --ssl-keyfile and --ssl-certfile, too.")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} must be in [0, 65535].")
    for name in ("shutdown_timeout", "step_timeout", "max_request_bytes"):
        value, least = getattr(args, name), 0 if name == "shutdown_timeout" else 1
        if not value >= least:  # nan, too
            raise ValueError(f"{flag(name)} {value} must be at least {least}.")


def engine_args_of(args: argparse.Namespace) -> EngineArgs:
    """The engine's part of the command line.

    Raises: as EngineArgs.
    """
    given = given_engine_args(args)
    tag = args.model_tag
    if tag is not None and given.get("model", tag) != tag:
        raise ValueError(f"MODEL {tag!r} and --model {given['model']!r} differ: give one of them.")
    model = tag if tag is not None else given.get("model")
    given |= {name: getattr(args, name) for name in NOT_BUILT if name not in _HERE and hasattr(args, name)}
    given |= {"chat_template": args.chat_template, "disable_log_stats": args.disable_log_stats}
    given.pop("model", None)
    return EngineArgs(model, **given)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server's part of the command line.

    Raises: ValueError for a chat template that is neither file nor text.
    """
    model = args.model_tag or getattr(args, "model", None) or "SmolLM2-135M-Instruct"
    same = (
        "max_request_bytes",
        "trust_request_chat_template",
        "default_chat_template_kwargs",
        "response_role",
        "tool_call_parser",
        "exclude_tools_when_tool_choice_none",
        "enable_prompt_tokens_details",
        "enable_force_include_usage",
        "return_tokens_as_token_ids",
        "enable_request_id_headers",
        "allowed_origins",
        "allowed_methods",
        "allowed_headers",
        "allow_credentials",
        "root_path",
    )
    return ServerConfig(
        served_model_names=tuple(args.served_model_name or (model,)),
        api_keys=tuple(args.api_key or filter(None, [api_key_from_environment()])),
        chat_template=read_chat_template(args.chat_template),
        middleware=tuple(args.middleware),
        **{name: getattr(args, name) for name in same},
    )


def _value(text: str) -> Any:
    """An option's value as JSON if it is some, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_list(text: str) -> tuple[str, ...]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}.") from error
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON list of strings.")
    return tuple(value)
