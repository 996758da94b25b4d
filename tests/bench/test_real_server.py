"""What `bench serve` and `chat` say of a real server process, and what the server's metrics say of them, agree."""

import io

import pytest

from jaxvllm import cli
from tests.bench.test_serve import figure
from tests.engine.conftest import write_model
from tests.engine.test_metrics import samples
from tests.server.process import running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    with running_server(folder, "slow_5ms", "--served-model-name", "m", "--max-num-seqs", "16") as server:
        yield server


def bench(server, *args: str) -> int:
    return cli.main(["bench", "serve", "--base-url", server.url, "--disable-tqdm", "--ignore-eos", *args])


def test_counts_and_times_are_those_of_the_servers_metrics(server, capsys):
    before = samples(server.get("/metrics").body)
    sizes = ("--random-input-len", "30", "--random-output-len", "12", "--num-prompts", "9", "--request-rate", "30")
    assert bench(server, *sizes) == 0
    out, after = capsys.readouterr().out, samples(server.get("/metrics").body)

    def grown(*name: str) -> float:
        return after[name] - before[name]

    num_sent = 9 + 1  # the test run before
    assert figure(out, "Successful requests") == 9 and figure(out, "Failed requests") == 0
    assert figure(out, "Total input tokens") == 270 and grown("vllm:prompt_tokens_total") == 30 * num_sent
    assert figure(out, "Total generated tokens") == 108 and grown("vllm:generation_tokens_total") == 12 * num_sent
    assert grown("vllm:request_success_total", "length") == num_sent
    assert grown("vllm:inter_token_latency_seconds_count") == 11 * num_sent
    # 11 steps of 5 ms behind the first token as the core sees it, 12 behind the request as the client does.
    assert grown("vllm:inter_token_latency_seconds_sum") >= 0.005 * 11 * num_sent
    assert figure(out, "Median E2EL (ms)") >= 60
    assert 1000 * grown("vllm:time_to_first_token_seconds_sum") / num_sent >= 5
    assert after["vllm:num_requests_running",] == after["vllm:num_requests_waiting",] == 0
    assert after["jaxvllm:step_wait_time_seconds_sum",] > 11 * 0.005


@pytest.mark.parametrize("options", [("--backend", "openai-chat"), ("--dataset-name", "sonnet")])
def test_text_loads_use_the_servers_tokenizer(server, capsys, options):
    lengths = ("--random-input-len", "20", "--random-output-len", "3", "--sonnet-input-len", "300")
    more = ("--sonnet-prefix-len", "100", "--sonnet-output-len", "3", "--num-prompts", "3")
    assert bench(server, *options, *lengths, *more) == 0
    assert figure(capsys.readouterr().out, "Total generated tokens") == 9


def test_chat_with_it(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nthere\n"))
    assert cli.main(["chat", "--url", server.url, "--max-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == ";<=\n;<=\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 3000 + "\nhello\n"))
    assert cli.main(["chat", "--url", server.url, "--max-tokens", "3", "--temperature", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ";<=\n" and "the server answers 400" in captured.err
