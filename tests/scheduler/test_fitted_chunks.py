"""The last part of a prompt in a step ends where a bucket does, if that saves more pads than another step costs."""

from dataclasses import replace

import pytest

from scheduler.buckets import BucketPolicy, load_policy
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.verify import CheckedScheduler
from tests.scheduler.requests_for_tests import make_request, run

POLICY = BucketPolicy("hand", 8, 512, (8,), ((64, 8), (128, 2), (256, 8), (512, 8)), pads_worth_a_step=20)


def make(buckets: BucketPolicy | None = POLICY, **limits) -> CheckedScheduler:
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512, "async_scheduling": False}
    return CheckedScheduler(SchedulerConfig(**config | limits), CacheConfig(16, 200), buckets)


def steps_of(checked: CheckedScheduler, count: int) -> list[dict[str, int]]:
    seen = []
    for _ in range(count):
        seen.append(dict(checked.schedule().num_scheduled_tokens))
        checked.update()
    return seen


def make_busy(policy: BucketPolicy | None = POLICY, **limits) -> CheckedScheduler:
    """Beside a request that decodes."""
    checked = make(policy, **limits)
    checked.add(make_request("d", 3, max_tokens=50))
    steps_of(checked, 1)
    return checked


def test_a_prompt_is_cut_where_a_bucket_ends_and_the_rest_follows():
    checked = make_busy()
    checked.add(make_request("a", 300, max_tokens=2))
    assert steps_of(checked, 3) == [{"d": 1, "a": 255}, {"d": 1, "a": 45}, {"d": 1, "a": 1}]


@pytest.mark.parametrize(("length", "first"), [(235, 235), (234, 127), (491, 491), (490, 255)])
def test_nothing_is_cut_for_as_few_pads_as_are_worth_a_step(length, first):
    checked = make_busy()
    checked.add(make_request("a", length, max_tokens=1))
    assert steps_of(checked, 1) == [{"d": 1, "a": first}]


def test_a_prompt_alone_stays_whole():
    checked = make()
    checked.add(make_request("a", 300, max_tokens=2))
    assert steps_of(checked, 1) == [{"a": 300}]


@pytest.mark.parametrize("limits", [{"policy": "fcfs"}, {"policy": "priority"}])
def test_only_the_last_prompt_of_a_step_is_cut(limits):
    checked = make(**limits)
    for request_id in "abc":
        checked.add(make_request(request_id, 100, max_tokens=3))
    assert steps_of(checked, 3) == [{"a": 100, "b": 100, "c": 56}, {"a": 1, "b": 1, "c": 44}, {"a": 1, "b": 1, "c": 1}]


def test_the_last_that_may_run_is_the_last_prompt_of_a_step():
    checked = make(max_num_seqs=2)
    for request_id in "abc":
        checked.add(make_request(request_id, 90, max_tokens=2))
    assert steps_of(checked, 1) == [{"a": 90, "b": 38}]  # 128 tokens, in the bucket for 2 requests


def test_a_bucket_with_too_few_rows_is_no_place_to_cut():
    checked = make()
    for request_id in "abc":
        checked.add(make_request(request_id, 50, max_tokens=2))
    assert steps_of(checked, 1) == [{"a": 50, "b": 50, "c": 50}]  # 128 has rows for 2, 64 is full before c


@pytest.mark.parametrize(
    ("policy", "limits"),
    [(None, {}), (POLICY, {"enable_chunked_prefill": False}), (replace(POLICY, pads_worth_a_step=512), {})],
)
def test_prompts_stay_whole_without_buckets_or_chunks_or_where_pads_cost_nothing(policy, limits):
    checked = make_busy(policy, **limits)
    checked.add(make_request("a", 300, max_tokens=1))
    assert steps_of(checked, 1) == [{"d": 1, "a": 300}]


def test_what_requests_get_does_not_depend_on_the_buckets():
    results = []
    for policy in (POLICY, None):
        checked = make(policy, async_scheduling=True)
        for index, length in enumerate((70, 301, 5, 449, 131)):
            checked.add(make_request(f"r{index}", length, max_tokens=7))
            checked.step()
        results.append((run(checked), checked.num_schedules))
    assert results[0][0] == results[1][0] and results[0][1] > results[1][1]


def test_what_pads_are_worth_is_part_of_the_policy(tmp_path):
    POLICY.save(tmp_path / "p.json")
    assert load_policy(tmp_path / "p.json") == POLICY
    assert POLICY.restricted(4, 300).pads_worth_a_step == 20
