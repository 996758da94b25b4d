"""One test a field of SamplingParams, through the real engine on a tiny random model."""

import re
import string
from dataclasses import fields
from pathlib import Path

import pytest

from jaxvllm import Engine, RequestOutputKind, SamplingParams
from jaxvllm.logprobs import FlatLogprobs
from jaxvllm.sampling import LogitsProcessor
from tests.engine.tiny_core import EXECUTOR, ids

PROMPT = ids(40)
LETTERS = [ord(letter) for letter in string.ascii_lowercase]
TESTED_ELSEWHERE = {
    "stop": "test_engine.py", "include_stop_str_in_output": "test_engine.py", "detokenize": "test_detokenizer.py",
    "skip_special_tokens": "test_detokenizer.py", "spaces_between_special_tokens": "test_detokenizer.py",
    "structured_outputs": "test_structured_output.py", "repetition_detection": "test_reported_texts.py",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    return Engine(
        model_folder, executor=EXECUTOR, multiprocess=False, device="cpu", max_num_batched_tokens=64,
        max_model_len=256, enable_prefix_caching=False, seed=None, max_logprobs=-1,
        logits_processors=["tests.engine.logits_processors:favour"],
        reasoning_config={"reasoning_start_str": "(", "reasoning_end_str": ")]"},
    )  # fmt: skip


def generate(engine: Engine, prompt: list[int] = PROMPT, **params):
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params)
    return engine.generate([prompt], wanted, use_tqdm=False)[0]


def run(engine: Engine, prompt: list[int] = PROMPT, **params) -> list[int]:
    return generate(engine, prompt, **params).outputs[0].token_ids


@pytest.fixture(scope="module")
def base(engine: Engine) -> list[int]:
    return run(engine)


def test_every_field_has_a_test_or_is_refused():
    source = Path(__file__).read_text()
    for f in fields(SamplingParams):
        if f.init and f.name not in TESTED_ELSEWHERE:
            assert re.search(rf"\b{f.name}=", source), f.name


def test_n_gives_as_many_completions_with_seeds_that_follow(engine):
    outputs = generate(engine, n=3, seed=7, temperature=1.2).outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.token_ids for output in outputs] == [run(engine, seed=seed, temperature=1.2) for seed in (7, 8, 9)]


def test_presence_penalty_pushes_to_tokens_not_yet_used(engine):
    allowed = [3, 4, 5, 6]
    plain = run(engine, allowed_token_ids=allowed, max_tokens=4)
    assert len(set(plain)) < 4
    assert sorted(run(engine, allowed_token_ids=allowed, max_tokens=4, presence_penalty=2.0)) == allowed


def test_frequency_penalty_grows_with_each_use(engine):
    tokens = run(engine, allowed_token_ids=[3, 4, 5], max_tokens=30, frequency_penalty=2.0)
    assert [tokens.count(token) for token in (3, 4, 5)] == [10, 10, 10]


def test_repetition_penalty_counts_prompt_and_outputs(engine):
    prompt = list(range(100))
    tokens = run(engine, prompt, max_tokens=40, repetition_penalty=1000.0)
    assert len(set(tokens)) == 40 and not set(tokens) & set(prompt)


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-38, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3}], ids=str)
def test_a_penalty_beyond_float32_gives_tokens_that_exist_and_costs_nobody(engine, base, penalty, filters):
    odd = SamplingParams(repetition_penalty=penalty, seed=1, max_tokens=8, **filters)
    neighbour = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = [output.outputs[0] for output in engine.generate([PROMPT, PROMPT], [odd, neighbour], use_tqdm=False)]
    assert set(outputs[0].token_ids) <= set(range(264)) and outputs[1].token_ids == base


def test_numbers_beyond_float32_mean_what_the_nearest_ones_do(engine, base):
    assert run(engine, temperature=1.0, top_p=1e-300) == base
    assert run(engine, temperature=1e300, seed=1) == run(engine, temperature=1e38, seed=1)


def test_temperature_0_is_greedy_and_a_high_one_is_not(engine, base):
    assert run(engine, temperature=1e-6) == base
    assert run(engine, temperature=2.0, seed=1) != base


def test_top_p_top_k_and_min_p_narrow_the_draw_to_the_most_likely_token(engine, base):
    for narrow in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert run(engine, temperature=1.0, seed=5, **narrow) == base
    assert run(engine, temperature=1.0, seed=5, top_p=1.0, top_k=-1, min_p=0.0) != base


def test_seed_repeats_a_draw_and_none_does_not(engine):
    assert run(engine, temperature=1.5, seed=0) == run(engine, temperature=1.5, seed=0)
    assert run(engine, temperature=1.5, seed=0) != run(engine, temperature=1.5, seed=1)
    assert run(engine, temperature=1.5) != run(engine, temperature=1.5)


def test_stop_token_ids_end_the_output_with_their_id_as_reason(engine, base):
    output = generate(engine, stop_token_ids=[base[4]]).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (base[:5], "stop", base[4])


def test_ignore_eos_keeps_the_end_token(engine):
    bias = {262: 100.0}
    assert run(engine, ignore_eos=False, logit_bias=bias) == [262]
    assert run(engine, ignore_eos=True, logit_bias=bias) == [262] * 12


def test_max_tokens_bounds_the_output(engine, base):
    assert run(engine, max_tokens=5) == base[:5]
    assert len(run(engine, max_tokens=None)) == 256 - len(PROMPT)


def test_min_tokens_holds_back_end_and_stop_tokens(engine):
    tokens = run(engine, ignore_eos=False, min_tokens=4, logit_bias={262: 100.0, 9: 90.0}, stop_token_ids=[9])
    assert len(tokens) == 5 and tokens[4] == 262 and not {9, 262} & set(tokens[:4])


def test_logprobs_come_with_every_token(engine, base):
    output = generate(engine, logprobs=3).outputs[0]
    assert output.token_ids == base and [len(position) for position in output.logprobs] == [3] * 12
    for token, position in zip(base, output.logprobs, strict=True):
        assert position[token].rank == 1 == min(entry.rank for entry in position.values())
    assert output.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for token, position in zip(base, output.logprobs, strict=True))
    )
    assert [list(position) for position in generate(engine, logprobs=0).outputs[0].logprobs] == [[t] for t in base]


def test_logprobs_of_the_whole_vocabulary_sum_to_one_and_agree_with_few(engine, base):
    all_of_them = generate(engine, logprobs=-1, max_tokens=2).outputs[0].logprobs
    many = generate(engine, logprobs=30, max_tokens=2).outputs[0].logprobs
    few = generate(engine, logprobs=20, max_tokens=2).outputs[0].logprobs
    for whole, some, least in zip(all_of_them, many, few, strict=True):
        assert len(whole) == 264 and sum(2.718281828459045**e.logprob for e in whole.values()) == pytest.approx(1)
        assert list(whole)[:30] == list(some) and list(some)[:20] == list(least)
        assert [e.logprob for e in least.values()] == pytest.approx([whole[t].logprob for t in least], abs=1e-5)


def test_prompt_logprobs_come_once_for_every_prompt_token(engine):
    output = generate(engine, prompt_logprobs=1, n=2, temperature=1.0, seed=1)
    assert len(output.prompt_logprobs) == len(PROMPT) and output.prompt_logprobs[0] is None
    assert all(token in position for token, position in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True))
    dense = generate(engine, prompt_logprobs=-1, max_tokens=1).prompt_logprobs
    assert [len(position) for position in dense[1:]] == [264] * 39
    for few, whole in zip(output.prompt_logprobs[1:], dense[1:], strict=True):
        assert [entry.logprob for entry in few.values()] == pytest.approx([whole[t].logprob for t in few], abs=1e-5)
    assert generate(engine, [5], prompt_logprobs=0, max_tokens=1).prompt_logprobs == [None]


def test_logprob_token_ids_name_the_tokens_to_report(engine, base):
    output = generate(engine, logprob_token_ids=[200, 3, 77], max_tokens=2).outputs[0]
    whole = generate(engine, logprobs=-1, max_tokens=2).outputs[0].logprobs
    for token, position, reference in zip(base, output.logprobs, whole, strict=False):
        assert list(position) == [token, 200, 3, 77] and position[3].rank is None
        assert [e.logprob for e in position.values()] == pytest.approx([reference[t].logprob for t in position])


def test_flat_logprobs_hold_the_same_as_dicts(engine):
    nested, flat = (generate(engine, logprobs=2, prompt_logprobs=2, flat_logprobs=is_flat) for is_flat in (False, True))
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs) and isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == nested.outputs[0].logprobs
    assert list(flat.prompt_logprobs)[1:] == nested.prompt_logprobs[1:] and flat.prompt_logprobs[0] == {}


def test_output_kind_delta_joins_to_the_final_logprobs_and_brings_the_prompt_s_once(engine, base):
    whole = generate(engine, logprobs=2, prompt_logprobs=0)
    llm = engine.llm_engine
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=0,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    llm.add_request("delta", PROMPT, params)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert [position for output in outputs for position in output.outputs[0].logprobs] == whole.outputs[0].logprobs
    assert [output.prompt_logprobs for output in outputs] == [whole.prompt_logprobs] + [None] * 11
    assert outputs[-1].outputs[0].cumulative_logprob == whole.outputs[0].cumulative_logprob


def test_output_kind_cumulative_brings_the_same_prompt_logprobs_every_time(engine):
    wanted = SamplingParams(prompt_logprobs=2, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE)
    engine.llm_engine.add_request("cumulative", PROMPT, wanted)
    found = []
    while engine.llm_engine.has_unfinished_requests():
        found += [output.prompt_logprobs for output in engine.llm_engine.step()]
    assert len(found) == 4 and len(found[0]) == 40
    assert all(logprobs is found[0] for logprobs in found), "made once, not with every token"


def test_logit_bias_moves_single_tokens(engine, base):
    assert run(engine, logit_bias={7: 1e9}) == [7] * 12  # clamped to 100
    assert base[0] not in run(engine, logit_bias={base[0]: -100.0})


def test_allowed_token_ids_are_all_that_may_come(engine):
    assert set(run(engine, allowed_token_ids=LETTERS, temperature=2.0, seed=1, max_tokens=60)) <= set(LETTERS)


def test_bad_words_are_never_completed(engine):
    base = run(engine, allowed_token_ids=LETTERS)
    first, second = chr(base[0]), chr(base[1])
    assert base[0] not in run(engine, allowed_token_ids=LETTERS, bad_words=[first], max_tokens=60)
    pair = run(engine, allowed_token_ids=LETTERS, bad_words=[first + second])
    assert pair[0] == base[0] and pair[1] != base[1]
    # " w" is one token: the word is banned with and without the space before it.
    spaced = run(engine, logit_bias={260: 100.0, ord("w"): 90.0}, bad_words=["w"])
    assert not {260, ord("w")} & set(spaced)


def test_skip_reading_prefix_cache_computes_the_prompt_again(model_folder):
    engine = Engine(
        model_folder, executor=EXECUTOR, multiprocess=False, device="cpu", max_num_batched_tokens=64, max_model_len=256
    )
    assert generate(engine).num_cached_tokens == 0
    assert generate(engine).num_cached_tokens == 32
    assert generate(engine, skip_reading_prefix_cache=True).num_cached_tokens == 0
    assert generate(engine, prompt_logprobs=0).num_cached_tokens == 0
    with pytest.raises(ValueError, match="skip_reading_prefix_cache=False contradicts prompt_logprobs"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)


def test_thinking_token_budget_closes_the_thinking(engine):
    open_prompt = [*PROMPT, ord("(")]
    free = run(engine, open_prompt, allowed_token_ids=LETTERS)
    closed = run(engine, open_prompt, allowed_token_ids=LETTERS, thinking_token_budget=5)
    assert closed[:5] == free[:5] and closed[5:7] == [ord(")"), ord("]")] and set(closed[7:]) <= set(LETTERS)
    assert run(engine, open_prompt, thinking_token_budget=0)[:2] == [ord(")"), ord("]")]
    assert run(engine, thinking_token_budget=0) == run(engine), "the prompt did not open any"
    closed_prompt = [*open_prompt, ord(")"), ord("]")]
    assert run(engine, closed_prompt, thinking_token_budget=0) == run(engine, closed_prompt)


def test_extra_args_reach_a_custom_logits_processor(engine, base):
    assert run(engine, extra_args={"favour": {"token": 42, "by": 1000.0}}) == [42] * 12
    assert run(engine, extra_args={"favour": {"token": base[0], "by": -1000.0}})[0] != base[0]
    with pytest.raises(ValueError, match=r"extra_args\['favour'\].*give token and by"):
        run(engine, extra_args={"favour": {}})
    with pytest.raises(ValueError, match=r"extra_args has the key 'other'.*\['favour'\]"):
        run(engine, extra_args={"other": 1})


def test_routed_experts_prompt_start_is_refused_by_name(engine):
    with pytest.raises(NotImplementedError, match="routed_experts_prompt_start=0 is not supported"):
        run(engine, routed_experts_prompt_start=0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": -2}, "logprobs=-2 must be at least 0, or -1"),
        ({"logprobs": True}, "logprobs=True must be an integer"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs=3 must equal the 2 logprob_token_ids"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids holds 129 ids; at most 128"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias key='7' must be an integer"),
        ({"logit_bias": {7: float("nan")}}, r"logit_bias\[7\]=nan must be a number"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\[\] allows no token"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids holds 1025 ids; at most 1024"),
        ({"bad_words": [""]}, "bad_words=.* must not hold an empty string"),
        ({"thinking_token_budget": -1}, "thinking_token_budget=-1 must not be negative"),
        ({"output_kind": "delta"}, "output_kind='delta' must be a RequestOutputKind"),
        ({"extra_args": [1]}, r"extra_args=\[1\] must be a dict"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
    ],
)
def test_bad_values_are_refused_by_name(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_from_optional_takes_none_for_the_default_and_json_s_keys():
    params = SamplingParams.from_optional(temperature=None, top_p=None, max_tokens=None, logit_bias={"7": 1000})
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 1.0, None)
    assert params.logit_bias == {7: 100.0}
    for key in ("--5", "5.0", "9" * 5000):
        with pytest.raises(ValueError, match=f"logit_bias key='{key}' must be an integer"):
            SamplingParams.from_optional(logit_bias={key: 1})
    with pytest.raises(TypeError, match="no field 'tempreature'"):
        SamplingParams.from_optional(tempreature=1)


def test_a_clone_shares_nothing():
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a"])
    copy = params.clone()
    assert copy == params
    copy.logit_bias[1] = 5.0
    assert params.logit_bias == {1: 2.0}


def test_a_custom_processor_works_with_the_core_in_a_process_of_its_own(tmp_path):
    from tests.engine.dense import random_tensors, write_folder
    from tests.tiny_config import T_TINY

    folder = write_folder(tmp_path, T_TINY, random_tensors(T_TINY))
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    with Engine(folder, device="cpu", logits_processors=["tests.engine.logits_processors:favour"], **sizes) as engine:
        tokens = run(engine, [1, 2, 3], max_tokens=3, extra_args={"favour": {"token": 42, "by": 1000.0}}, logprobs=1)
    assert tokens == [42] * 3


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (lambda value: [value["by"]], {}, "there is no 'by'"),
        (lambda value: [value[0]], [], "list index out of range"),
        (lambda value: [value.get("by")], 3, "'int' object has no attribute 'get'"),
        (lambda value: [value], 10**400, "int too large"),
    ],
)
def test_a_value_that_a_processors_parse_stumbles_over_is_the_callers_error(parse, value, message):
    processor = LogitsProcessor("favour", lambda logits, params: logits, 1, parse)
    with pytest.raises(ValueError, match=rf"extra_args\['favour'\].* is refused by its logits processor: .*{message}"):
        processor.params_of(value)
