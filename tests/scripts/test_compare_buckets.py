import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_buckets.py"


@pytest.fixture(scope="module")
def compare_buckets():
    spec = importlib.util.spec_from_file_location("compare_buckets", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = [
    "--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--max-model-len", "32", "--num-requests", "5",
    "--input-len", "6", "--output-len", "5", "--hidden-size", "16", "--num-layers", "1",
]  # fmt: skip


def test_policies_run_the_same_steps_and_are_compared_as_table_json_and_png(compare_buckets, tmp_path, capsys):
    sizes = ["--decode-sizes", "2", "--mixed-sizes", "8"]
    outputs = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    one, explicit = compare_buckets.main([*SMALL, *sizes, *outputs, "--policies", "one_shape", "explicit"])
    assert (one.num_programs, explicit.num_programs) == (1, 2)
    assert one.num_steps == explicit.num_steps == sum(one.steps.values()) == sum(explicit.steps.values())
    assert one.token_waste > explicit.token_waste and min(one.tokens_per_s, explicit.compile_s) > 0
    assert "token waste" in capsys.readouterr().out
    saved = json.loads((tmp_path / "b.json").read_text())
    assert [r["policy"] for r in saved["results"]] == ["one_shape", "explicit"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_policy_is_refused_with_the_list(compare_buckets):
    with pytest.raises(ValueError, match=r"'fibonacci' must be one of .*powers_of_two"):
        compare_buckets.make_policy("fibonacci", compare_buckets.parse_args(SMALL))


def test_a_policy_file_is_taken(compare_buckets, tmp_path):
    args = compare_buckets.parse_args(SMALL)
    policy = compare_buckets.make_policy("explicit", args)
    policy.save(tmp_path / "tuned.json")
    assert compare_buckets.make_policy(str(tmp_path / "tuned.json"), args) == policy
