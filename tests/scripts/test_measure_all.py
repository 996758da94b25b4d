"""Running all measurements in one go, and what each result says it is of."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.load import SCRIPTS, load


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """measure_all with parts of its own; (exit code, what was printed) of its command line."""
    module = load("measure_all")
    part = module.Part
    parts = {
        "good": part(1, """-c "print('fine'); open('{out}/good.json', 'w').close()" """),
        "bad": part(1, '-c "import sys; print(3 * 7); sys.exit(3)"'),
        # Its child holds the output open for longer than the part may run.
        "hangs": part(1, """-c "import subprocess; print('on', flush=True); subprocess.run(['sleep', '60'])" """),
        "long": part(50, '-c "raise AssertionError"'),
    }
    monkeypatch.setattr(module, "PARTS", parts)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["measure_all.py", "--out", str(tmp_path / "new"), *words])
        return module.main()

    return run


def test_parts_run_in_order_and_one_that_fails_costs_the_others_nothing(measure, capsys, tmp_path):
    assert measure("--parts", "bad", "good") == 1
    out = capsys.readouterr().out
    assert out.index("=== bad: exit 3") < out.index("21\n") < out.index("=== good: exit 0") < out.index("fine")
    assert (tmp_path / "new" / "good.json").exists()
    assert (tmp_path / "new" / "logs" / "bad.log").read_text() == "21\n"
    assert measure("--parts", "good") == 0


def test_a_part_that_hangs_is_given_up_and_one_without_time_is_left_out(measure, capsys):
    start = time.monotonic()
    assert measure("--parts", "hangs", "long", "good", "--budget-s", "40") == 1
    out = capsys.readouterr().out
    assert "=== hangs: exit 124" in out and "=== long: left out" in out and "=== good: exit 0" in out
    assert time.monotonic() - start < 30


def test_every_part_names_a_script_or_tests_that_exist():
    for name, part in load("measure_all").PARTS.items():
        paths = [Path(word) for word in part.command.split() if word.endswith(".py") or word.startswith("tests/")]
        assert paths and all((SCRIPTS.parent / path).exists() for path in paths), name


def test_a_result_says_its_commit_versions_and_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "abc1234")
    path = tmp_path / "folder" / "x.json"
    load("records").write(path, {"rows": [1]})
    written = json.loads(path.read_text())
    assert written["commit"] == "abc1234" and written["rows"] == [1] and written["gpu"]
    assert set(written["versions"]) == {"jax", "jaxlib", "flax", "python"}
