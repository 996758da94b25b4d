"""jaxvllm chat: with an engine and with a server, through pipes and under Ctrl-C."""

import io
import os
import signal
import subprocess
import sys

import pytest

from jaxvllm import cli
from jaxvllm.engine import Engine
from jaxvllm.engine_args import EngineArgs
from jaxvllm.llm_engine import LLMEngine
from jaxvllm.sse import DONE, EventReader
from tests.bench.fake_server import running


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(EngineArgs, "executor", "tests.engine.fake_executor:successor")
    monkeypatch.setenv("JAXVLLM_MULTIPROCESS", "0")


@pytest.fixture
def conversations(monkeypatch):
    """What the engine was asked, one list of (role, content) an answer."""
    seen = []
    render = Engine.render_chat

    def spy(self, messages, **args):
        seen.append([(message["role"], message["content"]) for message in messages])
        return render(self, messages, **args)

    monkeypatch.setattr(Engine, "render_chat", spy)
    return seen


def chat(monkeypatch, text: str, *args: str) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    return cli.main(["chat", *args])


def with_engine(folder) -> tuple[str, ...]:
    return ("--model", str(folder), "--device", "cpu", "--max-tokens", "3")


def test_history_is_kept_and_reset_forgets_all_but_the_system_message(model_folder, monkeypatch, capsys, conversations):
    text = "one\n/help\ntwo\n/reset\nthree\n/exit\nfour\n"
    assert chat(monkeypatch, text, *with_engine(model_folder), "--system", "short") == 0
    captured = capsys.readouterr()
    assert captured.out == ";<=\n" * 3 and "/reset starts over" in captured.err
    start, a = ("system", "short"), ("assistant", ";<=")
    assert conversations == [
        [start, ("user", "one")],
        [start, ("user", "one"), a, ("user", "two")],
        [start, ("user", "three")],
    ]


def test_a_conversation_too_long_is_said_and_the_next_one_works(model_folder, monkeypatch, capsys, conversations):
    args = (*with_engine(model_folder), "--max-model-len", "40")
    assert chat(monkeypatch, "x" * 100 + "\nok\n", *args) == 1
    captured = capsys.readouterr()
    assert captured.out == ";<=\n" and "40" in captured.err and captured.err.startswith("jaxvllm: error: ")
    assert conversations[1] == [("user", "ok")]


def test_quick_answers_once(model_folder, monkeypatch, capsys):
    assert chat(monkeypatch, "never read\n", *with_engine(model_folder), "-q", "hi") == 0
    assert capsys.readouterr().out == ";<=\n"


def test_server_gets_history_and_sampling(monkeypatch, capsys):
    with running(ttft_s=0.0, itl_s=0.0, text="日本é🙂") as server:
        args = ("--url", server.url + "/v1", "--api-key", "k", "--temperature", "0.5", "--max-tokens", "2")
        assert chat(monkeypatch, "grüß\nzwei\n", *args, "--system-prompt", "s") == 0
    assert capsys.readouterr().out == "日本é🙂日本é🙂\n" * 2
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["s", "grüß", "日本é🙂" * 2, "zwei"]
    assert server.bodies[0]["temperature"] == 0.5 and server.bodies[0]["model"] == "fake"
    assert server.headers[0]["authorization"] == "Bearer k"


def test_a_refusing_server_is_quoted_and_the_chat_goes_on(monkeypatch, capsys):
    with running(ttft_s=0.0, itl_s=0.0, fail_from=0) as server:
        assert chat(monkeypatch, "a\nb\n", "--url", server.url) == 1
    assert capsys.readouterr().err == "jaxvllm: error: the server answers 400: too much\n" * 2
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "no server's models there"),
        (["--url", "http://x", "--model", "m"], "--model is for an engine"),
        (["--model-name", "m"], "--model-name is for a server"),
        (["--url", "http://x", "--top-p", "7"], "top_p=7.0"),
    ],
)
def test_bad_options_are_one_line(monkeypatch, capsys, args, message):
    assert chat(monkeypatch, "a\n", *args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxvllm: error: ") and message in line


def test_bytes_that_are_no_text_end_nothing(model_folder, monkeypatch, capsys, conversations):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\xe2\x82\nb\n"), encoding="utf-8"))
    assert cli.main(["chat", *with_engine(model_folder)]) == 0
    assert conversations[0][-1] == ("user", "a��") and len(conversations) == 2


# A shell starts background jobs with SIGINT ignored, and their children inherit that.
INTERRUPTIBLE_CLI = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxvllm.cli import main
sys.exit(main())
"""


def test_interrupt_stops_the_answer_and_not_the_program():
    with running(ttft_s=0.0, itl_s=0.05, text="x", default_tokens=1000) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE_CLI, "chat", "--url", server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(b"one\n")
            process.stdin.flush()
            assert process.stdout.read(3) == b"xxx"
            process.send_signal(signal.SIGINT)
            server.default_tokens = 2
            out, err = process.communicate(b"two\n", timeout=30)
        finally:
            process.kill()
    first, second = out.decode().splitlines()
    assert set(first) <= {"x"} and len(first) < 990 and second == "xx"
    assert process.returncode == 0 and not err
    said = server.bodies[1]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "user"]
    assert said[1]["content"] == "xxx" + first


def test_interrupt_frees_the_request_of_the_engine(model_folder, monkeypatch, capsys):
    plain, calls = LLMEngine.step, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(self)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    assert chat(monkeypatch, "one\ntwo\n", *with_engine(model_folder)) == 0
    assert capsys.readouterr().out == ";\n;<=\n"
    assert not calls[0].has_unfinished_requests()


def test_events_may_be_cut_anywhere():
    text = ': ping\r\n\r\ndata: {"a": "é"}\n\ndata:{"b": 1}\r\n\r\nevent: x\ndata: [DONE]\n\n'.encode()
    for cut in range(len(text)):
        reader = EventReader()
        assert [*reader.push(text[:cut]), *reader.push(text[cut:])] == [{"a": "é"}, {"b": 1}, DONE]
