"""Failures that users of other engines reported about compiling, padding and memory; named by case id.

F01's persistent programs are in test_program_store.py, its smallest buckets in tests/scheduler/test_buckets.py.
"""

import gc
import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from jaxvllm.executor import DeviceExecutor
from jaxvllm.model_runner import LOGPROB_POSITIONS
from scheduler.plan import PlanLayout
from tests.engine.dense import random_tensors, write_folder
from tests.engine.tiny_core import LIMITS, NUM_BLOCKS, VOCAB_SIZE, TinyCore, ids, shared_runner, solo
from tests.tiny_config import T_TINY

COMPILE_EVENT = "backend_compile_duration"


@contextmanager
def compiles() -> Iterator[list[str]]:
    """Collects an event for each program that XLA compiles."""
    events: list[str] = []

    def note(event: str, duration: float, **_: object) -> None:
        if event.endswith(COMPILE_EVENT):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def warm(core: TinyCore) -> TinyCore:
    list(shared_runner().warm_up())
    core.add("first", ids(3), max_tokens=2)
    core.run()
    return core


F01_SAMPLINGS = [
    {}, {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 20}, {"prompt_logprobs": 3}, {"min_tokens": 4},
    {"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "frequency_penalty": 0.5}, {"logit_bias": {7: 5.0}},
    {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.1}, {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "seed": 1, "logprobs": 2},
]  # fmt: skip


def test_f01_nothing_compiles_after_the_warm_up():
    roomy, tight = (warm(TinyCore(usable_blocks=n, max_num_seqs=16)) for n in (NUM_BLOCKS - 1, 16))
    with compiles() as events:
        for count in range(1, 17):
            for i in range(count):
                roomy.add(f"{count}-{i}", ids(1 + (7 * i + count) % 20, i), max_tokens=2)
            roomy.run()
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 254):
            roomy.add(f"length {length}", ids(length), max_tokens=2)
        roomy.run()
        for i, sampling in enumerate(F01_SAMPLINGS):
            roomy.add(f"sampling {i}", ids(5 + i), max_tokens=5, **sampling)
        for _ in range(6):
            roomy.step()
        roomy.core.abort_requests(["sampling 0", "sampling 9"])
        roomy.run()
        for i, num_shared in enumerate((0, 16, 32, 48)):  # prefix hits of 0 to 3 blocks
            roomy.add(f"hit {i}", ids(64)[:num_shared] + ids(9, i), max_tokens=2)
        roomy.run()
        for i in range(12):
            tight.add(f"tight {i}", ids(20 + i), max_tokens=30, **F01_SAMPLINGS[i])
        tight.run()
    assert tight.num_preemptions > 0
    assert not events


def test_f01_the_counter_of_these_tests_counts():
    with compiles() as events:
        jax.jit(lambda x: x * 3.25 + 7)(np.float32(1))
    assert len(events) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("f") / "t-tiny", T_TINY, random_tensors(T_TINY))


SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}


def test_f01_without_compile_ahead_nothing_is_compiled_at_the_start(folder):
    from jaxvllm.engine_args import EngineArgs

    executor = DeviceExecutor(EngineArgs(folder, device="cpu", **SMALL).create_engine_config(8192))
    called_by: list[threading.Thread] = []
    executor.initialize(lambda: called_by.append(threading.current_thread()))
    assert executor.metrics()["num_programs"] == 0
    assert len(called_by) == 1 and called_by[0] is not threading.main_thread()
    executor.shutdown()


F02_LENGTHS = (5, 16, 17, 31, 33, 1, 64, 2, 48)


def written_blocks(core: TinyCore, num_plans: int) -> set[tuple[int, int]]:
    """(block, offset) of every token in the plans made since there were num_plans."""
    slots: set[tuple[int, int]] = set()
    for plan in core.executor.plans[num_plans:]:
        fields = PlanLayout.make(plan.key, LIMITS).unpack(plan.buffer)
        assert (fields["slot_mapping"] >= 0).all() and not fields["slot_mapping"][plan.num_tokens :].any()
        slots |= {divmod(int(slot), LIMITS.block_size) for slot in fields["slot_mapping"][: plan.num_tokens]}
    return slots


@pytest.mark.parametrize("num_requests", range(1, 10))
def test_f02_pads_touch_no_slot_and_the_last_request_of_a_batch_is_right(num_requests: int):
    core = TinyCore(caching=False, depth=1, max_num_seqs=16)
    # Takes the first blocks, so that the pool's last ones come into use.
    for i, length in enumerate((226, 226, 1) if num_requests == 9 else ()):
        core.add(f"filler {i}", ids(length), max_tokens=24)
    for i in range(num_requests):
        core.add(f"r{i}", ids(F02_LENGTHS[i], i), max_tokens=24)
    runner, used = shared_runner(), set()
    before = np.asarray(runner.kv_cache)
    while core.core.has_work():
        num_plans = len(core.executor.plans)
        core.step()
        after, slots = np.asarray(runner.kv_cache), written_blocks(core, num_plans)
        untouched = np.ones((NUM_BLOCKS, LIMITS.block_size), bool)
        untouched[0] = False  # the null block takes what pads write
        for block, offset in slots:
            untouched[block, offset] = False
        same = (after == before) | (np.isnan(after) & np.isnan(before))
        assert same.transpose(1, 4, 0, 2, 3, 5)[untouched].all()
        assert not np.isnan(after.transpose(1, 4, 0, 2, 3, 5)[~untouched]).any() or not slots
        before, used = after, used | {block for block, _ in slots}
    if num_requests == 9:
        assert NUM_BLOCKS - 1 in used, "the last block was not in use"
    for i in range(num_requests):
        assert core.ended[f"r{i}"] == (solo(ids(F02_LENGTHS[i], i), max_tokens=24), "length")


def test_f03_the_most_expensive_requests_at_once_work_in_pieces_of_bounded_size():
    core = warm(TinyCore(max_num_seqs=16))
    for i in range(8):
        core.add(f"prompt {i}", ids(250, i), max_tokens=3, prompt_logprobs=20)
    for i in range(16):
        sampling = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.3, "seed": i}
        core.add(f"sampled {i}", ids(3, i), max_tokens=12, logprobs=20, **sampling)
    ended = core.run()
    assert {name: len(tokens) for name, (tokens, _) in ended.items() if name != "first"} == (
        {f"prompt {i}": 3 for i in range(8)} | {f"sampled {i}": 12 for i in range(16)}
    )
    # Logits and their logprobs, float32, of one chunk of positions, however long the prompts are.
    programs = shared_runner().programs
    assert (programs.workspace_bytes("logprobs") or 0) <= 6 * LOGPROB_POSITIONS * VOCAB_SIZE * 4


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def no_garbage_collection():
    """What is freed then, is freed at once: the next engine does not wait for a collection to find its memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_f05_engines_in_one_process_leave_nothing_behind(folder, tmp_path, no_garbage_collection):
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    before, threads, texts = live_bytes(), threading.active_count(), []
    for _ in range(2):
        engine = Engine(folder, device="cpu", multiprocess=False, **SMALL)
        texts.append(engine.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids)
        assert live_bytes() > before + (1 << 20)
        engine.shutdown()
        del engine
        assert live_bytes() <= 1.05 * before
        assert threading.active_count() <= threads + 1
    assert texts[0] == texts[1]
    broken = random_tensors(T_TINY)
    del broken["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        Engine(write_folder(tmp_path / "broken", T_TINY, broken), device="cpu", multiprocess=False, **SMALL)
    gc.collect()  # the error's traceback held the loader
    assert live_bytes() <= 1.05 * before


Mix = list[tuple[int, str, list[int], dict]]  # step of arrival, id, prompt, sampling


def agents() -> Mix:
    """W1: sessions with a long shared prefix, each turn longer than the one before and sent after it."""
    rng, requests = random.Random(1), []
    histories = {session: ids(96) for session in range(4)}
    for turn, session in itertools.product(range(3), range(4)):
        histories[session] = histories[session] + [rng.randrange(256) for _ in range(rng.randrange(8, 30))]
        requests.append((40 * turn + session, f"s{session}t{turn}", list(histories[session]), {"max_tokens": 6}))
    return requests


def rollouts() -> Mix:
    """W2: many samples of each prompt, with seeds."""
    return [
        (0, f"p{p}n{n}", ids(20 + 5 * p, p), {"max_tokens": 10, "temperature": 1.0, "seed": 100 * p + n})
        for p, n in itertools.product(range(4), range(4))
    ]


def long_and_short() -> Mix:
    """W4: bursts of short requests around long prompts."""
    rng, step, requests = random.Random(0), 0.0, []
    for i in range(20):
        step += rng.gammavariate(0.25, 12.0)
        requests.append((int(step), f"r{i}", ids(rng.randrange(1, 40), i), {"max_tokens": rng.randrange(1, 14)}))
    return sorted([*requests, *((15 * i, f"long {i}", ids(225, i), {"max_tokens": 8}) for i in range(3))])


def run_mix(mix: Mix, usable_blocks: int = NUM_BLOCKS - 1, **settings) -> TinyCore:
    core, waiting, step = TinyCore(usable_blocks=usable_blocks, **settings), list(mix), 0
    while waiting or core.core.has_work():
        while waiting and waiting[0][0] <= step:
            _, request_id, prompt, sampling = waiting.pop(0)
            core.add(request_id, prompt, **sampling)
        core.step()
        step += 1
        assert step < 3000
    assert len(core.ended) == len(mix)
    return core


@pytest.mark.parametrize("mix", [agents, rollouts, long_and_short], ids=["W1", "W2", "W4"])
def test_f08_caching_chunks_and_overlap_change_no_result(mix):
    requests = mix()
    expected = run_mix(requests, caching=False, depth=1).ended
    for caching, tokens, depth in itertools.product((True, False), (64, 16), (2, 3)):
        settings = {"caching": caching, "max_num_batched_tokens": tokens, "depth": depth}
        assert run_mix(requests, **settings).ended == expected, settings
    tight = run_mix(requests, usable_blocks=17)
    assert tight.ended == expected


def test_f08_agents_find_their_shared_prefix_in_the_cache():
    requests = agents()
    core = run_mix(requests)
    possible = found = 0
    seen: set[tuple[int, ...]] = set()
    for _, request_id, prompt, _ in requests:
        blocks = [tuple(prompt[: end + 16]) for end in range(0, len(prompt) - 16, 16)]
        possible += sum(block in seen for block in blocks)
        found += core.num_cached_tokens.get(request_id, 0) // 16
        seen |= set(blocks)
    assert found >= 0.9 * possible > 0


def test_f08_likelihoods_of_many_prompts_at_once_are_those_of_each_alone():
    # W3: an evaluation, max_tokens 1 and prompt_logprobs 0.
    prompts = [ids(5 + 9 * i, i) for i in range(24)]
    together, apart = TinyCore(max_num_seqs=16), TinyCore(caching=False, depth=1)
    for i, prompt in enumerate(prompts):
        together.add(f"r{i}", prompt, max_tokens=1, prompt_logprobs=0, logprobs=0)
        apart.add(f"r{i}", prompt, max_tokens=1, prompt_logprobs=0, logprobs=0)
        apart.run()
    together.run()
    for name, alone in apart.logprobs.items():
        for got, wanted in zip(together.logprobs[name], alone, strict=True):
            np.testing.assert_allclose(
                np.asarray(got.logprobs, float), np.asarray(wanted.logprobs, float), rtol=0, atol=1e-4
            )
