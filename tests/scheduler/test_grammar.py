"""Requests with a grammar wait for it, and hold up nobody meanwhile."""

import random

import pytest

from scheduler.outputs import ModelRunnerOutput, SchedulerOutput
from scheduler.request import RequestStatus
from scheduler.scheduler import Scheduler
from tests.scheduler.requests_for_tests import make_checked, make_request, run


class Grammar:
    """A grammar that is ready when the test says so; with `automatic` it always is. Refuses token `refused`."""

    def __init__(self, automatic: bool = False, refused: int = -1) -> None:
        self._automatic, self._refused = automatic, refused
        self.is_ready = automatic
        self.error: str | None = None
        self.refusal: str | None = None
        self.num_accepted = 0
        self.is_closed = False

    def accept(self, token_id: int) -> None:
        self.num_accepted += 1
        self.is_ready = self._automatic
        self.refusal = "no such token here" if token_id == self._refused else None

    def close(self) -> None:
        self.is_closed = True


def add(scheduler: Scheduler, request_id: str, grammar: Grammar | None = None, prompt: int = 5, **params) -> None:
    scheduler.add_request(make_request(request_id, prompt, grammar=grammar, **params))


def give(scheduler: Scheduler, output: SchedulerOutput, token_id: int = 9):
    for grammar in output.grammars.values():
        assert isinstance(grammar, Grammar)
        grammar.accept(token_id)
    return scheduler.update_from_output(output, ModelRunnerOutput(dict.fromkeys(output.num_scheduled_tokens, token_id)))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_behind_one_that_waits_for_its_grammar_go_on_and_it_comes_first_when_ready(policy):
    scheduler = make_checked(40, policy=policy, max_num_seqs=2).scheduler
    grammars = [Grammar(), Grammar()]
    add(scheduler, "g0", grammars[0])
    add(scheduler, "g1", grammars[1], arrival=1.0)
    for index in range(3):
        add(scheduler, f"r{index}", arrival=2.0 + index, max_tokens=2)
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["r0", "r1"]
    assert [r.request_id for r in scheduler.skipped] == ["g0", "g1"]
    assert scheduler.make_stats().num_waiting_reqs == 3
    give(scheduler, output)
    grammars[1].is_ready = True
    give(scheduler, scheduler.schedule())  # the last tokens of r0 and r1
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["g1", "r2"]
    assert output.grammars.keys() == {"g1"}
    assert [r.request_id for r in scheduler.skipped] == ["g0"]


def test_a_grammar_that_fails_ends_its_request_with_the_message_and_no_other():
    scheduler = make_checked(40).scheduler
    waiting, running = Grammar(), Grammar(automatic=True)
    add(scheduler, "waiting", waiting)
    add(scheduler, "running", running)
    add(scheduler, "other", max_tokens=3)
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["running", "other"]
    give(scheduler, output)
    waiting.error, running.error = "too large", "too slow"
    ended = give(scheduler, scheduler.schedule()).finished
    assert {i: (e.finish_reason, e.stop_reason) for i, e in ended.items()} == {
        "waiting": ("error", "too large"),
        "running": ("error", "too slow"),
    }
    assert waiting.is_closed and running.is_closed and list(scheduler.requests) == ["other"]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_refused_token_ends_its_request_alone_with_an_error_and_is_no_part_of_its_text(async_scheduling):
    scheduler = make_checked(40, async_scheduling=async_scheduling).scheduler
    num_free = scheduler.kv.pool.num_free_blocks
    refusing = Grammar(automatic=True, refused=9)
    add(scheduler, "g", refusing, eos=9)
    add(scheduler, "other", Grammar(automatic=True), max_tokens=4)
    steps = [scheduler.schedule() for _ in range(1 + async_scheduling)]
    assert give(scheduler, steps.pop(0), token_id=7).new_token_ids == [7, 7]
    steps.append(scheduler.schedule())
    outputs = give(scheduler, steps.pop(0), token_id=9)
    assert (outputs.request_ids, outputs.new_token_ids) == (["other"], [9])
    assert outputs.finished.keys() == {"g"} and refusing.is_closed
    assert (outputs.finished["g"].finish_reason, outputs.finished["g"].stop_reason) == ("error", "no such token here")
    while scheduler.has_unfinished_requests():
        steps.append(scheduler.schedule())
        assert give(scheduler, steps.pop(0)).request_ids == ["other"]
    assert scheduler.kv.pool.num_free_blocks == num_free


def test_a_request_with_a_token_in_flight_is_in_the_next_step_unless_its_grammar_wants_to_wait():
    scheduler = make_checked(40, async_scheduling=True).scheduler
    grammars = {"g": Grammar(automatic=True), "slow": Grammar()}
    grammars["slow"].is_ready = True
    for request_id, grammar in grammars.items():
        add(scheduler, request_id, grammar)
    add(scheduler, "r")
    steps, scheduled = [], []
    for _ in range(6):
        steps.append(scheduler.schedule())
        scheduled.append(sorted(steps[-1].num_scheduled_tokens))
        assert steps[-1].grammars == {i: grammars[i] for i in scheduled[-1] if i != "r"}
        grammars["slow"].is_ready = False  # while its token is in flight, and once more while its mask is computed
        if len(steps) == 2:
            give(scheduler, steps.pop(0))
            grammars["slow"].is_ready = "slow" not in scheduled[-1] and len(scheduled) % 3 == 0
    assert scheduled == [["g", "r", "slow"], ["g", "r"], ["g", "r"], ["g", "r", "slow"], ["g", "r"], ["g", "r"]]
    assert grammars["g"].num_accepted == 5


def test_few_grammars_among_many_requests_leave_out_the_step_behind_each_of_theirs():
    """Else the others' tokens would wait for the host in every step, which short steps are too short for."""
    scheduler = make_checked(40, async_scheduling=True).scheduler
    add(scheduler, "g", Grammar(automatic=True))
    for index in range(4):
        add(scheduler, f"r{index}", max_tokens=30 if index else 4)
    steps, has_grammar = [], []
    for _ in range(9):
        steps.append(scheduler.schedule())
        has_grammar.append("g" in steps[-1].num_scheduled_tokens)
        assert {f"r{index}" for index in range(1, 4)} < steps[-1].num_scheduled_tokens.keys()
        if len(steps) == 2:
            give(scheduler, steps.pop(0))
    # When r0 has ended they are a fourth.
    assert has_grammar == [True, False, True, False, True, True, True, True, True]


def test_a_grammar_that_is_not_ready_in_time_leaves_the_request_out_of_the_step():
    scheduler = make_checked(40).scheduler
    grammar = Grammar()
    grammar.is_ready = True
    add(scheduler, "g", grammar)
    add(scheduler, "r")
    give(scheduler, scheduler.schedule())
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["r"]
    give(scheduler, output)
    grammar.is_ready = True
    assert list(scheduler.schedule().num_scheduled_tokens) == ["g", "r"]


def test_masks_come_with_steps_that_sample_not_with_chunks_of_the_prompt():
    scheduler = make_checked(40, max_num_batched_tokens=16).scheduler
    add(scheduler, "g", Grammar(automatic=True), prompt=40)
    has_mask = []
    for _ in range(5):
        output = scheduler.schedule()
        has_mask.append(bool(output.grammars))
        sampled = {"g": 9} if len(has_mask) >= 3 else {}
        scheduler.update_from_output(output, ModelRunnerOutput(sampled))
    assert has_mask == [False, False, True, True, True]


def test_abort_removes_a_request_that_was_passed_over():
    scheduler = make_checked(40).scheduler
    grammar = Grammar()
    add(scheduler, "g", grammar)
    scheduler.schedule()
    scheduler.finish_requests(["g"], RequestStatus.FINISHED_ABORTED)
    assert grammar.is_closed and not scheduler.skipped and not scheduler.has_unfinished_requests()
    ended = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput()).finished
    assert ended["g"].finish_reason == "abort"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_random_mixes_with_preemptions_end_as_without_grammars(async_scheduling, policy):
    """Every invariant is checked in every step by the harness; grammars change when a token comes, never which."""
    ends = []
    for has_grammars in (False, True):
        checked = make_checked(9, async_scheduling=async_scheduling, policy=policy, max_num_batched_tokens=32)
        rng = random.Random(8)
        for index in range(14):
            grammar = Grammar(automatic=True) if has_grammars and index % 2 else None
            lengths = rng.randint(1, 60), rng.randint(1, 40)
            request = make_request(f"r{index}", *lengths, priority=rng.randrange(3), eos=2, grammar=grammar)
            checked.add(request)
        ends.append(run(checked))
        assert checked.scheduler.make_stats().num_preemptions > 0
    assert ends[0] == ends[1]
