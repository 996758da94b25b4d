"""`jaxvllm buckets`: policies compared on a tiny model, steps measured, sizes tuned and taken by the engine."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jaxvllm.bucket_choice import choose_policy
from jaxvllm.buckets import cli as buckets_cli
from jaxvllm.buckets.arrivals import scale_to_running, sped_up
from jaxvllm.buckets.compare import Result, StepLog, Workload, estimate_policy
from jaxvllm.buckets.measure import full_step
from jaxvllm.cli import main
from jaxvllm.config import EngineConfig, MemoryConfig
from jaxvllm.output_files import check_can_write
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, load_policy, one_shape, powers_of_two
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.cost_model import CostModel, load_cost_model, roofline
from scheduler.plan import PlanLayout
from scheduler.simulate import Simulation
from scheduler.trace import synthetic_trace
from tests.engine.dense import random_tensors, write_folder
from tests.scripts.load import load
from tests.tiny_config import T_TINY

LIMITS = ["--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--max-model-len", "32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> list[str]:
    folder = write_folder(tmp_path_factory.mktemp("buckets") / "t-tiny", T_TINY, random_tensors(T_TINY))
    return ["--model", str(folder), "--device", "cpu", "--kv-cache-memory-bytes", "1000000", *LIMITS]


def write_trace(path: Path, count: int = 60) -> Path:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0,{300 + 37 * (i % 11)},{20 + i % 7}" for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_policies_run_the_same_steps_and_are_compared_as_table_json_and_png(model, tmp_path, capsys):
    workload = ["--num-requests", "5", "--input-len", "6", "--output-len", "5", "--arrivals-per-step", "0.5"]
    sizes = ["--decode-sizes", "2", "--mixed-sizes", "8", "--policies", "one_shape", "explicit"]
    outputs = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    assert main(["buckets", "compare", *model, *workload, *sizes, *outputs]) == 0
    assert "token waste" in capsys.readouterr().out
    one, two = json.loads((tmp_path / "b.json").read_text())["results"]
    assert (one["policy"], one["num_programs"], two["policy"], two["num_programs"]) == ("one_shape", 1, "explicit", 2)
    assert one["num_steps"] == two["num_steps"] == sum(one["steps"].values()) == sum(two["steps"].values())
    assert one["token_waste"] > two["token_waste"] > 0 and min(one["tokens_per_s"], two["compile_s"]) > 0
    assert one["workspace_bytes"] > 0 and one["p99_inter_token_ms"] > 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert load_cost_model(tmp_path / "b.json").step_ms(BucketKey("mixed", 8, 2), 0) > 0

    assert main(["buckets", "measure", *model, "--policies", "one_shape", "--out", str(tmp_path / "cost.json")]) == 0
    samples = json.loads((tmp_path / "cost.json").read_text())["samples"]
    assert {(s["kind"], s["T"], s["R"]) for s in samples} == {("mixed", 8, 2)} and all(s["ms"] > 0 for s in samples)
    assert load_cost_model(tmp_path / "cost.json").step_ms(BucketKey("mixed", 8, 2), 0) > 0


def test_policies_without_time_to_run_are_estimated_from_the_steps_and_times_of_those_that_ran(model, tmp_path, capsys):
    workload = ["--num-requests", "5", "--input-len", "6", "--output-len", "5", "--arrivals-per-step", "0.5"]
    sizes = ["--decode-sizes", "2", "--mixed-sizes", "8", "--policies", "explicit", "one_shape", "tuned"]
    words = [*workload, *sizes, "--time-limit", "0", "--max-programs", "2"]
    outputs = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    assert main(["buckets", "compare", *model, *words, *outputs]) == 0
    assert "one_shape (estimated)" in capsys.readouterr().out
    ran, one, tuned = json.loads((tmp_path / "b.json").read_text())["results"]
    assert [r["is_estimated"] for r in (ran, one, tuned)] == [False, True, True]
    assert one["num_steps"] == ran["num_steps"] and set(one["steps"]) == {"mixed(T=8, R=2)"}
    assert one["token_waste"] > ran["token_waste"] and one["compile_s"] is None is one["workspace_bytes"]
    assert one["tokens_per_s"] * one["total_s"] == pytest.approx(ran["tokens_per_s"] * ran["total_s"])


def test_an_estimate_takes_as_much_longer_than_its_buckets_as_the_run_did():
    mixed, decode = BucketKey("mixed", 8, 2), BucketKey("decode", 2, 2)
    cost = CostModel({mixed: 3.0, decode: 1.0}, ms_per_context_token=0.5)
    # By cost 4 and 2 ms; measured at twice that.
    log = StepLog(shapes=[], contexts=[2, 2], keys=[mixed, decode], ms=[9.0, 3.0])
    run = Result("run", False, 2, None, None, 2, 0.0, 0.0, total_s=0.5, tokens_per_s=4.0, mean_step_ms=6.0,
                 p99_inter_token_ms=0.0, mean_running=1.0)  # fmt: skip
    config = EngineConfig(scheduler=SchedulerConfig(2, 8, 32), memory=MemoryConfig(num_blocks=9))
    # One request: a step of its prompt of 3 tokens, one of its second token, which sees 4.
    workload = Workload(prompts=[[1, 2, 3]], num_outputs=[2], arrivals=[0])
    result = estimate_policy(config, 9, one_shape(2, 8), workload, cost, run, log)
    assert result.is_estimated and result.steps == {"mixed(T=8, R=2)": 2}
    steps = [2 * (3.0 + 0.5 * context) for context in (3, 4)]
    assert result.step_ms == {"mixed(T=8, R=2)": pytest.approx(np.median(steps))}
    assert result.mean_step_ms == pytest.approx(np.mean(steps))
    assert result.total_s == pytest.approx(0.5 + (sum(steps) - 12.0) / 1e3)
    assert result.p99_inter_token_ms == pytest.approx(max(steps))


@pytest.mark.parametrize("command", ["compare", "measure"])
def test_help_names_the_model_that_runs_where_none_is_given(command, capsys):
    with pytest.raises(SystemExit):
        main(["buckets", command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "default: a Llama small enough for a CPU" in text and "SmolLM2" not in text


def test_an_unknown_policy_is_refused_with_the_list(model, capsys):
    assert main(["buckets", "compare", *model, "--policies", "fibonacci"]) == 1
    assert "'fibonacci' must be one of geometric, powers_of_two" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "measure"])
def test_the_end_releases_the_device_and_leaves_no_folder_whatever_happens(command, tmp_path, monkeypatch):
    from jaxvllm.executor import DeviceExecutor

    ends = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(DeviceExecutor, "shutdown", lambda self: ends.append(self))
    out = [] if command == "compare" else ["--out", str(tmp_path / "cost.json")]
    words = ["buckets", command, "--device", "cpu", "--policies", "fibonacci", *LIMITS, *out]
    assert main(words) == 1
    assert len(ends) == 1 and not list(tmp_path.glob("jaxvllm-tiny-*"))


def test_the_script_takes_the_benchmarks_models_by_name():
    module = load("compare_buckets")
    words = module.arguments(["--model", "qwen3-0.6b", "--num-requests", "7"])
    assert words[:3] == ["buckets", "compare", "--model"] and words[4:] == [
        "--load-format",
        "dummy",
        "--num-requests",
        "7",
    ]
    assert json.loads((Path(words[3]) / "config.json").read_text())["num_hidden_layers"] == 28
    assert module.arguments(["--model", "/elsewhere"]) == ["buckets", "compare", "--model", "/elsewhere"]


def test_tuning_to_a_trace_writes_a_policy_that_the_engine_takes(tmp_path, capsys):
    trace, tuned = write_trace(tmp_path / "trace.csv"), tmp_path / "tuned.json"
    limits = ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--max-model-len", "4096"]
    words = ["--trace", str(trace), "--out", str(tuned), "--running", "8", "--num-blocks", "2000", *limits]
    assert main(["buckets", "tune", *words, "--max-programs", "12", "--json", str(tmp_path / "t.json")]) == 0
    assert "requests running" in capsys.readouterr().out
    policy = load_policy(tuned)
    assert policy.name == "tuned" and len(policy.keys()) <= 12
    assert choose_policy(str(tuned), "gpu", SchedulerConfig(64, 2048, 4096)) == policy
    smaller = choose_policy(str(tuned), "gpu", SchedulerConfig(32, 1024, 4096))
    assert smaller.max_num_seqs == 32 and smaller.select("mixed", 1024, 32).R == 32
    with pytest.raises(ValueError, match="covers max_num_seqs=64"):
        choose_policy(str(tuned), "gpu", SchedulerConfig(128, 2048, 4096))
    with pytest.raises(ValueError, match="must be one of geometric, powers_of_two, linear, one_shape, or a JSON file"):
        choose_policy(str(tmp_path / "missing.json"), "gpu", SchedulerConfig(32, 1024, 4096))
    padding = json.loads((tmp_path / "t.json").read_text())["policies"]
    waste = {name: float(table["padding of tokens / rows"].split("%")[0]) for name, table in padding.items()}
    assert waste["tuned"] < waste["powers_of_two"]


def test_arrivals_are_sped_up_until_the_wanted_number_runs():
    policy = powers_of_two(64, 2048)
    sizes = {"weight_bytes": 1e9, "kv_bytes_per_token": 1e5, "bytes_per_s": 1e12, "flops_per_s": 1e14}
    cost = roofline(policy.keys(), **sizes)

    def simulate(requests, policy):
        return Simulation(requests, policy, cost, SchedulerConfig(64, 2048, 4096), CacheConfig(16, 4000, True)).run()

    trace = synthetic_trace(150, 1.0, 200, 40)
    for wanted in (0.02, 6.0):
        speedup, report = scale_to_running(trace, policy, simulate, wanted)
        assert report.mean_running == pytest.approx(wanted, rel=0.06)
        assert simulate(sped_up(trace, speedup), policy).mean_running == pytest.approx(report.mean_running)


def test_tuning_for_more_than_half_of_the_rows_takes_what_can_run_for_the_heavier_load(tmp_path, capsys):
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--max-model-len", "1024"]
    words = ["--trace", str(write_trace(tmp_path / "t.csv")), "--out", str(tmp_path / "tuned.json"), *limits]
    assert main(["buckets", "tune", *words, "--running", "5", "--num-blocks", "2000"]) == 0
    assert "requests running" in capsys.readouterr().out and load_policy(tmp_path / "tuned.json").max_num_seqs == 8
    assert main(["buckets", "tune", *words, "--running", "9"]) == 1
    assert "no speedup makes 9.0 requests of this trace run at once" in capsys.readouterr().err


@pytest.mark.parametrize("speedup", ["0", "-1", "nan"])
def test_a_speedup_that_is_not_above_0_is_refused(speedup, tmp_path, capsys):
    words = ["--trace", str(write_trace(tmp_path / "t.csv")), "--out", str(tmp_path / "o.json"), "--speedup", speedup]
    assert main(["buckets", "tune", *words]) == 1
    assert f"speedup={float(speedup)} must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-requests", "0", "num_requests=0 must be at least 1"),
        ("--input-len", "0", "input_len=0 must be at least 1"),
        ("--output-len", "0", "output_len=0 must be at least 1"),
        ("--arrivals-per-step", "0", "arrivals_per_step=0.0 must be above 0"),
    ],
)
def test_a_workload_of_nothing_is_refused(model, capsys, option, value, message):
    assert main(["buckets", "compare", *model, "--policies", "one_shape", option, value]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--limit", "0", "--limit 0 must be at least 1"),
        ("--rounds", "-1", "--rounds -1 must be at least 1"),
        ("--host-ms", "nan", "host_ms=nan must be at least 0"),
        ("--host-ms", "-1", "host_ms=-1.0 must be at least 0"),
        ("--padding-price", "-1", "padding_price=-1.0 must be at least 0"),
        ("--prior-share", "nan", "prior_share=nan must be at least 0"),
        ("--max-model-len", "9", "it has no request that fits the limits and the KV pool"),
    ],
)
def test_numbers_without_a_meaning_are_refused_by_tune(tmp_path, capsys, option, value, message):
    words = ["--trace", str(write_trace(tmp_path / "t.csv")), "--out", str(tmp_path / "o.json"), option, value]
    assert main(["buckets", "tune", *words]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "o.json").exists()


@pytest.mark.parametrize("limit", ["-1", "nan"])
def test_a_time_limit_below_0_is_refused(model, capsys, limit):
    assert main(["buckets", "compare", *model, "--policies", "one_shape", "--time-limit", limit]) == 1
    assert f"--time-limit {float(limit)} must be at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"),
    [("compare", "--json"), ("compare", "--plot"), ("measure", "--out"), ("tune", "--out"), ("tune", "--json")],
)
def test_a_file_that_cannot_be_written_is_named_before_any_work(command, option, tmp_path, monkeypatch, capsys):
    def work(*args: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(buckets_cli, "running_executor", work)
    monkeypatch.setattr(buckets_cli, "load_trace", work)
    others = {"measure": ["--out", str(tmp_path / "o")], "tune": ["--trace", "t.csv", "--out", str(tmp_path / "o")]}
    for path in (tmp_path / "missing" / "x.json", tmp_path):
        assert main(["buckets", command, *others.get(command, []), option, str(path)]) == 1
        assert f"{option} {path} cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a file that was only tried is not left behind"


def test_trying_a_file_leaves_what_is_in_it(tmp_path):
    path = tmp_path / "o.json"
    path.write_text("old")
    check_can_write("--out", path)
    assert path.read_text() == "old"


def test_without_matplotlib_plot_is_refused_before_any_work(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(buckets_cli, "running_executor", lambda args: pytest.fail("it began"))
    assert main(["buckets", "compare", *model, "--plot", str(tmp_path / "b.png")]) == 1
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("key", [BucketKey("decode", 8, 8), BucketKey("mixed", 40, 8), BucketKey("mixed", 40, 1)])
def test_a_measured_step_fills_its_bucket_with_rows_in_order(key: BucketKey):
    limits = BatchLimits(max_num_seqs=8, max_model_len=64, block_size=4)
    tables = np.arange(1, 1 + 8 * limits.max_blocks, dtype=np.int32).reshape(8, -1)
    plan = full_step(key, limits, tables, context=21)
    fields = PlanLayout.make(key, limits).unpack(plan.buffer)
    assert plan.num_tokens == key.T and plan.num_reqs == (8 if key.R == 8 else 1)
    n = plan.num_reqs
    lengths = np.diff(fields["query_start_loc"][: n + 1])
    assert lengths.sum() == key.T and (np.diff(lengths != 1) >= 0).all()
    for row in range(n):
        tokens = slice(*fields["query_start_loc"][row : row + 2])
        positions = fields["positions"][tokens]
        assert positions[-1] == fields["seq_lens"][row] - 1 and (np.diff(positions) == 1).all()
        expected = tables[row, positions // 4] * 4 + positions % 4
        assert (fields["slot_mapping"][tokens] == expected).all()
        assert fields["logits_indices"][row] == tokens.stop - 1
