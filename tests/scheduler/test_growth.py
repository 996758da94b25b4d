"""Room is kept for running requests: who would soon be pre-empted, or have others pre-empted, waits instead."""

import pytest

from tests.scheduler.requests_for_tests import make_checked, make_request, run


def num_preemptions(num_growth_tokens: int, max_tokens: int = 60) -> tuple[int, int, dict]:
    """(pre-emptions, steps, what was generated) of three requests, two of which fit the pool to their ends."""
    checked = make_checked(14, max_model_len=128, num_growth_tokens=num_growth_tokens)  # of 16 tokens; 7 a request
    for request_id in "abc":
        checked.add(make_request(request_id, 40, max_tokens=max_tokens))
    ended = run(checked)
    return checked.scheduler.make_stats().num_preemptions, checked.num_schedules, ended


def test_nobody_is_preempted_where_room_for_all_growth_is_kept():
    assert num_preemptions(0)[0] > 0
    assert num_preemptions(60)[0] == 0


def test_what_requests_get_does_not_depend_on_it():
    assert num_preemptions(0)[2] == num_preemptions(16)[2] == num_preemptions(60)[2]


def test_no_more_is_kept_than_requests_can_grow_by():
    few = [num_preemptions(growth, max_tokens=8) for growth in (0, 8, 10_000)]
    assert few[0] == few[1] == few[2] and few[0][0] == 0


@pytest.mark.parametrize("num_growth_tokens", [16, 10_000])
def test_a_request_that_nobody_runs_beside_is_admitted(num_growth_tokens):
    checked = make_checked(8, max_model_len=128, num_growth_tokens=num_growth_tokens)
    checked.add(make_request("a", 100, max_tokens=20))
    assert dict(checked.schedule().num_scheduled_tokens) == {"a": 64}


def test_a_request_waits_while_there_is_no_room_for_its_growth_and_the_others():
    for usable_blocks, is_admitted in ((10, False), (11, True)):  # 3 + 1 and 6 + 1 blocks
        checked = make_checked(usable_blocks, max_model_len=128, num_growth_tokens=16)
        checked.add(make_request("a", 40, max_tokens=60))
        checked.add(make_request("b", 96, max_tokens=32))
        assert ("b" in checked.schedule().num_scheduled_tokens) == is_admitted
        run(checked)
