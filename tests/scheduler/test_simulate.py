import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler.buckets import BucketKey, explicit
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.cost_model import CostModel, StepSample, fit, load_cost_model
from scheduler.simulate import Simulation, SimulationReport
from scheduler.trace import TraceRequest, load_trace, synthetic_trace

POLICY = explicit(4, 64, [1, 4], [16, 64])
DECODE_1, DECODE_4 = BucketKey("decode", 1, 1), BucketKey("decode", 4, 4)
MIXED_16, MIXED_64 = BucketKey("mixed", 16, 4), BucketKey("mixed", 64, 4)
COST = CostModel({DECODE_1: 10.0, DECODE_4: 20.0, MIXED_16: 100.0, MIXED_64: 400.0})


def simulate(trace: list[TraceRequest], async_scheduling: bool = False, num_blocks: int = 40) -> SimulationReport:
    config = SchedulerConfig(4, 64, 256, async_scheduling=async_scheduling)
    return Simulation(trace, POLICY, COST, config, CacheConfig(16, num_blocks)).run()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_request_takes_its_prefill_and_its_decode_steps(async_scheduling: bool):
    report = simulate([TraceRequest(0.0, 40, 5)], async_scheduling)
    np.testing.assert_allclose(report.ttft_s, [0.4])
    np.testing.assert_allclose(report.inter_token_s, [0.01] * 4)
    np.testing.assert_allclose(report.queue_s, [0.0])
    assert report.duration_s == pytest.approx(0.44) and report.busy_s == pytest.approx(0.44)
    assert report.bucket_steps == {MIXED_64: 1, DECODE_1: 4}
    assert report.padding.tokens == pytest.approx(1 - 44 / 68)
    assert report.num_output_tokens == 5 and report.num_steps == 5


def test_a_request_that_comes_during_a_step_queues_until_it_ends():
    report = simulate([TraceRequest(0.0, 40, 1), TraceRequest(0.1, 10, 1), TraceRequest(9.0, 10, 1)])
    np.testing.assert_allclose(report.queue_s, [0.0, 0.3, 0.0])
    np.testing.assert_allclose(report.ttft_s, [0.4, 0.4, 0.1])


def test_async_scheduling_hides_the_host():
    trace, config = [TraceRequest(0.0, 10, 50)], {}
    for async_scheduling in (False, True):
        limits = SchedulerConfig(4, 64, 256, async_scheduling=async_scheduling)
        simulation = Simulation(trace, POLICY, COST, limits, CacheConfig(16, 40), host_ms=4.0)
        config[async_scheduling] = np.median(simulation.run().inter_token_s)
    assert config == {False: pytest.approx(0.014), True: pytest.approx(0.010)}


def test_preemptions_recomputation_and_refusals_are_counted():
    trace = [TraceRequest(0.0, 40, 60), TraceRequest(0.0, 40, 60), TraceRequest(0.0, 300, 1)]
    report = simulate(trace, num_blocks=10)
    assert report.num_requests == 2 and report.num_refused == 1
    assert report.stats.num_preemptions >= 1 and report.stats.num_recomputed_tokens >= 1
    assert report.num_output_tokens == 120


def test_shared_hash_ids_are_prefix_hits():
    trace = [TraceRequest(0.0, 100, 1, (5,)), TraceRequest(1.0, 100, 1, (5,)), TraceRequest(2.0, 100, 1, (6,))]
    report = simulate(trace)
    assert report.stats.prefix_cache_hits == 96 and report.stats.prefix_cache_queries == 300


def test_traces_are_read_in_both_formats(tmp_path: Path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9805900,396,0\n"
    )
    first, second = load_trace(azure)
    assert (first, second.num_output_tokens) == (TraceRequest(0.0, 374, 44), 1)
    assert second.arrival_s == pytest.approx(4.3)
    mooncake = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 27000, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]},
        {"timestamp": 26000, "input_length": 512, "output_length": 3, "hash_ids": [0]},
    ]
    mooncake.write_text("\n".join(map(json.dumps, rows)) + "\n")
    earlier, later = load_trace(mooncake)
    assert (earlier.arrival_s, later.arrival_s) == (0.0, 1.0)
    assert later.prompt_token_ids(1)[:512] == earlier.prompt_token_ids(0) and len(later.prompt_token_ids(1)) == 600
    assert len(load_trace(mooncake, limit=1)) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.txt", "", "neither .csv"),
        ("t.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n", "request 1"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0]}\n', "do not cover"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}\n', "must be integers"),
        ("t.jsonl", '{"timestamp": NaN, "input_length": 6, "output_length": 1, "hash_ids": [0]}\n', "must be finite"),
        ("t.jsonl", '{"timestamp": 0, "input_length": Infinity, "output_length": 1, "hash_ids": [0]}\n', "request 1"),
        ("t.csv", "TIMESTAMP\xff", "no text"),
    ],
)
def test_a_broken_trace_is_an_error_that_names_file_and_row(tmp_path: Path, name: str, text: str, message: str):
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as error:
        load_trace(path)
    assert name in str(error.value)


def test_synthetic_traces_have_the_given_means():
    trace = synthetic_trace(4000, rate=5.0, mean_prompt_tokens=300, mean_output_tokens=40, seed=1)
    assert np.mean([r.num_prompt_tokens for r in trace]) == pytest.approx(300, rel=0.1)
    assert np.mean([r.num_output_tokens for r in trace]) == pytest.approx(40, rel=0.1)
    assert trace[-1].arrival_s == pytest.approx(800, rel=0.1)


def test_a_cost_model_is_fitted_interpolated_and_read(tmp_path: Path):
    samples = [
        StepSample(key, n, COST.bucket_ms[key] + n * 2e-4) for key in COST.bucket_ms for n in (0, 10_000, 70_000)
    ]
    model = fit(samples)
    assert model.ms_per_context_token == pytest.approx(2e-4)
    assert model.step_ms(MIXED_64, 1000) == pytest.approx(400.2)
    assert model.step_ms(BucketKey("decode", 2, 2), 0) == pytest.approx(10 + 10 / 3)
    assert model.step_ms(BucketKey("mixed", 128, 4), 0) == pytest.approx(800)
    path = tmp_path / "cost.json"
    rows = [
        {"kind": s.key.kind, "T": s.key.T, "R": s.key.R, "context_tokens": s.context_tokens, "ms": s.ms}
        for s in samples
    ]
    path.write_text(json.dumps({"samples": rows}))
    assert load_cost_model(path).bucket_ms == pytest.approx(model.bucket_ms)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"cost\.json holds no step times"):
        load_cost_model(path)


@pytest.mark.parametrize(
    "wrong", [{"ms": 0}, {"ms": -1.0}, {"ms": math.nan}, {"ms": math.inf}, {"T": 0}, {"T": "8"}, {"R": 1.5},
              {"kind": "prefill"}, {"context_tokens": -1}],
)  # fmt: skip
def test_step_times_without_a_meaning_are_refused(tmp_path: Path, wrong: dict):
    path = tmp_path / "cost.json"
    row = {"kind": "mixed", "T": 64, "R": 8, "context_tokens": 0, "ms": 1.0}
    path.write_text(json.dumps({"samples": [row | {"kind": "decode"}, row | wrong]}))
    with pytest.raises(ValueError, match=r"cost\.json holds no step times"):
        load_cost_model(path)


def test_the_script_prints_a_column_a_policy_and_writes_a_plot(tmp_path: Path):
    script = Path(__file__).parents[2] / "scripts" / "simulate.py"
    command = [sys.executable, script, "--synthetic", "requests=60", "rate=20", "prompt=200", "output=20"]
    command += ["--policy", "powers_of_two", "one_shape", "--plot", tmp_path / "plot.png"]
    text = subprocess.check_output(command, text=True)
    assert "powers_of_two" in text and "one_shape" in text and "TTFT p50 / p99" in text
    assert (tmp_path / "plot.png").stat().st_size > 10_000
