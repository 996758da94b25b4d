"""Loads: lengths, shared parts and times of arrival."""

import numpy as np
import pytest

from jaxvllm.bench import loads


def test_random_lengths_stay_in_their_range_and_seeds_repeat():
    load = loads.random_load(3000, 100, 20, range_ratio=0.25, prefix_len=7, seed=3)
    prompts = np.array([len(request.prompt) for request in load])
    outputs = np.array([request.num_output_tokens for request in load])
    assert prompts.min() == 82 and prompts.max() == 132 and 105 < prompts.mean() < 109
    assert outputs.min() == 15 and outputs.max() == 25
    assert len({tuple(request.prompt[:7]) for request in load}) == 1
    assert len({tuple(request.prompt[7:20]) for request in load}) == 3000
    assert load == loads.random_load(3000, 100, 20, range_ratio=0.25, prefix_len=7, seed=3)
    assert all(request.num_prompt_tokens == len(request.prompt) for request in load)


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness, spread):
    load = loads.at_rate(loads.random_load(4000, 1, 1), rate=8.0, burstiness=burstiness)
    times = np.array([request.arrival_s for request in load])
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(4000 / 8.0) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.08)  # 1: exponential


def test_infinite_rate_is_all_at_once():
    assert {r.arrival_s for r in loads.at_rate(loads.random_load(5, 3, 3), float("inf"))} == {0.0}


def test_sonnet_leaves_room_for_a_line():
    def count(texts):
        return [len(text.split()) for text in texts]

    (request,) = loads.sonnet_load(1, 40, 3, count, prefix_len=30)
    assert 30 < request.num_prompt_tokens == len(request.prompt.split()) <= 40
    with pytest.raises(ValueError, match=r"sonnet_input_len=30 must be at least 3\d"):
        loads.sonnet_load(1, 30, 3, count, prefix_len=30)


def test_own_poem(tmp_path):
    (tmp_path / "p.txt").write_text("one two\n\nthree\n")
    (request,) = loads.sonnet_load(1, 20, 3, lambda texts: [len(t.split()) for t in texts], path=tmp_path / "p.txt")
    assert set(request.prompt.removeprefix(loads.INSTRUCTION).split("\n")) <= {"one two", "three", ""}
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(ValueError, match="has no lines"):
        loads.sonnet_load(1, 20, 3, len, path=tmp_path / "p.txt")  # type: ignore[arg-type]


def test_trace_with_nothing_short_enough(tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,30,4\n")
    with pytest.raises(ValueError, match="trace_max_tokens=33"):
        loads.trace_load(tmp_path / "t.csv", 5, max_tokens=33)
    (request,), num_left_out = loads.trace_load(tmp_path / "t.csv", 5, max_tokens=34)
    assert (len(request.prompt), request.num_output_tokens, num_left_out) == (30, 4, 0)
