"""jaxvllm bench throughput and latency over a scripted executor."""

import json
import re

import numpy as np
import pytest

from jaxvllm import cli
from jaxvllm.bench import offline
from jaxvllm.engine_args import EngineArgs
from tests.engine.conftest import write_model
from tests.engine.fake_executor import SuccessorExecutor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(EngineArgs, "executor", "tests.engine.fake_executor:slow")
    monkeypatch.setenv("JAXVLLM_MULTIPROCESS", "0")


def bench(folder, command: str, *args: str) -> int:
    return cli.main(["bench", command, *args, "--model", str(folder), "--device", "cpu"])


def test_throughput_is_tokens_over_time(folder, tmp_path, capsys):
    path = tmp_path / "out.json"
    sizes = ("--num-prompts", "6", "--input-len", "30", "--output-len", "10")
    assert bench(folder, "throughput", *sizes, "--output-json", str(path)) == 0
    out = capsys.readouterr().out
    requests, total, output = map(float, re.findall(r"([\d.]+) (?:requests|total tokens|output tokens)/s", out))
    assert "Total num prompt tokens:  180\nTotal num output tokens:  60\n" in out
    figures = json.loads(path.read_text())
    assert figures["elapsed_time"] >= 10 * 0.02  # a step takes 20 ms
    assert requests == pytest.approx(6 / figures["elapsed_time"], abs=0.01)
    assert total == pytest.approx(240 / figures["elapsed_time"], abs=0.01)
    assert output == pytest.approx(60 / figures["elapsed_time"], abs=0.01)


def test_throughput_of_a_trace_and_of_sonnets(folder, tmp_path, capsys):
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,30,4\n2023-11-16 18:15:47,900,900\n"
    )
    assert bench(folder, "throughput", "--trace", str(tmp_path / "t.csv"), "--trace-max-tokens", "1000") == 0
    out = capsys.readouterr().out
    assert "1 requests, 1 left out" in out and "Total num output tokens:  4" in out
    sizes = ("--num-prompts", "2", "--input-len", "300", "--output-len", "3")
    assert bench(folder, "throughput", "--dataset-name", "sonnet", *sizes) == 0
    num_prompt = int(re.findall(r"prompt tokens:  (\d+)", capsys.readouterr().out)[0])
    assert 400 < num_prompt <= 600


def test_latency_is_the_time_of_a_batch(folder, tmp_path, capsys):
    path = tmp_path / "out.json"
    sizes = ("--batch-size", "3", "--input-len", "20", "--output-len", "5", "--n", "2")
    iterations = ("--num-iters", "4", "--num-iters-warmup", "1")
    assert bench(folder, "latency", *sizes, *iterations, "--output-json", str(path)) == 0
    figures = json.loads(path.read_text())
    assert len(figures["latencies"]) == 4 and all(0.1 <= latency < 1 for latency in figures["latencies"])
    assert figures["avg_latency"] == pytest.approx(np.mean(figures["latencies"]))
    assert figures["percentiles"]["50"] == pytest.approx(np.median(figures["latencies"]))
    out = capsys.readouterr().out
    assert f"Avg latency: {figures['avg_latency']} seconds" in out and "99% percentile latency: " in out


def test_times_that_are_the_compilers_too_are_called_so(folder, capsys, monkeypatch):
    monkeypatch.setattr(SuccessorExecutor, "metrics", lambda self: {"late_compiles_total": float(self._num_steps > 5)})
    for num_warmup, warns in ((0, True), (1, False)):
        iterations = ("--num-iters", "1", "--num-iters-warmup", str(num_warmup), "--batch-size", "1")
        assert bench(folder, "latency", *iterations, "--output-len", "9") == 0
        assert ("1 programs were compiled while this was timed" in capsys.readouterr().err) == warns
    assert bench(folder, "throughput", "--num-prompts", "1", "--input-len", "9", "--output-len", "9") == 0
    assert "1 programs were compiled while this was timed" in capsys.readouterr().err


def test_bad_sizes_are_one_line(folder, capsys):
    assert bench(folder, "latency", "--batch-size", "0") == 1
    assert "--batch-size 0 must be at least 1" in capsys.readouterr().err
    assert bench(folder, "latency", "--num-iters-warmup", "-1") == 1
    assert "--num-iters-warmup -1 must be at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_answers_that_the_context_would_cut_are_refused(folder, capsys, command):
    assert bench(folder, command, "--input-len", "1000", "--output-len", "25") == 1
    message = "a prompt of 1000 tokens and 25 of output exceed max_model_len=1024"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.csv", None, "missing.csv"),
        ("t.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,30\n", "t.csv, request 1: "),
        ("t.jsonl", "", "t.jsonl has no request."),
    ],
)
def test_a_trace_that_cannot_be_read_is_named_before_the_engine_starts(
    folder, tmp_path, monkeypatch, capsys, name, text, message
):
    monkeypatch.setattr(offline, "_make_engine", lambda args: pytest.fail("it began"))
    if text is not None:
        (tmp_path / name).write_text(text)
    assert bench(folder, "throughput", "--trace", str(tmp_path / name)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_file_that_cannot_be_written_is_named_before_the_engine_starts(
    folder, tmp_path, monkeypatch, capsys, command
):
    monkeypatch.setattr(offline, "_make_engine", lambda args: pytest.fail("it began"))
    assert bench(folder, command, "--output-json", str(tmp_path)) == 1
    assert f"--output-json {tmp_path} cannot be written" in capsys.readouterr().err
