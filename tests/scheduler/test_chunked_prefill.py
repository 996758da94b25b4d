"""A prompt that does not fit the rest of a step: cut with chunked prefill, else it waits for a step of its own."""

import pytest

from tests.scheduler.requests_for_tests import make_checked, make_request, run


@pytest.mark.parametrize(
    ("chunked", "steps"),
    [(True, [{"a": 40, "b": 24}, {"a": 1, "b": 16, "c": 7}]), (False, [{"a": 40}, {"a": 1, "b": 40, "c": 7}])],
)
def test_a_prompt_above_the_budget_left_is_cut_or_waits_and_so_do_those_behind_it(chunked, steps):
    checked = make_checked(40, enable_chunked_prefill=chunked, max_model_len=64)
    for request_id, length in (("a", 40), ("b", 40), ("c", 7)):
        checked.add(make_request(request_id, length, max_tokens=3))
    seen = []
    for _ in steps:
        seen.append(dict(checked.schedule().num_scheduled_tokens))
        checked.update()
    assert seen == steps
    assert {len(tokens) for tokens, _ in run(checked).values()} == {3}
