"""The command line over a scripted executor."""

import io
import signal
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxvllm import cli, cli_args
from jaxvllm.bucket_choice import STRATEGIES
from jaxvllm.engine_args import EngineArgs


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(EngineArgs, "executor", "tests.engine.fake_executor:successor")
    monkeypatch.setenv("JAXVLLM_MULTIPROCESS", "0")


def run(model_folder, command: str, *args: str) -> int:
    return cli.main([command, *args, "--model", str(model_folder), "--device", "cpu", "--max-tokens", "3"])


def test_generate_answers_through_the_chat_template_and_raw_completes(model_folder, capsys):
    assert run(model_folder, "generate", "hi") == 0
    assert run(model_folder, "generate", "--raw", "A") == 0
    captured = capsys.readouterr()
    assert captured.out == ";<=\nBCD\n"
    assert "Processed prompts: 100%" in captured.err


def test_progress_bar_can_be_switched_off(model_folder, capsys):
    assert run(model_folder, "generate", "--raw", "A", "--no-progress") == 0
    assert "Processed prompts" not in capsys.readouterr().err


def test_bad_sampling_option_is_refused_before_the_model_is_loaded(capsys):
    assert cli.main(["generate", "A", "--model", "/nowhere/at/all", "--top-p", "7"]) == 1
    assert "top_p=7.0" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == version("jaxvllm")


def test_help_has_a_word_for_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--help"])
    assert ended.value.code == 0 and "--temperature" in capsys.readouterr().out
    assert all(strategy in cli_args.ENGINE_HELP["bucket_policy"] for strategy in STRATEGIES)
    assert cli_args.ENGINE_HELP.keys() == {f.name for f in fields(EngineArgs)} - set(cli_args.NO_OPTION)


def test_several_prompts_are_told_apart(model_folder, capsys):
    assert run(model_folder, "generate", "--raw", "A", "K") == 0
    assert capsys.readouterr().out == ">>> A\nBCD\n>>> K\nLMN\n"


def test_chat_answers_line_by_line_until_the_end_of_input(model_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nthere\n"))
    assert run(model_folder, "chat", "--system", "short") == 0
    assert capsys.readouterr().out == ";<=\n;<=\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs=0 must be at least 1"),
        (["--temperature", "-1"], "temperature=-1.0 must not be negative"),
        (["--raw", "--system", "x"], "--system needs a chat template"),
        (["--tokenizer", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_errors_are_one_line_and_status_1(model_folder, capsys, args, message):
    assert run(model_folder, "generate", "A", *args) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jaxvllm: error: ") and message in error


INTERRUPTED_IMPORT = """
import contextlib, os, signal, sys
from jaxvllm.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.exit(main(["serve", "/nowhere/at/all"]))
"""


@pytest.mark.parametrize("module", ["jaxvllm.bench.cli", "uvicorn"])
def test_ctrl_c_ends_a_command_that_is_still_importing_even_where_an_import_would_ignore_it(module):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
