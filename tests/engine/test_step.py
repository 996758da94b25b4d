import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.model_runner import ModelRunner
from scheduler.batch import BatchLimits
from scheduler.buckets import explicit, one_shape
from scheduler.plan import PlanLayout, StepPlan
from tests.engine import tiny_llama, toy
from tests.engine.toy import Loop

LIMITS = BatchLimits(max_num_seqs=16, max_model_len=160, block_size=16)
POLICY = explicit(16, 256, [1, 2, 4, 8, 16], [256])
NUM_BLOCKS = 41
PROMPT_LENGTHS = [5, 16, 17, 31, 33, 1, 64, 2, 48]
NUM_OUTPUTS = 24


@pytest.fixture(scope="module")
def llama() -> ModelRunner:
    return tiny_llama.make_runner(LIMITS, POLICY, NUM_BLOCKS)


def poison(runner: ModelRunner) -> None:
    """An empty pool in which reading any slot that nobody wrote gives NaN; block 0 too."""
    runner.initialize_kv_cache(NUM_BLOCKS)
    runner.kv_cache = jnp.full_like(runner.kv_cache, jnp.nan)


def check_untouched_slots(runner: ModelRunner, before: dict[str, np.ndarray], plan: StepPlan) -> None:
    after = np.asarray(runner.kv_cache)
    slots = PlanLayout.make(plan.key, LIMITS).unpack(plan.buffer)["slot_mapping"][: plan.num_tokens]
    is_written = np.zeros((NUM_BLOCKS, LIMITS.block_size), bool)
    is_written[slots // LIMITS.block_size, slots % LIMITS.block_size] = True
    written = after.transpose(1, 4, 0, 2, 3, 5)[is_written]
    assert np.isfinite(written).all()
    is_written[0] = True  # the null block, where pads write
    view = [pool.view(np.int32).transpose(1, 4, 0, 2, 3, 5)[~is_written] for pool in (before["pool"], after)]
    assert np.array_equal(*view)
    before["pool"] = after


def run_batch(runner: ModelRunner, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Greedy tokens of a batch whose first request has the pool's last block and the last row of the state."""
    poison(runner)
    before = {"pool": np.asarray(runner.kv_cache)}
    loop = Loop(LIMITS, POLICY, runner, blocks=range(NUM_BLOCKS - 1, 0, -1))
    for i in range(LIMITS.max_num_seqs):  # fill every row with a finished request: the last one is used first again
        loop.add(f"filler{i}", [1 + i], 1)
    loop.observe = lambda plan: check_untouched_slots(runner, before, plan)
    loop.run()
    loop.blocks = iter(range(NUM_BLOCKS - 1, 0, -1))
    for request_id, prompt in prompts.items():
        loop.add(request_id, prompt, NUM_OUTPUTS)
    outputs = loop.run()
    assert np.isnan(np.asarray(runner.kv_cache)).any(), "the pool was not poisoned"
    return {request_id: outputs[request_id] for request_id in prompts}


def test_f02_padding_touches_nothing_and_every_request_of_a_batch_equals_its_solo_run(llama):
    """Buckets 1, 2, 4, 8, 16 with batches of 1 to 9."""
    rng = np.random.default_rng(11)
    prompts = {f"r{n}": rng.integers(0, 264, n).tolist() for n in PROMPT_LENGTHS}
    solo = {request_id: run_batch(llama, {request_id: prompt})[request_id] for request_id, prompt in prompts.items()}
    assert all(len(set(tokens)) > 1 for tokens in solo.values())
    for size in (2, 3, 5, 9):
        batch = dict(list(prompts.items())[:size])
        assert run_batch(llama, batch) == {request_id: solo[request_id] for request_id in batch}, size
        batch = dict(list(prompts.items())[-size:])
        assert run_batch(llama, batch) == {request_id: solo[request_id] for request_id in batch}, -size


def copied_shapes(program_text: str) -> list[tuple[int, ...]]:
    """Shapes of what an optimised program copies: copy instructions, in fusions and loops too, and fused copies."""
    pattern = r"%(\S+) = (?:\()?\w+\[([\d,]*)\]\S* (?:.*?\) )?([\w-]+)\("
    found = re.findall(pattern, program_text)
    assert len(found) > 100, "the text is not understood"
    return [
        tuple(int(n) for n in sizes.split(",") if n)
        for name, sizes, op in found
        if op.startswith("copy") or "copy" in name
    ]


def test_no_program_copies_anything_of_the_cache_s_shape(llama):
    programs = llama.programs.programs()
    assert {key.kind for key in programs} == {"decode", "mixed"}
    shape = llama.config.kv_cache.shape(NUM_BLOCKS)
    cache_bytes = llama.config.kv_cache.block_bytes * NUM_BLOCKS
    for key, program in programs.items():
        text = program.as_text()
        of_the_cache = f"f32[{','.join(map(str, shape))}]"
        loops = [line for line in text.splitlines() if " while(" in line]
        assert any(of_the_cache in line for line in loops), "the loop over the layers carries the cache"
        assert f"f32[{key.R},264]" in text and (key.T == key.R or f"f32[{key.T},264]" not in text), "logits of R rows"
        # In any shape, and a layer of it too, which would be copied once a layer.
        assert all(math.prod(copied) < math.prod(shape[1:]) for copied in copied_shapes(text)), key
        assert program.memory_analysis().alias_size_in_bytes >= cache_bytes, key


MIXED_PARAMS = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.3, "top_k": 7, "seed": 2**40 + 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 30, "top_p": 0.95, "seed": 4},
    {},
    {"temperature": 0.8, "seed": 5, "min_tokens": 6, "stop_token_ids": [7, 8, 9]},
    {"min_tokens": 3, "stop_token_ids": list(range(40))},
]


def run_mixed(runner: ModelRunner, chunk: int, depth: int, only: int | None = None) -> dict[str, list[int]]:
    runner.initialize_kv_cache(200)
    loop = Loop(runner.config.limits, runner.config.policy, runner, chunk)
    rng = np.random.default_rng(4)
    for i, params in enumerate(MIXED_PARAMS):
        prompt = rng.integers(1, 53, 3 + 4 * i).tolist()
        if only in (None, i):
            loop.add(f"r{i}", prompt, 12, **params)
    return loop.run(depth)


def test_draws_do_not_depend_on_bucket_batch_chunks_or_steps_in_flight():
    limits = BatchLimits(8, 64, 4)
    small = toy.make_runner(limits, explicit(8, 128, [1, 8], [128]), 200)
    expected = run_mixed(small, chunk=1000, depth=1)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(MIXED_PARAMS)
    assert not set(expected["r5"][:6]) & {0, 7, 8, 9} and min(expected["r6"][:3]) >= 40
    one_program = toy.make_runner(limits, one_shape(8, 161), 200)
    assert run_mixed(one_program, chunk=5, depth=2) == expected
    assert run_mixed(small, chunk=7, depth=2) == expected
    for i in range(len(MIXED_PARAMS)):
        assert run_mixed(small, chunk=7, depth=1, only=i)[f"r{i}"] == expected[f"r{i}"]
