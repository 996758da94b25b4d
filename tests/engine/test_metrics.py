"""The engine's numbers: what they count, when, and how Prometheus reads them."""

import json
import logging
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxvllm import prometheus
from jaxvllm.bucket_stats import BucketStats
from jaxvllm.config import EngineConfig
from jaxvllm.core_messages import CoreMetrics
from jaxvllm.distribution import Distribution, one_two_five
from jaxvllm.engine import Engine
from jaxvllm.metrics import HELP, FrontEndStats, RequestTimes
from jaxvllm.stats_log import StatsLog
from scheduler.buckets import BucketKey
from scheduler.outputs import SchedulerStats
from scheduler.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_executor import SuccessorExecutor

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "grafana.json"
# With vLLM 0.22.1's names; a dashboard made for it must find its numbers.
VLLM_NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
    *("prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "iteration_tokens_total", "request_params_n", "request_params_max_tokens"),
    *("request_max_num_generation_tokens", "request_prefill_kv_computed_tokens", "cache_config_info"),
}


class BucketedExecutor(SuccessorExecutor):
    """Says of every step that it ran in a bucket of 16 tokens and 8 rows."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, delay_s=0.002)
        self.buckets = BucketStats()

    def execute(self, scheduler_output):
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            self.buckets.count(BucketKey("mixed", 16, 8), sum(scheduled.values()), len(scheduled))
        return super().execute(scheduler_output)

    def metrics(self) -> dict[str, float]:
        return {"late_compiles_total": 1.0, "num_programs": 3.0, "compile_seconds_total": 0.5} | self.buckets.metrics()


def make_engine(model_folder, **args) -> Engine:
    return Engine(
        model_folder, device="cpu", multiprocess=False, executor="tests.engine.test_metrics:BucketedExecutor", **args
    )


def by_name(metrics) -> dict:
    return {(metric.name, *metric.labels.values()): metric for metric in metrics}


def value(engine: Engine, *name: str) -> float:
    return by_name(engine.get_metrics())[name].value


def samples(text: bytes) -> dict[tuple, float]:
    """(name, labels but model_name and engine ...) -> value, as Prometheus's own parser reads the text."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {name: label for name, label in sample.labels.items() if name not in ("model_name", "engine")}
            found[(sample.name, *labels.values())] = sample.value
    return found


@pytest.fixture(scope="module")
def served(model_folder):
    """An engine that has served three requests with 2 + 3 + 3 completions' tokens, and nothing else."""
    with make_engine(model_folder) as engine:
        outputs = engine.generate(
            [[65] * 10, [66] * 7],
            [SamplingParams(max_tokens=5, ignore_eos=True), SamplingParams(n=2, max_tokens=3, ignore_eos=True)],
            use_tqdm=False,
        )
        yield engine, outputs


def test_every_count_is_what_was_served(served):
    engine, _ = served
    metrics = by_name(engine.get_metrics())
    assert metrics["vllm:prompt_tokens",].value == 10 + 7 + 7
    assert metrics["vllm:generation_tokens",].value == 5 + 3 + 3
    assert metrics["vllm:request_success", "length"].value == 3
    assert metrics["vllm:request_success", "stop"].value == 0
    assert metrics["vllm:num_requests_running",].value == metrics["vllm:num_requests_waiting",].value == 0
    assert metrics["jaxvllm:late_compiles",].value == 1
    for name, count, total in [
        ("time_to_first_token_seconds", 3, None),
        ("inter_token_latency_seconds", 4 + 2 + 2, None),
        ("request_time_per_output_token_seconds", 3, None),
        ("e2e_request_latency_seconds", 3, None),
        ("request_queue_time_seconds", 3, None),
        ("request_prefill_time_seconds", 3, None),
        ("request_decode_time_seconds", 3, None),
        ("request_inference_time_seconds", 3, None),
        ("request_prompt_tokens", 3, 24),
        ("request_prefill_kv_computed_tokens", 3, 24),
        ("request_generation_tokens", 3, 11),
        ("request_params_max_tokens", 3, 11),
        ("request_params_n", 2, 3),
        ("request_max_num_generation_tokens", 2, 8),
        ("iteration_tokens_total", 5, 24 + 11),
    ]:
        histogram = metrics[f"vllm:{name}",]
        assert histogram.count == histogram.buckets["+Inf"] == count, name
        assert total is None or histogram.sum == total, name


def test_times_add_up(served):
    engine, outputs = served
    metrics = by_name(engine.get_metrics())
    sums = {name[0].removeprefix("vllm:"): m.sum for name, m in metrics.items() if hasattr(m, "sum")}
    prefill, decode = sums["request_prefill_time_seconds"], sums["request_decode_time_seconds"]
    assert sums["request_inference_time_seconds"] == pytest.approx(prefill + decode)
    assert sums["inter_token_latency_seconds"] == pytest.approx(decode)
    queue, e2e = sums["request_queue_time_seconds"], sums["e2e_request_latency_seconds"]
    # The core's times lie within the front end's.
    assert 0 < queue + prefill < sums["time_to_first_token_seconds"] < e2e and queue + prefill + decode < e2e
    for output in outputs:
        times = output.metrics
        assert abs(times.arrival_time - time.time()) < 60
        assert times.queued_ts < times.scheduled_ts < times.first_token_ts < times.last_token_ts < time.monotonic()
        assert times.first_token_latency >= times.first_token_ts - times.queued_ts
    assert [output.metrics.num_generation_tokens for output in outputs] == [5, 6]


def test_steps_are_timed_on_the_host_and_on_the_device(served):
    engine, _ = served
    metrics = by_name(engine.get_metrics())
    host, wait = metrics["jaxvllm:step_host_time_seconds",], metrics["jaxvllm:step_wait_time_seconds",]
    assert host.count == wait.count >= 5  # each step took 2 ms, and an asynchronous step more may have run in vain
    assert wait.sum >= 0.002 * wait.count > 0 and 0 < host.sum < wait.sum


def test_padding_is_what_buckets_are_larger_than_steps(served):
    engine, _ = served
    bucket = ("mixed", "16", "8")
    steps = value(engine, "jaxvllm:steps", *bucket)
    tokens = value(engine, "jaxvllm:step_tokens", *bucket)
    assert tokens >= 10 + 7 + 7 + 4 + 2 + 2
    assert value(engine, "jaxvllm:step_padding_tokens", *bucket) == 16 * steps - tokens
    assert 0 < value(engine, "jaxvllm:step_padding_rows", *bucket) < 8 * steps


def test_prometheus_reads_every_metric_back(served):
    engine, _ = served
    metrics = engine.get_metrics()
    text = prometheus.render(metrics, model_name='a "model"')
    found = samples(text)
    assert found["vllm:prompt_tokens_total",] == 24
    assert found["vllm:request_success_total", "length"] == 3
    assert found["vllm:kv_cache_usage_perc",] == 0
    assert found["vllm:iteration_tokens_total_sum",] == 35
    assert found["vllm:time_to_first_token_seconds_bucket", "0.001"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", "2560.0"] == 3
    assert found["vllm:request_params_n_bucket", "2.0"] == 2 and found["vllm:request_params_n_bucket", "1.0"] == 1
    assert found["jaxvllm:steps_total", "8", "16", "mixed"] == value(engine, "jaxvllm:steps", "mixed", "16", "8")
    assert found["process_resident_memory_bytes",] > 1e6
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    for metric in metrics:
        family = families[metric.name]
        assert family.documentation == HELP[metric.name]
        assert all(sample.labels["model_name"] == 'a "model"' for sample in family.samples)
        assert all(sample.labels["engine"] == "0" for sample in family.samples)
    assert {metric.name for metric in metrics} >= {f"vllm:{name}" for name in VLLM_NAMES}
    labels = families["vllm:cache_config_info"].samples[0].labels
    assert labels["block_size"] == "16" and labels["enable_prefix_caching"] == "True"


def test_two_engines_share_no_numbers(model_folder, served):
    with make_engine(model_folder) as engine:
        found = samples(prometheus.render(engine.get_metrics(), model_name="b", engine="1"))
    assert found["vllm:prompt_tokens_total",] == 0


def test_prefix_hits_and_aborts_are_counted(model_folder):
    with make_engine(model_folder) as engine:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        for _ in range(2):
            engine.generate([list(range(40))], params, use_tqdm=False)
        assert value(engine, "vllm:prefix_cache_queries") == 80 and value(engine, "vllm:prefix_cache_hits") == 32
        assert value(engine, "vllm:prompt_tokens_cached") == 32
        core = engine.llm_engine
        core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=900, output_kind=RequestOutputKind.DELTA))
        core.add_request("b", [1, 2, 3], SamplingParams(max_tokens=900))
        while not core.step():
            pass
        core.abort_request("a")
        core.drop_requests(["b"])
        while core.has_unfinished_requests():
            core.step()
        metrics = by_name(engine.get_metrics())
        assert metrics["vllm:request_success", "abort"].value == 2
        assert metrics["vllm:num_requests_running",].value == 0
        assert metrics["vllm:e2e_request_latency_seconds",].count == 4


def test_a_request_that_ended_in_the_queue_has_no_times_of_a_run():
    stats = FrontEndStats()
    stats.count_finished("abort", 1.0, RequestTimes(queued_ts=5.0), 7, 0, 100)
    metrics = by_name(stats.to_metrics())
    assert metrics["vllm:e2e_request_latency_seconds",].count == 1
    for name in ("queue", "prefill", "decode", "inference"):
        assert metrics[f"vllm:request_{name}_time_seconds",].count == 0


def test_distribution_counts_a_bound_below_it():
    values = Distribution([1.0, 2.0])
    for number in (0.5, 1.0, 1.5, 2.0, 9.0):
        values.observe(number)
    values.observe(1.5, times=3)
    assert values.counts == [2, 5, 1] and values.count == 8 and values.sum == pytest.approx(18.5)
    assert one_two_five(130) == [1, 2, 5, 10, 20, 50, 100] and one_two_five(1) == [1]


def test_log_line_speaks_of_the_time_since_the_last_one(caplog):
    caplog.set_level(logging.INFO, logger="jaxvllm")
    stats = FrontEndStats()
    log = StatsLog(stats, interval_s=0.05)
    assert not log.is_due()
    time.sleep(0.06)
    assert log.is_due()
    stats.num_prompt_tokens, stats.num_generation_tokens = 600, 300
    state = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25, prefix_cache_queries=10, prefix_cache_hits=5
    )
    log.write(CoreMetrics(scheduler=state))
    (record,) = caplog.records
    prompt_rate, generation_rate = record.args[:2]
    assert 2 * generation_rate == pytest.approx(prompt_rate) and 100 < prompt_rate < 10_001
    assert "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 50.0%" in record.message
    for _ in range(3):
        time.sleep(0.01)
        log.write(CoreMetrics())
    assert len(caplog.records) == 2  # nothing happens any more: said once


def test_engine_writes_the_line_while_it_serves(model_folder, caplog, monkeypatch):
    monkeypatch.setattr(StatsLog, "is_due", lambda self: True)
    caplog.set_level(logging.INFO, logger="jaxvllm")
    with make_engine(model_folder, disable_log_stats=False) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    lines = [record.message for record in caplog.records if record.message.startswith("Avg prompt throughput")]
    assert len(lines) == 4 and "Running: 1 reqs" in lines[0]


def test_dashboard_asks_for_nothing_that_is_not_there(served):
    engine, _ = served
    text = prometheus.render(engine.get_metrics(), model_name="m").decode()
    there = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [variable["definition"] for variable in dashboard["templating"]["list"]]
    for expression in expressions:
        names = re.findall(r"\b(?:jax)?vllm:\w+", expression)
        assert names and there.issuperset(names), expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [(p["gridPos"]["x"] + dx, p["gridPos"]["y"] + dy) for p in panels for dx in range(8) for dy in range(8)]
    assert len(set(places)) == len(places)  # no panel covers another


def test_dashboard_shows_what_only_a_bucketed_engine_has():
    text = DASHBOARD.read_text()
    for name in ("steps", "step_padding_tokens", "step_host_time_seconds", "late_compiles"):
        assert f"jaxvllm:{name}" in text
