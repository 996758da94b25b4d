"""`jaxvllm serve`: each of vLLM's options is applied or refused by its name."""

import http.client
import json
import socket
from dataclasses import fields

import pytest

from jaxvllm import cli
from jaxvllm.engine_args import EngineArgs
from jaxvllm.server.cli import engine_args_of, refuse_options, server_config
from jaxvllm.server.config import ServerConfig
from jaxvllm.vllm_args import NOT_BUILT
from tests.engine.conftest import write_model
from tests.server.process import running_server


def parse(*options: str):
    return cli._parser().parse_args(["serve", *options])


def test_options_reach_the_engine_and_the_server():
    args = parse(
        *("some/model", "--max-model-len", "8k", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"),
        *("--gpu-memory-utilization", "0.5", "--dtype", "bfloat16", "--enable-prefix-caching", "-tp", "2"),
        *("--served-model-name", "a", "b", "--api-key", "k1", "k2", "--api-key", "k3", "--root-path", "/api"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--allowed-origins", '["https://x"]'),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--chat-template", "{{ messages }}"),
        *("--logits-processors", "a:b", "c:d", "--disable-log-stats"),
    )
    refuse_options(args)
    engine, server = engine_args_of(args), server_config(args)
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("some/model", 8000, 64)
    assert (engine.max_num_batched_tokens, engine.gpu_memory_utilization, engine.dtype) == (2048, 0.5, "bfloat16")
    assert (engine.enable_prefix_caching, engine.tensor_parallel_size, engine.disable_log_stats) == (True, 2, True)
    assert engine.logits_processors == ["a:b", "c:d"]
    assert (server.served_model_names, server.api_keys, server.root_path) == (("a", "b"), ("k1", "k2", "k3"), "/api")
    assert (server.tool_call_parser, server.allowed_origins) == ("hermes", ("https://x",))
    assert server.default_chat_template_kwargs == {"enable_thinking": False}
    assert server.chat_template == "{{ messages }}"


def test_defaults_are_vllms_with_statistics_and_without_a_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    args = parse("some/model")
    assert engine_args_of(args) == EngineArgs("some/model", disable_log_stats=False)
    assert server_config(args) == ServerConfig(("some/model",))
    assert (args.port, args.host) == (8000, None)


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "from-there")
    assert server_config(parse("m")).api_keys == ("from-there",)
    assert server_config(parse("m", "--api-key", "given")).api_keys == ("given",)


@pytest.mark.parametrize("name", sorted(set(NOT_BUILT) - {"served_model_name", "shutdown_timeout"}))
def test_every_engine_option_of_vllm_that_is_not_built_is_refused_by_name(name):
    default = NOT_BUILT[name]
    option = "--" + name.replace("_", "-")
    given = [option] if default is False else [f"--no-{option[2:]}"] if default is True else [option, "17171"]
    with pytest.raises(NotImplementedError, match=name):
        engine_args_of(parse("m", *given))
    if default is None or isinstance(default, bool):
        return
    assert engine_args_of(parse("m", option, json.dumps(default))).model == "m", (
        "what asks for the default is not refused"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora-modules", "a=b"], "--lora-modules"),
        (["--headless"], "--headless"),
        (["--api-server-count", "2"], "--api-server-count"),
        (["--tool-call-parser", "hermes"], "--enable-auto-tool-choice"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "klingon"], "klingon"),
        (["--ssl-keyfile", "x"], "--ssl-certfile"),
        (["--ssl-keyfile", "/no/such.key", "--ssl-certfile", __file__], "'/no/such.key'"),
        (["--ssl-keyfile", __file__, "--ssl-certfile", __file__], "--ssl-certfile"),
        (["--ssl-ca-certs", __file__], "--ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-certfile"),
        (["--port", "70000"], "--port"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1.0 must be at least 0"),
        (["--model", "other"], "differ"),
        (["--chat-template", "/no/such/file"], "chat_template"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--no-multiprocess"], "multiprocess"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1:8000"),
        (["--middleware", "json.nothing"], "json.nothing"),
        (["--middleware", "no_such_module.Nothing"], "no_such_module.Nothing"),
    ],
)
def test_errors_are_one_line_and_status_1(model_folder, capsys, options, words):
    port = [] if {"--port", "--host"} & set(options) else ["--port", "0"]
    assert cli.main(["serve", str(model_folder), "--device", "cpu", *port, *options]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jaxvllm: error: ") and words in error


@pytest.mark.parametrize(
    "options", [["--max-model-len", "x"], ["--no-such-option"], ["--allowed-origins", "x"], ["--ssl-cert-reqs", "7"]]
)
def test_what_no_option_allows_is_status_2(options, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("m", *options)
    assert ended.value.code == 2 and options[0] in capsys.readouterr().err


def test_every_engine_argument_has_an_option():
    known = vars(parse("m")).keys() | {a.dest for a in cli._parser()._actions}
    options = cli._parser()._subparsers._group_actions[0].choices["serve"]._option_string_actions
    hidden = {"executor"}
    for field in fields(EngineArgs):
        assert "--" + field.name.replace("_", "-") in options or field.name in hidden, (field.name, known)


def test_defaults_of_requests_can_be_overridden(model_folder):
    with running_server(model_folder, "successor", "--override-generation-config", '{"max_new_tokens": 3}') as server:
        assert server.post("/v1/completions", {"prompt": "A"}).json()["choices"][0]["text"] == "BCD"


def test_max_new_tokens_is_a_limit_where_the_operator_chose_it_and_a_default_where_the_model_did(tmp_path):
    folder = write_model(tmp_path, generation_config={"max_new_tokens": 3})
    own, chosen = ["--generation-config", "auto"], ["--generation-config", str(folder)]
    overridden = ["--override-generation-config", '{"max_new_tokens": 4}']
    for options, expected in ((own, (3, 6, 2)), (chosen, (3, 3, 2)), (overridden, (4, 4, 2))):
        with running_server(folder, "successor", *options) as server:
            for max_tokens, num_tokens in zip((None, 6, 2), expected, strict=True):
                body = {"prompt": "A", "max_tokens": max_tokens}
                chat = {"messages": [{"role": "user", "content": "A"}], "max_tokens": max_tokens}
                for path, request in (("/v1/completions", body), ("/v1/chat/completions", chat)):
                    answer = server.post(path, request).json()
                    assert answer["usage"]["completion_tokens"] == num_tokens, (options, path, max_tokens)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def test_unix_socket_request_ids_usage_and_quiet_paths(model_folder, tmp_path):
    path = str(tmp_path / "socket")
    options = ("--uds", path, "--enable-request-id-headers", "--enable-force-include-usage")
    quiet = ("--disable-access-log-for-endpoints", "/health,/ping", "--allowed-origins", '["https://a"]')
    with running_server(model_folder, "successor", *options, *quiet) as server:
        assert server.port == 0, "nothing else is listened on"

        def request(method: str, route: str, body: dict | None = None, **headers: str):
            connection = _UnixConnection(path)
            raw = json.dumps(body).encode() if body else None
            connection.request(method, route, raw, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.read(), {name.lower(): value for name, value in response.headers.items()}

        headers = {"X-Request-Id": "mine", "Origin": "https://a"}
        body, got = request("POST", "/v1/completions", {"prompt": "A", "max_tokens": 1, "request_id": "a"}, **headers)
        assert (json.loads(body)["id"], got["x-request-id"]) == ("cmpl-mine", "mine")
        assert got["access-control-allow-origin"] == "https://a"
        _, got = request("GET", "/health", Origin="https://b")
        assert "access-control-allow-origin" not in got and got["x-request-id"]
        stream, _ = request("POST", "/v1/completions", {"prompt": "A", "max_tokens": 1, "stream": True})
        assert b'"usage":{"prompt_tokens":1' in stream


def test_a_server_without_a_tokenizer_takes_and_gives_token_ids(tmp_path):
    folder = write_model(tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with running_server(folder, "successor", "--skip-tokenizer-init") as server:
        body = {"prompt": [65, 66], "max_tokens": 3, "return_token_ids": True}
        [choice] = server.post("/v1/completions", body).json()["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [67, 68, 69])
        events = server.stream("/v1/completions", body)
        assert [i for event in events for i in event["choices"][0]["token_ids"]] == [67, 68, 69]
        for path, fields in (
            ("completions", {"prompt": "A"}),
            ("completions", body | {"echo": True}),
            ("completions", body | {"stop": "x"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "A"}]}),
        ):
            error = server.post(f"/v1/{path}", fields).error()
            assert error["code"] == 400 and "tokenizer" in error["message"]
        server.wait_until_idle()
