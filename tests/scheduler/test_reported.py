"""Failures that users of other engines reported, as far as the scheduler alone shows them; named by case id."""

import itertools
import random
from collections.abc import Callable

import pytest

from scheduler.block_hash import DIGEST_BYTES, extend_block_hashes, root_digest
from scheduler.verify import CheckedScheduler
from tests.scheduler.requests_for_tests import ids, make_checked, make_request, run


def lengths(ended: dict[str, tuple[list[int], str]]) -> dict[str, tuple[int, str]]:
    return {request_id: (len(tokens), reason) for request_id, (tokens, reason) in ended.items()}


def test_a01_what_can_never_be_placed_is_refused_and_blocks_nobody():
    checked = make_checked(4)
    with pytest.raises(ValueError, match=r"prompt has 100 tokens.*KV pool of 64 slots"):
        checked.add(make_request("big", list(range(1, 101)), max_tokens=4))
    checked.add(make_request("small", [7, 8, 9], max_tokens=4))
    checked.add(make_request("fit", 60, max_tokens=5))
    checked.add(make_request("fit+1", 60, max_tokens=6))
    assert lengths(run(checked)) == {"small": (4, "length"), "fit": (5, "length"), "fit+1": (5, "length")}


def test_a02_a_prompt_at_the_context_limit():
    checked = make_checked(32, max_model_len=32)
    for length in (32, 33):
        with pytest.raises(ValueError, match=rf"prompt has {length} tokens, but max_model_len=32 allows at most 31"):
            checked.add(make_request("over", length, max_tokens=10))
    checked.add(make_request("limit", 31, max_tokens=10))
    checked.add(make_request("normal", 5, max_tokens=3))
    limit = checked.scheduler.requests["limit"]
    assert lengths(run(checked)) == {"limit": (1, "length"), "normal": (3, "length")}
    assert limit.num_computed_tokens == 31, "no position >= 32 is computed"


def test_a03_a_prompt_wholly_in_the_cache_still_computes_its_last_block():
    hits = []
    for length in (1, 15, 16, 17, 32, 63, 64, 65):
        checked = make_checked(32)
        outputs = []
        for turn in range(3):
            checked.add(make_request(f"r{turn}", ids(length), max_tokens=20))
            request = checked.scheduler.requests[f"r{turn}"]
            outputs.append(run(checked)[request.request_id])
            hits.append(request.num_cached_tokens)
        assert outputs[0] == outputs[1] == outputs[2]
    assert hits[0::3] == [0] * 8
    assert hits[1::3] == hits[2::3] == [0, 0, 0, 16, 16, 48, 48, 64]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a04_resumed_requests_with_prefix_hits_stay_inside_their_blocks(async_scheduling: bool):
    checked = make_checked(10, max_num_batched_tokens=32, async_scheduling=async_scheduling)
    for index in range(6):
        checked.add(make_request(f"r{index}", ids(40) + ids(8, seed=index + 1), max_tokens=60))
    assert set(lengths(run(checked, 2000)).values()) == {(60, "length")}
    stats = checked.scheduler.make_stats()
    assert stats.num_preemptions >= 1 and stats.prefix_cache_hits > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a06_aborts_at_awkward_times_are_reported_once(async_scheduling: bool):
    checked = make_checked(32, max_num_seqs=2, async_scheduling=async_scheduling)
    for index in range(1, 7):
        checked.add(make_request(f"r{index}", 20, max_tokens=12))
    checked.abort(["r5"])
    checked.abort(["r5", "r5"])
    checked.abort(["nope"])
    step_until(checked, lambda: checked.num_schedules == 2)
    checked.abort(["r1"])
    step_until(checked, lambda: len(checked.received.get("r2", ())) == 11)
    checked.schedule()
    checked.abort(["r2"])
    told = lengths(run(checked))
    assert {told[name] for name in ("r3", "r4", "r6")} == {(12, "length")}
    assert {name: told[name][1] for name in ("r1", "r2", "r5")} == dict.fromkeys(("r1", "r2", "r5"), "abort")


def step_until(checked: CheckedScheduler, condition: Callable[[], object]) -> None:
    while not condition():
        checked.step()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a07_a_recomputed_request_goes_on_where_it_was(caching: bool, async_scheduling: bool):
    checked = make_checked(8, caching=caching, max_num_batched_tokens=32, async_scheduling=async_scheduling)
    checked.add(make_request("p", 48, max_tokens=40))
    checked.add(make_request("q", 48, max_tokens=40))
    assert lengths(run(checked)) == {"p": (40, "length"), "q": (40, "length")}
    assert checked.scheduler.make_stats().num_preemptions >= 1


def test_a07_a_long_recomputation_samples_only_at_its_end():
    checked = make_checked(8, caching=False, max_num_batched_tokens=32)
    checked.add(make_request("p", 48, max_tokens=40))
    checked.add(make_request("q", 48, max_tokens=40))
    step_until(checked, lambda: checked.scheduler.make_stats().num_preemptions)
    step_until(checked, lambda: "p" not in checked.scheduler.requests)
    num_tokens = checked.scheduler.requests["q"].num_tokens
    chunks = []
    while not chunks or chunks[-1][1] is None:
        output = checked.schedule()
        chunks.append((output.num_scheduled_tokens["q"], checked.in_flight[0][1].sampled_token_ids.get("q")))
        checked.update()
    assert sum(count for count, _ in chunks) == num_tokens and len(chunks) == -(-num_tokens // 32) >= 2
    assert [token for _, token in chunks[:-1]] == [None] * (len(chunks) - 1)
    run(checked)


LO, HI, MID = ("lo", 5, 32, 40), ("hi", 0, 32, 40), ("mid", 3, 16, 20)


@pytest.mark.parametrize("order", list(itertools.permutations([LO, HI, MID])), ids=lambda o: "-".join(r[0] for r in o))
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a09_the_victim_is_the_least_urgent_and_leaves_the_step(order: tuple, async_scheduling: bool):
    checked = make_checked(6, policy="priority", async_scheduling=async_scheduling)
    for arrival, (name, priority, prompt, max_tokens) in enumerate(order):
        checked.add(make_request(name, prompt, max_tokens, priority=priority, arrival=float(arrival)))
        step_watching_victims(checked)
    while checked.scheduler.has_unfinished_requests():
        step_watching_victims(checked)
    checked.drain()


def step_watching_victims(checked: CheckedScheduler) -> None:
    """One synchronous turn; victims are less urgent than what goes on, and the queue is in order of urgency."""
    scheduler = checked.scheduler
    if len(checked.in_flight) == checked.max_in_flight:
        checked.update()
    output = checked.schedule()
    victims = [scheduler.requests[request_id] for request_id in output.preempted_request_ids]
    assert output.num_scheduled_tokens.keys().isdisjoint(output.preempted_request_ids)
    for victim in victims:
        assert all(victim.sort_key > request.sort_key for request in scheduler.running)
    waiting = [request.sort_key for request in scheduler.waiting]
    assert waiting == sorted(waiting)
    if not output.num_scheduled_tokens:
        while checked.in_flight:
            checked.update()


def test_a09_random_priorities():
    rng = random.Random(9)
    for draw in range(200):
        checked = make_checked(6, policy="priority", async_scheduling=draw % 2 == 0)
        for index in range(5):
            prompt, priority = rng.randint(1, 60), rng.randint(0, 3)
            checked.add(make_request(f"r{index}", prompt, 20, priority=priority, arrival=float(index)))
            step_watching_victims(checked)
        while checked.scheduler.has_unfinished_requests():
            step_watching_victims(checked)
        checked.drain()


def test_a11_children_share_their_prompt_blocks_and_end_in_waves():
    checked = make_checked(30, max_num_seqs=4)
    prompt = ids(40)
    for child in range(10):
        checked.add(make_request(f"{child}_r", prompt, max_tokens=6))
    checked.step()
    tables = [request.block_ids for request in checked.scheduler.running]
    assert len(tables) == 4 and len({tuple(table[:2]) for table in tables}) == 1
    assert len({block for table in tables for block in table}) == 2 + 4
    assert lengths(run(checked)) == {f"{child}_r": (6, "length") for child in range(10)}


def test_a11_an_aborted_family_leaves_nothing():
    checked = make_checked(30, max_num_seqs=4)
    children = [f"{child}_r" for child in range(4)]
    for child in children:
        checked.add(make_request(child, ids(40), max_tokens=100))
    for _ in range(5):
        checked.step()
    checked.abort(children)
    assert {reason for _, reason in run(checked).values()} == {"abort"}
    assert not checked.scheduler.requests and not checked.scheduler.running and not len(checked.scheduler.waiting)


def test_a13_the_salt_and_every_earlier_token_are_part_of_a_hash():
    checked = make_checked(32)
    prompt = ids(64)
    changed = [*prompt[:3], prompt[3] + 1, *prompt[4:]]
    sent = [(prompt, "team-a"), (prompt, "team-b"), (prompt, None), (prompt, "team-a"), (changed, "team-a")]
    sent.append((ids(16, seed=1) + prompt[16:], "team-a"))
    hits = []
    for index, (tokens, salt) in enumerate(sent):
        request = make_request(f"r{index}", tokens, max_tokens=1, salt=salt)
        checked.add(request)
        run(checked)
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 0, 48, 0, 0]


def test_a13_a_hash_is_a_digest_of_parent_and_tokens():
    assert root_digest(None) != root_digest("team-a") != root_digest("cache_salt=team-a")
    hashes: list[bytes] = []
    extend_block_hashes(hashes, ids(70), 16, root_digest(None))
    assert len(set(hashes)) == 4 and all(len(digest) == DIGEST_BYTES == 32 for digest in hashes)
    step_by_step: list[bytes] = []
    for length in (15, 16, 17, 40, 70):
        extend_block_hashes(step_by_step, ids(70)[:length], 16, root_digest(None))
    assert step_by_step == hashes


def test_a14_references_never_drift():
    rng = random.Random(14)
    checked = make_checked(12, block_size=4, max_model_len=48, max_num_batched_tokens=16)
    templates = [ids(40, seed=template // 2) for template in range(8)]
    for index in range(2000):
        kind = rng.random()
        live = list(checked.scheduler.requests)
        if kind < 0.2 and len(live) < 10:
            checked.add(make_request(f"r{index}", rng.choice(templates)[: rng.randint(1, 40)], rng.randint(1, 9)))
        elif kind < 0.25 and live:
            checked.abort([rng.choice(live)])
        elif kind < 0.27:
            checked.scheduler.reset_prefix_cache()
        else:
            checked.step()
    checked.drain()
    assert checked.scheduler.make_stats().num_preemptions > 0


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 16])
@pytest.mark.parametrize("usable_blocks", [7, 20])
def test_a16_outputs_do_not_depend_on_async_scheduling(max_num_seqs: int, usable_blocks: int):
    results = []
    for async_scheduling in (False, True):
        checked = make_checked(
            usable_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=16, async_scheduling=async_scheduling
        )
        sizes = list(itertools.product((1, 5, 17, 33, 64, 90), (1, 2, 16, 30)))
        for index, (prompt, max_tokens) in enumerate(sizes):
            checked.add(make_request(f"r{index}", ids(prompt, seed=index), max_tokens, eos=2))
        results.append(run(checked, 5000))
        assert all(len(results[-1][f"r{index}"][0]) <= size[1] for index, size in enumerate(sizes))
    assert results[0] == results[1]
    assert {reason for _, reason in results[0].values()} == {"stop", "length"}
