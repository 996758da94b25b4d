import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.compile_cache import CompileAfterWarmupError, CompileCache
from jaxvllm.kv_cache import KVCacheSpec, num_blocks_that_fit
from jaxvllm.model_runner import ModelRunner
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, explicit, one_shape
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.plan import Planner
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import make_scheduler
from tests.engine.toy import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, Loop, make_runner, toy_params

LIMITS = BatchLimits(max_num_seqs=19, max_model_len=96, block_size=4)
POLICY = explicit(19, 128, [4, 19], [32, 128])
rng = np.random.default_rng(3)
PROMPTS = {f"r{n}": rng.integers(1, 53, n).tolist() for n in (5, 16, 17, 31, 1, 2)}


def dense_greedy(prompt: list[int], num_outputs: int) -> list[int]:
    """The toy model without cache, batch or padding, in float64."""
    p = {name: np.asarray(w, np.float64) for name, w in toy_params().items()}
    ids = list(prompt)
    for _ in range(num_outputs):
        n = len(ids)
        x = p["embed"][ids] + p["position"][:n]
        for i in range(LAYERS):
            q = (x @ p["q"][i]).reshape(n, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            k, v = np.split((x @ p["kv"][i]).reshape(n, 2 * KV_HEADS, HEAD_DIM), 2, axis=1)
            scores = np.einsum("tkgh,skh->kgts", q, k) * HEAD_DIM**-0.5
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended = np.einsum("kgts,skh->tkgh", weights / weights.sum(-1, keepdims=True), v)
            x = x + attended.reshape(n, HIDDEN) @ p["o"][i]
        ids.append(int(np.argmax(x[-1] @ p["head"])))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {request_id: dense_greedy(prompt, 9) for request_id, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(LIMITS, POLICY, 300)


def run(runner: ModelRunner, chunk=1000, depth=1, prompts=PROMPTS) -> dict[str, list[int]]:
    runner.initialize_kv_cache(300)
    loop = Loop(LIMITS, POLICY, runner, chunk)
    for request_id, prompt in prompts.items():
        loop.add(request_id, prompt, 9)
    return loop.run(depth)


@pytest.mark.parametrize(("chunk", "depth"), [(1000, 1), (3, 1), (7, 3)])
def test_greedy_tokens_equal_a_dense_model_with_chunks_and_steps_in_flight(runner, expected, chunk, depth):
    assert run(runner, chunk, depth) == expected


def test_more_admissions_than_a_step_holds_run_first(runner, expected):
    prompts = {f"{request_id}-{i}": prompt for i in range(3) for request_id, prompt in PROMPTS.items()}
    prompts = {request_id: prompt for request_id, prompt in prompts.items() if len(prompt) < 31}
    prompts |= {f"x{i}": [i + 1] for i in range(4)}
    assert len(prompts) == 19
    got = run(runner, prompts=prompts)
    assert all(got[request_id] == expected[request_id.split("-")[0]] for request_id in got if "-" in request_id)
    assert "admit" in runner.programs.programs()


def serve(runner: ModelRunner, num_blocks: int, is_async: bool, **params) -> tuple[dict[str, list[int]], int]:
    """All prompts twice through the real scheduler; gives the tokens and the number of pre-emptions."""
    runner.initialize_kv_cache(300)
    config = SchedulerConfig(LIMITS.max_num_seqs, 128, LIMITS.max_model_len, async_scheduling=is_async)
    scheduler = make_scheduler(config, CacheConfig(LIMITS.block_size, num_blocks))
    planner = Planner(LIMITS, POLICY, seed=0)
    outputs: dict[str, list[int]] = {}
    for copy in range(2):
        for i, (request_id, prompt) in enumerate(PROMPTS.items()):
            sampling = SamplingParams(max_tokens=9, ignore_eos=True, **{"temperature": 0.0, "seed": i} | params)
            scheduler.add_request(Request(f"{request_id}-{copy}", prompt, sampling, eos_token_id=0))
            outputs[f"{request_id}-{copy}"] = []
    in_flight = []
    for _ in range(500):
        output = scheduler.schedule()
        plan = planner.build(output)
        if plan is not None:
            in_flight.append((output, runner.execute(plan)))
        if in_flight and (plan is None or len(in_flight) == 1 + is_async):
            output, handle = in_flight.pop(0)
            result = scheduler.update_from_output(output, handle.wait())
            for request_id, token in zip(result.request_ids, result.new_token_ids, strict=True):
                outputs[request_id].append(token)
        if not in_flight and not scheduler.has_requests():
            return outputs, scheduler.make_stats().num_preemptions
    raise AssertionError("the requests do not end")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_scheduler_and_runner_give_the_dense_tokens_with_prefix_hits_and_preemptions(runner, expected, is_async):
    got, num_preemptions = serve(runner, 26, is_async)
    assert num_preemptions > 3
    assert got == {f"{request_id}-{copy}": expected[request_id] for copy in range(2) for request_id in PROMPTS}


def test_draws_are_the_same_in_synchronous_and_asynchronous_mode_and_after_preemptions(runner):
    params = {"temperature": 1.0, "top_p": 0.9}
    roomy, none = serve(runner, 250, False, **params)
    assert none == 0 and roomy["r31-0"] == roomy["r31-1"] != roomy["r5-0"]
    for is_async in (False, True):
        tight, num_preemptions = serve(runner, 26, is_async, **params)
        assert num_preemptions > 3 and tight == roomy


def test_every_program_is_compiled_once_and_late_compiles_are_counted_and_named(caplog):
    limits, policy = BatchLimits(2, 32, 4), explicit(2, 16, [2], [16])
    runner = make_runner(limits, policy, 17)
    for _ in range(2):
        loop = Loop(limits, policy, runner)
        loop.add("a", [1, 2], 3)
        with caplog.at_level(logging.INFO):
            loop.run()
    assert runner.programs.num_late_compiles == len(runner.programs.compile_seconds) == 2
    assert [r.message.split(" while")[0] for r in caplog.records if "Compiled" in r.message] == [
        "Compiled mixed(T=16, R=2)",
        "Compiled decode(T=2, R=2)",
    ]


def test_after_warm_up_nothing_compiles_and_strict_mode_refuses_what_is_missing():
    limits, policy = BatchLimits(2, 32, 4), one_shape(2, 16)
    runner = make_runner(limits, policy, 17, strict_compile=True)
    with pytest.raises(CompileAfterWarmupError, match=r"mixed\(T=16, R=2\)"):
        loop = Loop(limits, policy, runner)
        loop.add("a", [1, 2], 2)
        loop.run()
    # They come in the order in which they are ready.
    assert set(runner.warm_up()) == set(runner.program_keys()) > set(policy.keys())
    assert list(runner.warm_up()) == []
    loop = Loop(limits, policy, runner)
    loop.add("a", [1, 2], 3)
    assert len(loop.run()["a"]) == 3 and runner.programs.num_late_compiles == 0


def test_a_compile_after_warm_up_is_counted_and_warned_of(caplog):
    cache = CompileCache(lambda key: jax.jit(lambda: 0).lower())
    assert list(cache.compile_all(["admit"])) == ["admit"] and cache.num_late_compiles == 0
    for _ in range(2):
        cache.get(BucketKey("decode", 4, 4))
    assert cache.num_late_compiles == 1
    assert [(r.levelname, r.message.split(" in ")[0]) for r in caplog.records if "Compiled" in r.message] == [
        ("WARNING", "Compiled decode(T=4, R=4) while serving,")
    ]


def test_the_pool_is_sized_from_what_is_free_and_says_how_many_tokens_fit():
    spec = KVCacheSpec(3, 2, 16, 4, jnp.dtype(jnp.bfloat16))
    assert spec.block_bytes == 3 * 2 * 2 * 4 * 16 * 2 and spec.shape(7) == (3, 7, 2, 2, 4, 16)
    limits = BatchLimits(4, 30, 4)
    assert num_blocks_that_fit(spec, limits, 20 * spec.block_bytes + 5, workspace_bytes=spec.block_bytes) == 19
    assert num_blocks_that_fit(spec, limits, 9 * spec.block_bytes) == 9  # 8 blocks hold 30 tokens, and the null block
    with pytest.raises(ValueError, match=r"room for 28 tokens.*max_model_len=30.*at most 28"):
        num_blocks_that_fit(spec, limits, 8 * spec.block_bytes)
    with pytest.raises(
        ValueError, match=r"room for 0 tokens.*GiB: raise gpu_memory_utilization.*kv_cache_memory_bytes"
    ):
        num_blocks_that_fit(spec, limits, spec.block_bytes)  # no length would fit


def test_a_pool_that_the_device_has_no_room_for_is_refused_with_its_size_and_what_chose_it():
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype=jnp.dtype("float32"))
    num_blocks = 10**15 // spec.block_bytes
    with pytest.raises(ValueError, match=rf"{(num_blocks - 1) * 16:,} tokens .*GiB\): lower .*kv_cache_memory_bytes"):
        spec.allocate(num_blocks)


def test_a_large_pool_has_a_round_number_of_blocks_so_that_a_later_start_finds_its_programs():
    spec = KVCacheSpec(3, 2, 16, 4, jnp.dtype(jnp.bfloat16))
    fits = {n: num_blocks_that_fit(spec, BatchLimits(4, 30, 4), n * spec.block_bytes) for n in range(66000, 66600, 7)}
    assert len(set(fits.values())) <= 4
    assert all(0.99 * n < fits[n] <= n for n in fits)
    limits = BatchLimits(4, 4 * 66000, 4)  # one request takes nearly all of it: nothing to spare
    assert num_blocks_that_fit(spec, limits, 66001 * spec.block_bytes) == 66001


def test_what_the_compiler_says_about_workspace_is_kept(runner):
    key = POLICY.select("mixed", 128, 19)
    runner.programs.get(key)
    assert (runner.programs.workspace_bytes(key) or 0) > 128 * HIDDEN * 4


def test_another_size_of_the_pool_drops_the_programs_made_for_the_first():
    limits, policy = BatchLimits(2, 32, 4), one_shape(2, 16)
    runner = make_runner(limits, policy, 17)
    # They come in the order in which they are ready.
    assert set(runner.warm_up()) == set(runner.program_keys()) > set(policy.keys())
    runner.set_num_blocks(17)
    assert runner.programs.programs()
    runner.initialize_kv_cache(19)
    assert not runner.programs.programs()
    loop = Loop(limits, policy, runner)
    loop.add("a", [1, 2], 3)
    assert len(loop.run()["a"]) == 3
