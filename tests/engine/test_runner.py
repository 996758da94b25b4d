import logging

import numpy as np
import pytest

from jaxvllm.compile_cache import CompileAfterWarmupError
from scheduler.batch import BatchLimits
from scheduler.buckets import explicit
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


def run(policy=POLICY, chunk=1000, depth=1, prompts=PROMPTS, **params):
    loop = Loop(LIMITS, policy, make_runner(LIMITS, policy, 300), chunk)
    for request_id, prompt in prompts.items():
        loop.add(request_id, prompt, 9, **params)
    return loop.run(depth), loop


@pytest.mark.parametrize(("chunk", "depth"), [(1000, 1), (3, 1), (7, 2)])
def test_greedy_tokens_equal_a_dense_model_with_chunks_and_a_step_in_flight(expected, chunk, depth):
    assert run(chunk=chunk, depth=depth)[0] == expected


def test_more_admissions_than_a_step_holds_run_first(expected):
    prompts = {f"{request_id}-{i}": prompt for i in range(3) for request_id, prompt in PROMPTS.items()}
    prompts = {request_id: prompt for request_id, prompt in prompts.items() if len(prompt) < 31}
    prompts |= {f"x{i}": [i + 1] for i in range(4)}
    assert len(prompts) == 19
    got, loop = run(prompts=prompts)
    assert all(got[request_id] == expected[request_id.split("-")[0]] for request_id in got if "-" in request_id)
    assert "admit" in loop.runner.programs.programs()


def test_every_program_is_compiled_once_and_late_compiles_are_counted_and_named(caplog):
    with caplog.at_level(logging.WARNING):
        _, loop = run()
    programs = loop.runner.programs
    assert programs.num_late_compiles == len(programs.programs()) == len(programs.compile_seconds) > 1
    assert "decode(T=19, R=19)" in caplog.text


def test_after_warm_up_nothing_compiles_and_strict_mode_refuses_what_is_missing():
    limits, policy = BatchLimits(2, 32, 4), explicit(2, 16, [2], [16])
    runner = make_runner(limits, policy, 17, strict_compile=True)
    with pytest.raises(CompileAfterWarmupError, match=r"mixed\(T=16, R=2\)"):
        loop = Loop(limits, policy, runner)
        loop.add("a", [1, 2], 2)
        loop.run()
    assert list(runner.warm_up()) == policy.keys()
    loop = Loop(limits, policy, runner)
    loop.add("a", [1, 2], 3)
    assert len(loop.run()["a"]) == 3 and runner.programs.num_late_compiles == 0
    assert list(runner.warm_up()) == []
