import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.replay import replay

GOLDEN = Path(__file__).parent / "golden" / "scheduler_golden.jsonl.gz"


def load_scenarios() -> list[dict]:
    with gzip.open(GOLDEN, "rt") as lines:
        return [json.loads(line) for line in lines]


SCENARIOS = load_scenarios()


def test_the_recording_is_whole():
    assert len(SCENARIOS) == 150
    assert sum(len(scenario["steps"]) for scenario in SCENARIOS) == 7676


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: f"seed{s['cfg']['seed']}")
def test_every_field_of_every_step_equals_the_recording(scenario: dict):
    steps = replay(scenario)
    for ours, recorded in zip(steps, scenario["steps"], strict=False):
        assert ours == recorded
    assert len(steps) == len(scenario["steps"])


def test_replay_imports_no_jax():
    code = "import sys, scheduler.replay; print(sorted({'jax', 'flax', 'torch', 'jaxvllm'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def random_scenario(seed: int) -> dict:
    """A scenario in the format of the recording, with limits that the recording does not reach."""
    rng = random.Random(seed)
    block_size, is_async = rng.choice([1, 2, 3, 4, 8, 16, 32]), rng.random() < 0.5
    max_num_seqs = rng.randint(1, 9)
    cfg = {
        "seed": seed,
        "block_size": block_size,
        "num_blocks": rng.randint(2, 5 + 160 // block_size),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([0, 0, 1, 7, 50, 250]),
        "max_model_len": rng.choice([2, 9, 64, 129]),
        "policy": rng.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": rng.choice([0, 1, 5, 300]),
        "reserve_full_isl": rng.random() < 0.5,
        "prefix_caching": rng.random() < 0.7,
        "async": is_async,
        "pipeline_depth": rng.choice([1 + is_async, rng.randint(1, 4)]),
        "eos_mod": rng.choice([0, 1, 2, 13]),
    }
    longest = min(cfg["max_model_len"], (cfg["num_blocks"] - 1) * block_size) + 1
    shared = [rng.randrange(3, 900) for _ in range(longest)]
    requests = [_random_request(rng, f"r{index}", shared) for index in range(rng.randint(0, 12))]
    return {"cfg": cfg, "requests": requests}


def _random_request(rng: random.Random, request_id: str, shared: list[int]) -> dict:
    num_shared = rng.choice([0, rng.randint(0, len(shared)), len(shared)])
    prompt = shared[:num_shared] + [rng.randrange(3, 900) for _ in range(rng.randint(0, len(shared)))]
    max_tokens = rng.choice([1, 2, 9, 40, 500])
    return {
        "id": request_id,
        "step": rng.randint(0, 12),
        "prompt": prompt[: rng.choice([len(shared), len(shared) - 2, len(shared) // 3, 9, 5])] or [3],
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0] * 9 + [2, max_tokens, 100]),
        "ignore_eos": rng.random() < 0.5,
        "priority": rng.randint(-1, 2),
        "arrival": float(rng.randint(0, 3)),
        "salt": rng.choice([None, None, "s", "t"]),
        "abort_step": rng.choice([None, None, rng.randint(0, 60)]),
    }


def check_steps(scenario: dict, steps: list[dict]) -> None:
    """Budgets, rows, blocks and ends of a replayed scenario."""
    cfg, requests = scenario["cfg"], {request["id"]: request for request in scenario["requests"]}
    num_outputs, gone = dict.fromkeys(requests, 0), set()
    for step in steps:
        gone |= set(step["aborted"]) | set(step.get("refused", ()))
        assert sum(count for _, count in step["num_scheduled"]) <= cfg["max_num_batched_tokens"]
        assert all(count >= 1 for _, count in step["num_scheduled"])
        assert len(step["running"]) <= cfg["max_num_seqs"]
        assert 0 <= step["free"] < cfg["num_blocks"]
        assert gone.isdisjoint(step["running"] + step["waiting"])
        given = [blocks for _, _, blocks in step["new"]] + [row[3] or [] for row in step["cached"]]
        assert all(1 <= block < cfg["num_blocks"] for blocks in given for block in blocks)
        for request_id, tokens, reason, _ in step.get("out", ()):
            assert request_id not in gone
            num_outputs[request_id] += len(tokens)
            assert num_outputs[request_id] <= requests[request_id]["max_tokens"]
            if reason is not None:
                gone.add(request_id)
    assert gone == requests.keys()
    assert not steps or "out" in steps[-1] or not steps[-1]["running"]


def test_scenarios_with_odd_but_legal_limits_end_and_keep_them():
    num_refused = num_preempted = 0
    for seed in range(400):
        scenario = random_scenario(seed)
        steps = replay(scenario)
        check_steps(scenario, steps)
        num_refused += sum(len(step.get("refused", ())) for step in steps)
        num_preempted += sum(len(step["preempted"]) for step in steps)
    assert num_refused > 100 and num_preempted > 100
