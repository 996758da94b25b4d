"""Failures that users of other engines reported about scheduling and KV memory, on a real model; named by case id.

tests/scheduler/test_reported.py holds what the scheduler alone shows of them.
"""

import itertools
import random

import pytest

from tests.engine.tiny_core import VOCAB_SIZE, TinyCore, ids, solo

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 0.8, "seed": 11, "repetition_penalty": 1.3, "logprobs": 2},
]
all_depths = pytest.mark.parametrize("depth", [1, 2, 3], ids=["sync", "async", "ahead"])


@all_depths
def test_a01_a_prompt_beyond_the_pool_ends_at_once_and_blocks_nobody(depth: int):
    core = TinyCore(usable_blocks=4, depth=depth)
    core.add("big", ids(100), max_tokens=4)
    core.add("small", [7, 8, 9], max_tokens=4)
    core.add("fit", ids(60), max_tokens=4)
    core.add("fit+1", ids(60, 1), max_tokens=5)
    ended = core.run(100)
    assert ended["big"] == ([], "error")
    assert ended["small"] == (solo([7, 8, 9], max_tokens=4), "length")
    assert ended["fit"] == (solo(ids(60), max_tokens=4), "length")
    assert ended["fit+1"] == (solo(ids(60, 1), max_tokens=4), "length")


def test_a02_no_position_beyond_the_context_limit_is_computed():
    core = TinyCore(max_model_len=32)
    for length in (31, 32, 33):
        core.add(str(length), ids(length), max_tokens=10)
    core.add("normal", ids(5), max_tokens=3)
    ended = core.run(100)
    assert ended["31"] == (solo(ids(31), max_tokens=1), "length")
    assert ended["32"] == ended["33"] == ([], "error")
    assert ended["normal"] == (solo(ids(5), max_tokens=3), "length")
    assert core.executor.largest_position() == 30


def test_a03_a_prompt_wholly_in_the_cache_gives_the_ids_of_an_engine_without_one():
    lengths = (1, 15, 16, 17, 32, 63, 64, 65)
    core = TinyCore()
    for turn in range(3):  # together within a turn: the prompts share nothing
        for length in lengths:
            core.add(f"{length}-{turn}", ids(length), max_tokens=20)
        while core.core.has_work():
            core.step()
    cached = [[core.num_cached_tokens[f"{length}-{turn}"] for length in lengths] for turn in range(3)]
    assert cached == [[0] * 8, [0, 0, 0, 16, 16, 48, 48, 64], [0, 0, 0, 16, 16, 48, 48, 64]]
    for length, turn in itertools.product(lengths, range(3)):
        assert core.ended[f"{length}-{turn}"] == (solo(ids(length), max_tokens=20), "length")


@all_depths
def test_a04_resumed_requests_with_prefix_hits_give_their_solo_ids(depth: int):
    core = TinyCore(usable_blocks=10, max_num_batched_tokens=32, depth=depth)
    prompts = [ids(40) + ids(8, seed=index + 1) for index in range(6)]
    for index, prompt in enumerate(prompts):
        core.add(f"r{index}", prompt, max_tokens=60)
    ended = core.run()
    assert core.num_preemptions >= 1 and core.core.metrics().scheduler.prefix_cache_hits > 0
    for index, prompt in enumerate(prompts):
        assert ended[f"r{index}"] == (solo(prompt, max_tokens=60), "length")


@all_depths
def test_a06_aborts_at_awkward_times_cost_no_other_request(depth: int):
    core = TinyCore(usable_blocks=32, max_num_seqs=2, depth=depth)
    for index in range(1, 7):
        core.add(f"r{index}", ids(20, seed=index), max_tokens=12)
    core.core.abort_requests(["r5"])
    core.core.abort_requests(["r5", "nope"])
    while len(core.tokens.get("r1", ())) < 2:
        core.step()
    core.core.abort_requests(["r1"])
    while len(core.tokens["r2"]) < 11:
        core.step()
    core.step(lambda: core.core.abort_requests(["r2"]))  # between the schedule of its last token and its arrival
    ended = core.run()
    assert {name for name, (_, reason) in ended.items() if reason == "abort"} == {"r1", "r2", "r5"}
    assert len(ended["r2"][0]) == 11 and len(ended["r1"][0]) < 12 and not ended["r5"][0]
    for index in (3, 4, 6):
        assert ended[f"r{index}"] == (solo(ids(20, seed=index), max_tokens=12), "length")


@all_depths
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "seeded", "penalised"])
def test_a07_a_preempted_request_gives_its_solo_ids(params: dict, caching: bool, depth: int):
    core = TinyCore(usable_blocks=8, caching=caching, max_num_batched_tokens=32, depth=depth)
    prompts = {"p": ids(48), "q": ids(48, seed=1)}
    for name, prompt in prompts.items():
        core.add(name, prompt, max_tokens=40, **params)
    ended = core.run()
    assert core.num_preemptions >= 1
    for name, prompt in prompts.items():
        assert ended[name] == (solo(prompt, max_tokens=40, **params), "length")
        if "logprobs" in params:
            assert [position.token_ids[0] for position in core.logprobs[name]] == ended[name][0]


@pytest.mark.parametrize("order", list(itertools.permutations(["lo", "hi", "mid"])), ids="-".join)
def test_a09_victims_of_more_urgent_requests_give_their_solo_ids(order: tuple[str, ...]):
    requests = {"lo": (5, ids(32), 40), "hi": (0, ids(32, seed=1), 40), "mid": (3, ids(16), 20)}
    core = TinyCore(usable_blocks=6, policy="priority")
    for arrival, name in enumerate(order):
        priority, prompt, max_tokens = requests[name]
        core.add(name, prompt, priority, float(arrival), max_tokens=max_tokens)
        core.step()
    ended = core.run()
    assert core.num_preemptions >= 1
    for name, (_, prompt, max_tokens) in requests.items():
        assert ended[name] == (solo(prompt, max_tokens=max_tokens), "length")


def a16_requests() -> dict[str, tuple[list[int], dict]]:
    rng = random.Random(16)
    requests = {}
    for index, prompt_length in enumerate((1, 5, 17, 33, 64, 90) * 4):
        params = {"max_tokens": (1, 2, 15, 16, 17, 30)[(index + index // 6) % 6]}
        if index % 2:
            params |= {"temperature": 0.8, "seed": index, "stop_token_ids": rng.sample(range(VOCAB_SIZE), 9)}
            params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5}
        requests[f"r{index}"] = ids(prompt_length, seed=index), params
    return requests


@pytest.fixture(scope="module")
def a16_expected() -> dict[str, tuple[list[int], str]]:
    core = TinyCore(usable_blocks=40, max_num_seqs=4, max_num_batched_tokens=16, depth=1)
    for name, (prompt, params) in a16_requests().items():
        core.add(name, prompt, **params)
    return core.run()


@pytest.mark.parametrize("usable_blocks", [9, 20])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 16])
def test_a16_asynchronous_ids_are_the_synchronous_ones(max_num_seqs: int, usable_blocks: int, a16_expected):
    core = TinyCore(usable_blocks=usable_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
    requests = a16_requests()
    for name, (prompt, params) in requests.items():
        core.add(name, prompt, **params)
    assert core.run(1500) == a16_expected
    assert core.num_preemptions > 0 or max_num_seqs <= 2 or usable_blocks > 9  # what the small pool is for
    assert {reason for _, reason in a16_expected.values()} == {"stop", "length"}
    for name, (tokens, reason) in a16_expected.items():
        params = requests[name][1]
        assert len(tokens) <= params["max_tokens"]
        stops = [token in params.get("stop_token_ids", ()) for token in tokens]
        assert not any(stops[:-1]) and stops[-1] == (reason == "stop")
