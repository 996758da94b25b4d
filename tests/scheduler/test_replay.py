import gzip
import json
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
