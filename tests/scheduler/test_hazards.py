"""Where the scheduler is safer than vLLM 0.22: each test fails with vLLM's behaviour."""

import logging

import pytest

from scheduler.request import RequestStatus
from scheduler.stop import check_stop
from scheduler.verify import CheckedScheduler
from tests.scheduler.requests_for_tests import ids, make_checked, make_request, run


def priority_undo() -> CheckedScheduler:
    """The next step gives `lo` eight tokens, two blocks, and takes them back because `hi` needs a block."""
    checked = make_checked(9, block_size=4, policy="priority", long_prefill_token_threshold=8, reserve_full_isl=False)
    checked.add(make_request("lo", 32, priority=5))
    checked.step()
    checked.add(make_request("hi", 3, max_tokens=3, priority=0))
    checked.step()
    checked.step()
    return checked


def test_a_block_that_an_undone_step_would_have_filled_is_not_found():
    checked = priority_undo()
    lo = checked.scheduler.requests["lo"]
    assert lo.num_computed_tokens == 24
    blocks = lo.block_ids.copy()
    output = checked.schedule()
    assert output.preempted_request_ids == {"lo"} and list(output.num_scheduled_tokens) == ["hi"]
    hashes = checked.scheduler.kv.pool.block_hashes
    assert all(hashes[block] is not None for block in blocks), "what earlier steps filled stays known"
    assert set(filter(None, hashes)).isdisjoint(lo.block_hashes[6:]), "what the undone step would have filled is not"
    assert checked.update().finished.keys() == {"hi"}
    resumed = checked.schedule().scheduled_cached_requests
    assert resumed.resumed_request_ids == {"lo"}
    assert resumed.num_computed_tokens[resumed.request_ids.index("lo")] == 24  # vLLM: 28, of which 4 never ran
    assert run(checked).keys() == {"lo", "hi"}


def test_the_undone_part_of_a_step_gives_its_budget_back():
    checked = priority_undo()
    output = checked.schedule()
    assert output.num_scheduled_tokens == {"hi": 1} and output.total_num_scheduled_tokens == 1
    run(checked)


def test_equal_prompts_admitted_in_one_step_share_blocks():
    checked = make_checked(20)
    prompt = ids(50)
    checked.add(make_request("p", prompt))
    checked.add(make_request("q", prompt))
    output = checked.schedule()
    assert output.num_scheduled_tokens == {"p": 50, "q": 2}
    p, q = output.scheduled_new_requests
    assert p.block_ids[:3] == q.block_ids[:3] and p.block_ids[3] != q.block_ids[3]


def test_blocks_of_a_step_in_flight_are_shared_even_if_its_request_was_aborted():
    checked = make_checked(20, async_scheduling=True)
    prompt = ids(50)
    checked.add(make_request("p", prompt))
    checked.schedule()  # dispatched: it will run
    checked.abort(["p"])
    checked.add(make_request("q", prompt))
    assert checked.schedule().num_scheduled_tokens == {"q": 2}
    run(checked)


def test_below_min_tokens_the_length_ends_a_request():
    request = make_request("r", 5, max_tokens=None, min_tokens=9, eos=2)
    request.max_num_tokens = 8
    for token_id, status in ((2, None), (7, None), (2, RequestStatus.FINISHED_LENGTH_CAPPED)):
        request.append_token(token_id)
        assert check_stop(request) is status
    request.max_num_tokens = 100
    for _ in range(5):
        request.append_token(7)
    request.append_token(2)
    assert check_stop(request) is RequestStatus.FINISHED_STOPPED


@pytest.mark.parametrize(("usable_blocks", "max_model_len"), [(4, 256), (20, 64)])
def test_min_tokens_beyond_the_room_left_is_refused(usable_blocks: int, max_model_len: int):
    checked = make_checked(usable_blocks, max_model_len=max_model_len)
    room = min(usable_blocks * 16 + 1, max_model_len) - 60
    with pytest.raises(ValueError, match=rf"min_tokens={room + 1}.*room for {room} .*lower min_tokens"):
        checked.add(make_request("r", 60, max_tokens=None, min_tokens=room + 1))
    checked.add(make_request("r", 60, max_tokens=None, min_tokens=room))
    tokens, reason = run(checked)["r"]
    assert (len(tokens), reason) == (room, "length")


def test_no_request_is_skipped_when_a_victim_in_front_leaves_the_list():
    checked = make_checked(5, block_size=4, policy="priority", async_scheduling=True)
    checked.add(make_request("last_token_in_flight", 3, max_tokens=2, priority=9))
    checked.add(make_request("needs_a_block", 7, priority=0))
    checked.add(make_request("behind", 5, priority=0, arrival=1.0))
    checked.scheduler.waiting.put_back(checked.scheduler.requests["behind"])
    running = checked.scheduler.running
    checked.step()
    running.sort(key=lambda request: -request.priority)
    checked.step()
    output = checked.schedule()
    assert output.preempted_request_ids == {"last_token_in_flight"}
    assert output.num_scheduled_tokens == {"needs_a_block": 1, "behind": 1}
    checked.update()
    run(checked)


def test_requests_that_arrived_together_do_not_preempt_each_other_for_ever():
    checked = make_checked(
        20,
        block_size=1,
        caching=False,
        policy="priority",
        reserve_full_isl=False,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=5,
    )
    for name in ("r29", "r36", "r38"):
        checked.add(make_request(name, 19, max_tokens=2, arrival=7.0))
    assert {reason for _, reason in run(checked).values()} == {"length"}


def test_a_preempted_request_waits_for_its_token_in_flight():
    checked = make_checked(
        4, block_size=4, long_prefill_token_threshold=4, reserve_full_isl=False, async_scheduling=True
    )
    checked.max_in_flight = 4  # deeper than an engine goes
    checked.add(make_request("first", 4))
    checked.add(make_request("second", 8))
    checked.schedule()
    checked.schedule()  # samples a token of `second`
    assert checked.schedule().preempted_request_ids == {"second"}
    assert "second" not in checked.schedule().num_scheduled_tokens
    run(checked)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_id_is_refused_as_long_as_a_step_in_flight_or_the_next_update_speaks_of_it(async_scheduling: bool):
    checked = make_checked(20, async_scheduling=async_scheduling)

    def is_refused() -> bool:
        try:
            checked.scheduler.add_request(make_request("r", 5, max_tokens=1))
        except ValueError as error:
            return "id 'r' is in use" in str(error)
        return False

    checked.add(make_request("r", 20, max_tokens=9))
    checked.schedule()
    checked.abort(["r"])
    assert is_refused(), "its token in flight would become the new request's"
    assert checked.update().finished.keys() == {"r"}
    checked.add(make_request("r", 20, max_tokens=9))
    checked.abort(["r"])
    assert is_refused(), "the caller could not tell whose end it hears"
    run(checked)
    assert not is_refused()


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_an_aborted_request_leaves_known_only_what_a_returned_step_fills(num_in_flight: int):
    checked = make_checked(20, async_scheduling=True, max_num_batched_tokens=16)
    prompt = ids(50)
    checked.add(make_request("p", prompt))
    for _ in range(num_in_flight):
        checked.schedule()
    checked.abort(["p"])
    checked.add(make_request("q", prompt))
    (new,) = checked.schedule().scheduled_new_requests
    assert new.num_computed_tokens == 16 * num_in_flight
    run(checked)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (64, r"prompt has 64 tokens.*KV pool of 64 slots holds at most 63.*shorten it"),
        (256, r"prompt has 256 tokens.*max_model_len=256 allows at most 255.*shorten it"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_and_costs_no_other_request(prompt: int, message: str):
    checked = make_checked(4 if prompt == 64 else 30)
    with pytest.raises(ValueError, match=message):
        checked.add(make_request("big", prompt))
    checked.add(make_request("small", prompt - 1, max_tokens=1))
    assert run(checked).keys() == {"small"}


def test_an_empty_prompt_an_empty_salt_and_a_used_id_are_refused():
    with pytest.raises(ValueError, match="'r' is empty; give at least 1 token"):
        make_request("r", [])
    with pytest.raises(ValueError, match="cache_salt='' of request 'r' must not be empty"):
        make_request("r", 5, salt="")
    checked = make_checked(4)
    checked.add(make_request("r", 5))
    with pytest.raises(ValueError, match="id 'r' is in use"):
        checked.add(make_request("r", 6))


def test_a_request_that_fills_the_pool_ends_with_length_and_a_log_line(caplog: pytest.LogCaptureFixture):
    checked = make_checked(4)
    checked.add(make_request("r", 60, max_tokens=6))
    with caplog.at_level(logging.WARNING):
        tokens, reason = run(checked)["r"]
    assert (len(tokens), reason) == (5, "length")
    assert "Request r ends with 5 output tokens" in caplog.text and "64 slots" in caplog.text
