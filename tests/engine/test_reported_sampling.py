"""Failures that users of other engines reported about sampling and logprobs, on the real engine; named by case id.

tests/engine/test_reported_sampler.py holds those that the sampler alone shows.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from tests.engine.dense import dense_logits, random_tensors, successor_tensors, write_folder
from tests.engine.tiny_core import EXECUTOR, TinyCore, ids, solo
from tests.tiny_config import T_TINY

TARGET = {"seed": 42, "temperature": 0.8, "top_p": 0.95, "max_tokens": 24}
COMPANY = {
    "one": [{"temperature": 1.0}],
    "seven": [{"temperature": 1.0, "top_p": 0.5}] * 7,
    "mixed": [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.9, "min_p": 0.1}],
    "penalised": [{"temperature": 1.0, "repetition_penalty": 1.5}, {"logit_bias": {3: 5.0}}, {"logprobs": 3}],
}
ONE_SHAPE = {
    "device": "cpu", "multiprocess": False, "max_num_seqs": 4, "bucket_policy": "one_shape", "max_model_len": 256,
    "kv_cache_memory_bytes": 1 << 22,
}  # fmt: skip


@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
@pytest.mark.parametrize("place", ["first", "middle", "last", "late"])
def test_c01_a_seeded_request_does_not_change_with_its_company(place: str, max_num_batched_tokens: int):
    prompt = ids(12)
    expected = solo(prompt, **TARGET)
    for company in COMPANY.values():
        core = TinyCore(max_num_batched_tokens=max_num_batched_tokens)
        others = [(f"other{i}", ids(9 + i, seed=i), {"max_tokens": 30} | p) for i, p in enumerate(company)]
        at = {"first": 0, "middle": len(others) // 2}.get(place, len(others))
        for index, (name, other, params) in enumerate(others):
            if index == at:
                core.add("target", prompt, **TARGET)
            core.add(name, other, **params)
        for _ in range(9 if place == "late" else 0):
            core.step()
        if at == len(others):
            core.add("target", prompt, **TARGET)
        assert core.run()["target"] == (expected, "length"), company


def tiny_engine(folder: Path, **kwargs) -> Engine:
    sizes = {"max_num_batched_tokens": 64, "max_model_len": 256}
    return Engine(folder, executor=EXECUTOR, multiprocess=False, device="cpu", **sizes, **kwargs)


def run(engine: Engine, prompt: list[int], **params):
    wanted = SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | params)
    return engine.generate([prompt], wanted, use_tqdm=False)[0].outputs


def test_c01_unseeded_requests_differ_from_each_other_and_from_run_to_run_and_seed_0_is_a_seed(model_folder):
    first, second = (tiny_engine(model_folder, seed=None) for _ in range(2))
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    runs = [o.outputs[0].token_ids for o in first.generate([ids(12)] * 2, params, use_tqdm=False)]
    runs += [run(first, ids(12), temperature=1.5)[0].token_ids, run(second, ids(12), temperature=1.5)[0].token_ids]
    assert len({tuple(tokens) for tokens in runs}) == 4
    seeded = [run(engine, ids(12), temperature=1.5, seed=0)[0].token_ids for engine in (first, second)]
    assert seeded[0] == seeded[1]


def test_c02_completion_i_of_n_is_the_single_run_with_seed_plus_i(model_folder):
    engine = tiny_engine(model_folder)
    singles = [run(engine, ids(12), seed=seed, temperature=1.2)[0].token_ids for seed in (7, 8, 9)]
    assert [o.token_ids for o in run(engine, ids(12), n=3, seed=7, temperature=1.2)] == singles
    assert len({tuple(tokens) for tokens in singles}) == 3
    with pytest.raises(ValueError, match="n=3 must be 1 for greedy"):
        SamplingParams(n=3, temperature=0.0)


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_c02_draws_survive_preemption_chunks_and_prefix_hits(caching: bool):
    core = TinyCore(usable_blocks=7, caching=caching, max_num_batched_tokens=16)
    for seed in (7, 8, 9):
        core.add(f"r{seed}", ids(34), seed=seed, temperature=1.2, max_tokens=30)
    ended = core.run()
    assert core.num_preemptions >= 1
    for seed in (7, 8, 9):
        assert ended[f"r{seed}"] == (solo(ids(34), seed=seed, temperature=1.2, max_tokens=30), "length")


def test_c03_a_tiny_temperature_is_greedy(model_folder, caplog):
    engine = tiny_engine(model_folder)
    greedy = run(engine, ids(9), temperature=0.0)[0].token_ids
    for temperature in (1e-45, 1e-12, 1e-6):
        assert run(engine, ids(9), temperature=temperature)[0].token_ids == greedy
    assert not caplog.records
    assert SamplingParams(temperature=1e-3).temperature == 0.01 and "0.001 is raised to 0.01" in caplog.text
    assert run(engine, ids(9), temperature=2.1, seed=1)[0].token_ids != greedy
    for temperature in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature="):
            SamplingParams(temperature=temperature)


def test_c07_penalties_survive_a_preemption():
    params = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25, "max_tokens": 40}
    core = TinyCore(usable_blocks=8, max_num_batched_tokens=32)
    for name in "pq":
        core.add(name, ids(48, seed=ord(name)), **params)
    ended = core.run()
    assert core.num_preemptions >= 1
    for name in "pq":
        assert ended[name] == (solo(ids(48, seed=ord(name)), **params), "length")
        assert ended[name][0] != solo(ids(48, seed=ord(name)), max_tokens=40)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> tuple[Engine, dict]:
    """T-tiny whose logits a dense reference knows, in chunks of 24 tokens."""
    tensors = random_tensors(T_TINY)
    folder = write_folder(tmp_path_factory.mktemp("t_tiny"), T_TINY, tensors)
    return Engine(folder, max_num_batched_tokens=24, **ONE_SHAPE), tensors


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


PROMPT = ids(50)


def test_c08_logprobs_are_of_the_raw_logits_with_the_sampled_token_and_its_rank(dense):
    engine, tensors = dense
    for params in (
        {"logprobs": 0},
        {"logprobs": 3, "temperature": 2.0, "seed": 1},
        {"logprobs": 20},
        {"logprobs": 2, "logit_bias": {5: -100.0}, "allowed_token_ids": [1, 2, 3], "repetition_penalty": 1.5},
    ):
        (output,) = run(engine, PROMPT, **{"temperature": 0.0, "max_tokens": 6} | params)
        expected = log_softmax(dense_logits(T_TINY, tensors, PROMPT + output.token_ids)[len(PROMPT) - 1 :])
        k = params["logprobs"]
        for token, position, row in zip(output.token_ids, output.logprobs, expected, strict=False):
            assert len(position) in (k, k + 1) or k == len(position) == 0
            assert position[token].rank == (row >= row[token]).sum()
            assert set(position) == {token, *np.argsort(-row)[:k].tolist()}
            for token_id, entry in position.items():
                assert entry.logprob == pytest.approx(row[token_id], abs=1e-4)
                assert entry.rank == (row >= row[token_id]).sum()
        total = sum(p[t].logprob for t, p in zip(output.token_ids, output.logprobs, strict=True))
        assert output.cumulative_logprob == pytest.approx(total)
    with pytest.raises(ValueError, match="logprobs=21 must be at most max_logprobs=20"):
        run(engine, PROMPT, logprobs=21)


def test_c08_decoded_tokens_complete_characters(tmp_path):
    """The tokens of a character that is not complete are empty, the last one carries the character."""
    config = T_TINY | {"hidden_size": 272, "num_hidden_layers": 1}
    tensors = successor_tensors(config)
    for token_id, next_id in {1: 261, 261: 167, 167: 173, 173: 115}.items():  # F0 9F, A7, AD: the compass; s
        tensors["lm_head.weight"][:, token_id] = np.eye(264, dtype=np.float32)[next_id]
    engine = Engine(write_folder(tmp_path, config, tensors), max_num_batched_tokens=16, **ONE_SHAPE)
    (output,) = run(engine, [1], temperature=0.0, max_tokens=4, logprobs=0)
    texts = [position[t].decoded_token for t, position in zip(output.token_ids, output.logprobs, strict=True)]
    assert (output.token_ids, texts) == ([261, 167, 173, 115], ["", "", "🧭", "s"])
    (output,) = run(engine, [1], temperature=0.0, max_tokens=1, logprobs=0, detokenize=False)
    assert output.logprobs[0][261].decoded_token is None


def test_c09_prompt_logprobs_are_complete_with_prefix_hits_chunks_and_company(dense):
    engine, tensors = dense
    expected = log_softmax(dense_logits(T_TINY, tensors, PROMPT))
    assert engine.reset_prefix_cache()
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    assert engine.generate([PROMPT], one, use_tqdm=False)[0].num_cached_tokens == 0
    assert engine.generate([PROMPT], one, use_tqdm=False)[0].num_cached_tokens == 48
    wanted = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
    decoding = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for company in (0, 3):
        params = [decoding] * company + [wanted]
        prompts = [ids(5, seed=i) for i in range(company)] + [PROMPT]
        output = engine.generate(prompts, params, use_tqdm=False)[-1]
        assert output.num_cached_tokens == 0 and len(output.prompt_logprobs) == 50
        assert output.prompt_logprobs[0] is None
        for i in range(1, 50):
            row, position = expected[i - 1], output.prompt_logprobs[i]
            assert set(position) == {PROMPT[i], *np.argsort(-row)[:2].tolist()}
            assert position[PROMPT[i]].rank == (row >= row[PROMPT[i]]).sum()
            for token_id, entry in position.items():
                assert entry.logprob == pytest.approx(row[token_id], abs=1e-4)


def test_c09_an_abort_in_the_middle_of_the_prompt_leaves_nothing_behind(dense):
    engine, _ = dense
    llm = engine.llm_engine
    llm.add_request("gone", ids(90), SamplingParams(prompt_logprobs=2, max_tokens=3))
    assert llm.step() == []  # a chunk gives no output
    llm.abort_request("gone")
    outputs = list(itertools.chain.from_iterable(llm.step() for _ in range(4)))
    assert [(o.outputs[0].finish_reason, o.prompt_logprobs) for o in outputs] == [("abort", None)]
    assert not llm.has_unfinished_requests() and llm.reset_prefix_cache()


def test_c09_prompt_logprobs_survive_a_preemption():
    core = TinyCore(usable_blocks=6, max_num_batched_tokens=16, policy="priority", long_prefill_token_threshold=4)
    parts: dict[int, list] = {}
    core.add("low", ids(80), priority=5, prompt_logprobs=0, max_tokens=2)
    steps = 0
    while core.core.has_work():
        outputs = core.core.step()
        if outputs is not None:
            for part in outputs.prompt_logprobs.values():
                parts |= {part.start + i: position.token_ids for i, position in enumerate(part.positions)}
        steps += 1
        if steps == 3:
            core.add("high", ids(40, seed=2), priority=0, max_tokens=30)
    assert core.num_preemptions >= 1
    assert [parts[i] for i in range(1, 80)] == [[token] for token in ids(80)[1:]]


def test_c10_min_tokens_holds_back_every_end(tmp_path):
    config = T_TINY | {"hidden_size": 272, "num_hidden_layers": 1, "eos_token_id": 70}
    folder = write_folder(
        tmp_path, config, successor_tensors(config), generation_config={"eos_token_id": [70, 90]}, eos="F"
    )
    engine = Engine(folder, max_num_batched_tokens=16, **ONE_SHAPE)

    def complete(prompt="A", **params):
        output = engine.generate(prompt, SamplingParams(temperature=0.0, **params), use_tqdm=False)[0].outputs[0]
        return output.token_ids, output.finish_reason

    assert complete(min_tokens=8, max_tokens=200) == ([66, 67, 68, 69, *range(71)], "stop")
    assert complete(min_tokens=3, max_tokens=200) == ([66, 67, 68, 69, 70], "stop")
    held = complete(min_tokens=8, stop_token_ids=[68], max_tokens=10)
    assert held == ([66, 67, *range(8)], "length")
    deaf = complete(min_tokens=5, stop=["CD"], max_tokens=10, ignore_eos=True)
    assert deaf == ([66, 67, 68, 69, *range(6)], "length")
    # The first of equal logits comes: an end that is masked is not what 89 is followed by.
    ignored = complete(min_tokens=8, max_tokens=10, ignore_eos=True, prompt="X")
    assert ignored == ([89, *range(9)], "length"), "the second end is held back where it is ignored, too"
    assert complete(max_tokens=3, ignore_eos=True, prompt="X") == ([89, 90, 91], "length")
    with pytest.raises(ValueError, match="min_tokens=11 must not exceed max_tokens=10"):
        complete(min_tokens=11, max_tokens=10)


def test_c11_ids_beyond_the_tokenizer_are_the_model_s_and_harmless(tmp_path):
    """As in vLLM the model's vocabulary counts: such an id may be drawn, has no text and may come back in a prompt."""
    config = T_TINY | {"vocab_size": 288}
    tensors = random_tensors(config)
    tensors["lm_head.weight"][264:] = 0
    tensors["model.norm.weight"][:] = 1e-3
    tensors["lm_head.weight"][:264] -= 5.0 * np.sign(dense_direction(config, tensors))  # every real logit is negative
    folder = write_folder(tmp_path, config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    engine = Engine(folder, max_num_batched_tokens=24, max_logprobs=-1, **ONE_SHAPE)
    (output,) = run(engine, PROMPT, temperature=0.0, max_tokens=3, logprobs=-1)
    assert min(output.token_ids) >= 264 and output.text == ""
    assert [sorted(position) for position in output.logprobs] == [list(range(288))] * 3, "no pads of the engine's"
    (again,) = run(engine, PROMPT + output.token_ids, temperature=0.0, max_tokens=2)
    assert len(again.token_ids) == 2
    (kept,) = run(engine, PROMPT, temperature=1.5, seed=1, max_tokens=60, allowed_token_ids=list(range(264)))
    assert max(kept.token_ids) < 264


def dense_direction(config: dict, tensors: dict) -> np.ndarray:
    """The sign of the last hidden state behind PROMPT, as the dense reference has it."""
    probe = tensors | {"lm_head.weight": np.eye(288, config["hidden_size"], dtype=np.float32)}
    return dense_logits(config, probe, PROMPT)[-1][: config["hidden_size"]]
