"""jaxvllm bench serve against a server whose times are known."""

import json
import re

import numpy as np
import pytest

from jaxvllm import cli
from jaxvllm.bench.client import RequestResult
from jaxvllm.bench.report import make_report, parse_goodput, table, to_json
from tests.bench.fake_server import running

SMALL = ("--random-input-len", "9", "--random-output-len", "5", "--disable-tqdm")


def bench(server, *args: str) -> int:
    return cli.main(["bench", "serve", "--base-url", server.url, "--ready-check-timeout-sec", "0", *args])


def figure(text: str, words: str) -> float:
    table = text[text.index("Serving Benchmark Result") :]
    (value,) = re.findall(rf"^{re.escape(words)}:\s+([\d.]+)\s*$", table, re.MULTILINE)
    return float(value)


def test_times_of_the_server_are_found_again(capsys, tmp_path):
    with running(ttft_s=0.2, itl_s=0.05) as server:
        args = ("--num-prompts", "6", "--save-result", "--result-dir", str(tmp_path), "--label", "x")
        assert bench(server, *SMALL, *args, "--metadata", "gpu=none", "--ignore-eos") == 0
    text = capsys.readouterr().out
    assert figure(text, "Successful requests") == 6 and figure(text, "Failed requests") == 0
    assert figure(text, "Total input tokens") == 6 * 7  # as the server counts
    assert figure(text, "Total generated tokens") == 6 * 5
    for name, expected_ms in (("TTFT", 200), ("TPOT", 50), ("ITL", 50), ("E2EL", 400)):
        for word in ("Mean", "Median", "P99"):
            # A busy machine makes them longer; a gap is also shorter if the piece before it was late.
            least = 0.5 if name in ("TPOT", "ITL") else 0.98
            assert least * expected_ms <= figure(text, f"{word} {name} (ms)") < expected_ms + 150
    duration = figure(text, "Benchmark duration (s)")
    assert 0.39 <= duration < 0.9
    assert figure(text, "Request throughput (req/s)") == pytest.approx(6 / duration, rel=0.02)
    assert figure(text, "Output token throughput (tok/s)") == pytest.approx(30 / duration, rel=0.02)
    assert figure(text, "Total token throughput (tok/s)") == pytest.approx(72 / duration, rel=0.02)
    assert figure(text, "Peak concurrent requests") == 6
    assert text.count("=") > 60 and "Serving Benchmark Result" in text
    (file,) = tmp_path.iterdir()
    saved = json.loads(file.read_text())
    assert file.name.startswith("x-infqps-fake-")
    assert saved["completed"] == 6 and saved["gpu"] == "none" and saved["model_id"] == "fake"
    assert saved["mean_ttft_ms"] == pytest.approx(figure(text, "Mean TTFT (ms)"), abs=0.01)
    assert len(server.bodies) == 7  # the test run first
    assert server.bodies[0]["prompt"][::-1] in [body["prompt"] for body in server.bodies[1:]]
    for body in server.bodies[1:]:
        assert len(body["prompt"]) == 9 and body["max_tokens"] == 5 and body["ignore_eos"] is True
        assert body["temperature"] == 0.0 and body["stream"] is True and body["model"] == "fake"


def test_a_piece_of_several_tokens_counts_as_them(capsys):
    with running(ttft_s=0.1, itl_s=0.08, tokens_per_piece=4) as server:
        assert bench(server, *SMALL, "--num-prompts", "2", "--random-output-len", "9") == 0
    text = capsys.readouterr().out
    assert figure(text, "Total generated tokens") == 18
    itl_ms, tpot_ms = figure(text, "Mean ITL (ms)"), figure(text, "Mean TPOT (ms)")
    assert 40 <= itl_ms < 240 and tpot_ms == pytest.approx(itl_ms / 4, abs=0.01)  # 2 gaps between pieces for 8 tokens


def test_without_usage_pieces_are_counted(capsys):
    with running(ttft_s=0.0, itl_s=0.0, says_usage=False) as server:
        assert bench(server, *SMALL, "--num-prompts", "3") == 0
    text = capsys.readouterr().out
    assert figure(text, "Total input tokens") == 27 and figure(text, "Total generated tokens") == 15


def test_chat_sends_text_and_its_opening_is_no_token(capsys):
    with running(ttft_s=0.1, itl_s=0.03, says_usage=False) as server:
        assert bench(server, *SMALL, "--num-prompts", "2", "--backend", "openai-chat", "--api-key", "k") == 0
    assert figure(capsys.readouterr().out, "Total generated tokens") == 10
    for body, headers in zip(server.bodies, server.headers, strict=True):
        (message,) = body["messages"]
        assert message["role"] == "user" and len(message["content"]) == 9 and headers["authorization"] == "Bearer k"


def test_max_concurrency_is_kept(capsys):
    with running(ttft_s=0.05, itl_s=0.0) as server:
        assert bench(server, *SMALL, "--num-prompts", "9", "--max-concurrency", "3") == 0
    text = capsys.readouterr().out
    assert server.most_at_once == 3 == figure(text, "Peak concurrent requests")
    assert figure(text, "Benchmark duration (s)") >= 0.15
    assert figure(text, "Maximum request concurrency") == 3


def test_rate_spreads_the_requests(capsys):
    with running(ttft_s=0.0, itl_s=0.0) as server:
        assert bench(server, *SMALL, "--num-prompts", "20", "--request-rate", "40", "--burstiness", "100") == 0
    text = capsys.readouterr().out
    assert 0.5 <= figure(text, "Benchmark duration (s)") < 0.8
    assert figure(text, "Request rate configured (RPS)") == 40


def test_trace_is_sent_at_its_own_times_and_keeps_shared_blocks(capsys, tmp_path):
    trace = tmp_path / "t.jsonl"
    rows = [(0, 700, 3, [1, 2]), (10, 9000, 1, [9] * 18), (300, 1030, 2, [1, 2, 3]), (600, 600, 4, [5, 2])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    with running(ttft_s=0.0, itl_s=0.0, says_usage=False) as server:
        assert bench(server, "--trace", str(trace), "--trace-max-tokens", "2000", "--disable-tqdm") == 0
    text = capsys.readouterr().out
    assert "3 requests, 1 left out as too long" in text and "Traffic request rate: as recorded" in text
    assert 0.6 <= figure(text, "Benchmark duration (s)") < 0.9
    assert figure(text, "Total input tokens") == 700 + 1030 + 600
    a, b, c = (body["prompt"] for body in server.bodies[1:])
    assert a == b[:700] and a[:512] != c[:512] and a[512:600] == c[512:]
    assert [body["max_tokens"] for body in server.bodies[1:]] == [3, 2, 4]


def test_trace_at_a_rate_of_ours(capsys, tmp_path):
    trace = tmp_path / "t.csv"
    rows = ["2023-11-16 18:15:46.6805900,30,4", "2023-11-16 18:25:46.0,20,3", "2023-11-16 19:15:46.0,10,2"]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    with running(ttft_s=0.0, itl_s=0.0, says_usage=False) as server:
        args = ("--trace", str(trace), "--request-rate", "30", "--num-prompts", "2", "--disable-tqdm")
        assert bench(server, *args) == 0
    text = capsys.readouterr().out
    assert figure(text, "Benchmark duration (s)") < 2 and figure(text, "Total input tokens") == 50


def test_sonnets_share_a_prefix_and_have_the_length(capsys):
    with running(ttft_s=0.0, itl_s=0.0) as server:
        lengths = ("--sonnet-input-len", "120", "--sonnet-prefix-len", "60", "--sonnet-output-len", "2")
        assert bench(server, "--dataset-name", "sonnet", *lengths, "--num-prompts", "4", "--disable-tqdm") == 0
    prompts = [body["prompt"] for body in server.bodies[1:]]
    assert len(set(prompts)) == 4
    assert all(110 <= len(prompt.split()) <= 120 for prompt in prompts)
    shared = " ".join(prompts[0].split()[:50])
    assert all(" ".join(prompt.split()[:50]) == shared for prompt in prompts)


def test_failed_requests_are_counted_and_said(capsys):
    with running(ttft_s=0.0, itl_s=0.0, fail_from=4) as server:
        assert bench(server, *SMALL, "--num-prompts", "5") == 0
    captured = capsys.readouterr()
    assert figure(captured.out, "Successful requests") == 3 and figure(captured.out, "Failed requests") == 2
    assert captured.err.count("too much") == 1


def test_an_error_within_a_stream_is_a_failure(capsys):
    with running(ttft_s=0.0, itl_s=0.0, error_after=2) as server:
        assert bench(server, *SMALL, "--num-prompts", "5") == 1
    assert "initial test run failed" in (err := capsys.readouterr().err) and "the engine died" in err


def test_no_server_is_one_line(capsys):
    assert cli.main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0"]) == 1
    assert "the server does not answer" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--base-url", "localhost:1"]) == 1
    assert "models cannot be read" in capsys.readouterr().err


def test_who_waits_for_a_server_is_told_so_once(capsys):
    assert cli.main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "2.5"]) == 1
    assert capsys.readouterr().err.count("Waiting for up to 2.5 s (--ready-check-timeout-sec)") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--goodput", "itl:5"], "give ttft:MS"),
        (["--goodput", "ttft:x"], "give ttft:MS"),
        (["--percentile-metrics", "ttft,foo"], "give some of ttft,tpot,itl,e2el"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--num-prompts", "0"], "--num-prompts 0 must be at least 1"),
        (["--header", "x"], "must be KEY=VALUE"),
        (["--request-rate", "0"], "request_rate=0.0"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
        (["--trace", "/nowhere.txt"], "neither .csv"),
        (["--random-range-ratio", "1"], "random_range_ratio=1.0 must be in [0, 1)"),
    ],
)
def test_bad_options_are_one_line_before_the_server_is_asked(capsys, args, message):
    assert cli.main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0", *args]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jaxvllm: error: ") and message in error


@pytest.mark.parametrize(
    ("text", "message"), [("", "t.jsonl has no request."), ('{"timestamp": 1}\n', "t.jsonl, request 1: ")]
)
def test_a_trace_that_cannot_be_read_is_named_before_the_server_is_asked(capsys, tmp_path, text, message):
    (tmp_path / "t.jsonl").write_text(text)
    options = ("--port", "1", "--ready-check-timeout-sec", "0", "--trace", str(tmp_path / "t.jsonl"))
    assert cli.main(["bench", "serve", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--plot"], ["--save-result", "--result-filename"]])
def test_a_file_that_cannot_be_written_is_named_before_the_run(tmp_path, capsys, args):
    path = tmp_path / "missing" / "x"
    with running() as server:
        assert bench(server, *SMALL, *args, str(path)) == 1
        assert not server.bodies
    assert f"{path} cannot be written" in capsys.readouterr().err


def test_plot_is_a_png(tmp_path, capsys):
    path = tmp_path / "plot.png"
    with running(ttft_s=0.01, itl_s=0.001) as server:
        assert bench(server, *SMALL, "--num-prompts", "8", "--plot", str(path)) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000


def result(start, ttft, itls, tokens, error=None):
    return RequestResult(start, error, ttft, ttft + sum(itls), itls, 10, tokens)


RESULTS = [
    result(0.0, 0.1, [0.1, 0.3], 3),
    result(0.2, 0.2, [0.4], 3),  # two tokens in a piece
    result(0.6, 0.3, [], 1),
    result(0.1, 0.5, [9.0], 2, error="refused"),
]


def test_report_by_hand():
    report = make_report(RESULTS, 2.0, {"ttft": 250.0, "tpot": 201.0})
    assert (report.completed, report.failed) == (3, 1)
    assert (report.total_input, report.total_output) == (30, 7)
    assert report.request_throughput == 1.5 and report.output_throughput == 3.5 and report.total_throughput == 18.5
    np.testing.assert_allclose(report.samples_ms["ttft"], [100, 200, 300])
    np.testing.assert_allclose(report.samples_ms["tpot"], [200, 200])
    np.testing.assert_allclose(np.sort(report.samples_ms["itl"]), [100, 300, 400])
    np.testing.assert_allclose(report.samples_ms["e2el"], [500, 600, 300])
    assert report.max_output_tokens_per_s == 6  # at 0.1, 0.2, 0.5, 0.4, 0.8, 0.9
    assert report.max_concurrent_requests == 2
    assert report.request_goodput == pytest.approx(2 / 2.0)


def test_table_has_vllms_layout():
    report = make_report(RESULTS, 2.0, {"ttft": 250.0})
    text = table(report, rate=5.0, max_concurrency=4, metrics=["ttft", "itl"], percentiles=[50.0, 99.9])
    assert text.splitlines()[:4] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             4         ",
    ]
    assert "---------------Time to First Token----------------" in text
    assert "---------------Inter-token Latency----------------" in text and "TPOT" not in text
    assert figure(text, "Request goodput (req/s)") == 1.0
    assert figure(text, "P99.9 TTFT (ms)") == pytest.approx(299.8)
    assert text.endswith("=" * 50)


def test_json_has_vllms_keys():
    report = make_report(RESULTS, 2.0)
    saved = to_json(report, RESULTS, ["ttft"], [99.0], is_detailed=True)
    assert saved["median_ttft_ms"] == pytest.approx(200) and saved["p99_ttft_ms"] == pytest.approx(298)
    assert saved["std_ttft_ms"] == pytest.approx(np.std([100, 200, 300]))
    assert saved["errors"] == ["", "", "", "refused"] and saved["itls"][1] == [0.4]
    assert saved["input_lens"] == [10] * 4 and saved["output_lens"] == [3, 3, 1, 2]
    json.dumps(saved)


def test_nothing_completed_is_a_report_all_the_same():
    report = make_report([result(0, 0, [], 0, error="x")], 1.0)
    assert "Mean ITL (ms):                           0.00" in table(
        report, rate=float("inf"), max_concurrency=None, metrics=["itl"], percentiles=[99]
    )


def test_goodput_is_read():
    assert parse_goodput(["ttft:500", "e2el:1.5"]) == {"ttft": 500.0, "e2el": 1.5}
