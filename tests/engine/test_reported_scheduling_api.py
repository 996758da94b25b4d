"""The parts of scheduling cases that the caller of the Python API sees; the rest is in test_reported_scheduling.py."""

import random
from pathlib import Path

import pytest

from jaxvllm import Engine, EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from tests.engine.tiny_core import EXECUTOR, VOCAB_SIZE, ids, sampling, solo

TINY = {
    "executor": EXECUTOR,
    "multiprocess": False,
    "device": "cpu",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
}


def make_llm_engine(folder: Path, **args) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(folder, **TINY | args))


def drain(llm_engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    for _ in range(500):
        if not llm_engine.has_unfinished_requests():
            return outputs
        outputs += llm_engine.step()
    raise AssertionError("requests never finished")


def metric(llm_engine: LLMEngine, name: str) -> float:
    return next(m.value for m in llm_engine.get_metrics() if m.name == f"vllm:{name}")


def test_a02_a_prompt_at_the_context_limit_is_refused_before_it_is_queued(model_folder: Path):
    engine = Engine(model_folder, **TINY | {"max_model_len": 32, "num_gpu_blocks_override": 33})
    params = sampling(max_tokens=10)
    for length in (32, 33):
        with pytest.raises(ValueError, match=rf"prompt has {length} tokens.*at most 31 fit max_model_len=32"):
            engine.generate([ids(5), ids(length)], params, use_tqdm=False)
        assert engine.llm_engine.get_num_unfinished_requests() == 0
    limit, normal = engine.generate([ids(31), ids(5)], [params, sampling(max_tokens=3)], use_tqdm=False)
    assert (limit.outputs[0].token_ids, limit.outputs[0].finish_reason) == (solo(ids(31), max_tokens=1), "length")
    assert normal.outputs[0].token_ids == solo(ids(5), max_tokens=3)


def test_a07_pieces_streamed_across_a_preemption_join_to_the_final_text(model_folder: Path):
    llm_engine = make_llm_engine(
        model_folder, max_model_len=128, num_gpu_blocks_override=9, max_num_batched_tokens=32, max_num_seqs=4,
        num_growth_tokens=0,
    )  # fmt: skip
    kinds = {"p": RequestOutputKind.DELTA, "q": RequestOutputKind.DELTA, "final": RequestOutputKind.FINAL_ONLY}
    prompts = {"p": ids(48), "q": ids(48, seed=1), "final": ids(48, seed=1)}
    for name, prompt in prompts.items():
        llm_engine.add_request(name, prompt, sampling(max_tokens=40, output_kind=kinds[name]))
    outputs = drain(llm_engine)
    assert metric(llm_engine, "num_preemptions") >= 1
    pieces = {name: [o.outputs[0] for o in outputs if o.request_id == name] for name in prompts}
    for name, prompt in prompts.items():
        assert [token for piece in pieces[name] for token in piece.token_ids] == solo(prompt, max_tokens=40)
    assert "".join(piece.text for piece in pieces["q"]) == pieces["final"][0].text
    assert len(pieces["q"]) == 40 and len(pieces["final"]) == 1


def test_a11_completions_end_on_their_own_in_waves_and_an_abort_leaves_nothing(model_folder: Path):
    llm_engine = make_llm_engine(model_folder, max_num_seqs=4, num_gpu_blocks_override=41)
    stops = random.Random(2).sample(range(VOCAB_SIZE), 20)
    few = {"temperature": 1.0, "stop_token_ids": stops, "max_tokens": 30}
    many = {"temperature": 1.0, "max_tokens": 6}
    final = {"output_kind": RequestOutputKind.FINAL_ONLY}
    llm_engine.add_request("few", ids(40), sampling(n=3, seed=5, **few, **final))
    llm_engine.add_request("many", ids(40, seed=1), sampling(n=10, seed=9, **many, **final))
    outputs = {output.request_id: output for output in drain(llm_engine)}
    assert metric(llm_engine, "prefix_cache_hits") == (2 + 9) * 32  # the two full blocks of a prompt exist once
    for name, (prompt, seed, params) in {"few": (ids(40), 5, few), "many": (ids(40, seed=1), 9, many)}.items():
        completions = outputs[name].outputs
        assert [completion.index for completion in completions] == list(range(3 if name == "few" else 10))
        assert [c.token_ids for c in completions] == [solo_of(prompt, seed + c.index, params) for c in completions]
    assert len({len(completion.token_ids) for completion in outputs["few"].outputs}) == 3

    llm_engine.add_request("aborted", ids(40, seed=2), SamplingParams(n=4, seed=1, max_tokens=100, ignore_eos=True))
    for _ in range(5):
        llm_engine.step()
    llm_engine.abort_request("aborted")
    ends = [output.outputs[0].finish_reason for output in drain(llm_engine) if output.finished]
    assert ends == ["abort"]
    assert llm_engine.get_num_unfinished_requests() == 0 and llm_engine.reset_prefix_cache()
    assert not metric(llm_engine, "num_requests_running") and not metric(llm_engine, "num_requests_waiting")


def solo_of(prompt: list[int], seed: int, params: dict) -> list[int]:
    hashable = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    return solo(prompt, seed=seed, **hashable)


def test_a13_one_salt_never_reads_the_blocks_of_another(model_folder: Path):
    engine = Engine(model_folder, **TINY)
    prompt = ids(64)
    changed, other_start = [*prompt[:3], prompt[3] ^ 1, *prompt[4:]], ids(16, seed=1) + prompt[16:]
    sent = [(prompt, "team-a"), (prompt, "team-b"), (prompt, None), (prompt, "team-a")]
    sent += [(changed, "team-a"), (other_start, "team-a")]
    cached = []
    for token_ids, salt in sent:
        given = {"prompt_token_ids": token_ids} | ({} if salt is None else {"cache_salt": salt})
        (output,) = engine.generate(given, sampling(max_tokens=9), use_tqdm=False)
        assert output.outputs[0].token_ids == solo(token_ids, max_tokens=9)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 48, 0, 0]
    with pytest.raises(ValueError, match="cache_salt='' must be a non-empty string"):
        engine.generate({"prompt_token_ids": prompt, "cache_salt": ""}, use_tqdm=False)
