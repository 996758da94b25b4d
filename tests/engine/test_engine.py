"""The Python API over a scripted executor (next token = last + 1), in one process."""

import gc
import itertools
import json
from pathlib import Path

import pytest

from jaxvllm import LLM, Engine, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tests.engine.conftest import write_model

SUCCESSOR = "tests.engine.fake_executor:successor"


def make_engine(folder: Path, **kwargs) -> Engine:
    return Engine(folder, **{"executor": SUCCESSOR, "multiprocess": False, "device": "cpu"} | kwargs)


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    return make_engine(model_folder)


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def run(engine: Engine, prompt, **params):
    return engine.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def test_outputs_come_in_prompt_order_for_mixed_prompts_and_params(engine):
    prompts = ["A", [48], {"prompt": "K"}, {"prompt_token_ids": [80, 97], "cache_salt": "s"}]
    params = [SamplingParams(max_tokens=n) for n in (7, 2, 5, 1)]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert texts(outputs) == ["BCDEFGH", "12", "LMNOP", "b"]
    assert [o.prompt for o in outputs] == ["A", None, "K", None]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_one_prompt_or_none_is_a_list_too(engine):
    assert LLM is Engine
    assert texts(engine.generate("A", SamplingParams(max_tokens=2), use_tqdm=False)) == ["BC"]
    assert texts(engine.generate([65, 66], SamplingParams(max_tokens=2), False)) == ["CD"]
    assert engine.generate([], use_tqdm=False) == []


def test_more_requests_than_places_all_finish(model_folder):
    engine = make_engine(model_folder, max_num_seqs=3, max_num_batched_tokens=17, max_model_len=64)
    prompts = [[5 + i] * (1 + i) for i in range(23)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=11, ignore_eos=True), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [[6 + i + k for k in range(11)] for i in range(23)]


@pytest.mark.parametrize("num_blocks", [1025, 11])
def test_synchronous_and_asynchronous_scheduling_give_the_same(model_folder, num_blocks):
    prompts = [[i] * 20 for i in range(9)]
    params = [SamplingParams(max_tokens=40, stop_token_ids=[i + 31], min_tokens=i) for i in range(9)]
    results = []
    for async_scheduling in (True, False):
        engine = make_engine(
            model_folder, async_scheduling=async_scheduling, num_gpu_blocks_override=num_blocks, max_model_len=100,
            num_growth_tokens=0,
        )  # fmt: skip
        results.append([o.outputs[0] for o in engine.generate(prompts, params, use_tqdm=False)])
        preemptions = next(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
        assert (preemptions > 0) == (num_blocks == 11)
    assert results[0] == results[1]
    assert all(len(output.token_ids) == 31 and output.stop_reason == i + 31 for i, output in enumerate(results[0]))


def test_stop_string_cuts_the_text_and_ends_the_request_in_the_core(engine):
    output = run(engine, "0", stop=["4567"], max_tokens=500)
    assert (output.text, output.token_ids, output.finish_reason) == ("123", list(range(49, 56)), "stop")
    assert output.stop_reason == "4567"
    gauges = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    assert gauges["vllm:num_requests_running"] == 0
    assert run(engine, "0", stop=["4567"], max_tokens=20, include_stop_str_in_output=True).text == "1234567"
    assert run(engine, "A", stop=["BCDEFGHIJ"], max_tokens=9).finish_reason == "stop"


@pytest.mark.parametrize(
    ("config", "generation_config", "eos", "stop_reason"),
    [
        ({"eos_token_id": 262}, {"eos_token_id": [262, 70]}, "<eos>", 70),
        ({"eos_token_id": [70, 90]}, None, None, None),
        ({"eos_token_id": 262}, None, "F", None),
        ({"eos_token_id": 262}, {"eos_token_id": 90}, "F", None),
    ],
)
def test_every_end_token_of_the_model_files_ends_the_text(tmp_path, config, generation_config, eos, stop_reason):
    engine = make_engine(write_model(tmp_path, config=config, generation_config=generation_config, eos=eos))
    output = run(engine, "A", max_tokens=40)
    assert (output.token_ids, output.finish_reason) == ([66, 67, 68, 69, 70], "stop")
    assert output.stop_reason == stop_reason
    assert run(engine, "A", max_tokens=40, ignore_eos=True).token_ids == list(range(66, 106))


def test_end_token_text_is_left_out_but_its_id_stays(engine):
    output = run(engine, [258], max_tokens=9)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([259, 260, 261, 262], "stop", None)
    assert output.text.rstrip("\ufffd") == "stone w"
    ignoring = run(engine, [258], max_tokens=7, ignore_eos=True)
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (7, "length")


def test_max_tokens_none_fills_the_context(model_folder):
    engine = make_engine(model_folder, max_model_len=32)
    assert len(run(engine, [1] * 20, max_tokens=None).token_ids) == 12
    one = run(engine, [1] * 31, max_tokens=10)
    assert (len(one.token_ids), one.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([264], r"\[0\]=264 is outside the vocabulary.*\[0, 263\]"),
        ([5, -1], r"\[1\]=-1 is outside"),
        ([4611686018427387904], "outside the vocabulary"),
        ([1.5], "must be an integer, got float"),
        ([True], "must be an integer, got bool"),
        ({"prompt_token_ids": ["7"]}, "must be an integer, got str"),
        ({"prompt_token_ids": [[1, 2]]}, "must be an integer, got list"),
        ({"prompt_token_ids": 7}, "got int"),
        ([[1, 2], [999999]], "999999 is outside"),
        ([1] * 1024, r"has 1024 tokens.*at most 1023"),
        ({"text": "x"}, "unknown keys"),
        ({}, "needs 'prompt'"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        (7, "got int"),
        (b"x", "got bytes"),
        ([None], "must be an integer, got NoneType"),
    ],
)
def test_bad_prompt_is_refused_and_costs_no_other_request(engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, use_tqdm=False)
    mixed = ["A", prompt] if not isinstance(prompt, list) or not isinstance(prompt[0], list) else ["A", *prompt]
    with pytest.raises(ValueError, match=message) as raised:
        engine.generate(mixed, use_tqdm=False)
    assert len(mixed) == 3 or raised.value.__notes__ == ["This is about prompt 1 of 2, counted from 0."]
    assert not engine.llm_engine.has_unfinished_requests()
    assert run(engine, "A", max_tokens=3).text == "BCD"


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"stop_token_ids": [264]}, ValueError, r"stop_token_ids\[0\]=264 is outside"),
        ({"stop_token_ids": [-5]}, ValueError, r"stop_token_ids\[0\]=-5 is outside"),
        ({"min_tokens": 1024, "max_tokens": None}, ValueError, "can never be reached"),
        ({"logprobs": 21}, ValueError, "logprobs=21 must be at most max_logprobs=20"),
        ({"logit_bias": {264: 5.0}}, ValueError, "logit_bias has the key 264"),
        ({"allowed_token_ids": [264]}, ValueError, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "("}}, ValueError, r"structured_outputs: regex=\("),
        ({"thinking_token_budget": 5}, ValueError, "thinking_token_budget=5 needs"),
        ({"extra_args": {"a": 1}}, ValueError, "extra_args has the key 'a'"),
        ({"routed_experts_prompt_start": 1}, NotImplementedError, "routed_experts_prompt_start=1 is not supported"),
    ],
)
def test_bad_or_unapplied_parameter_is_refused_by_name(engine, params, error, message):
    with pytest.raises(error, match=message):
        engine.generate(["A", "B"], [SamplingParams(), SamplingParams(**params)], use_tqdm=False)
    assert not engine.llm_engine.has_unfinished_requests()


def test_huge_but_legal_numbers_do_no_harm(engine):
    params = SamplingParams(top_k=2**40, max_tokens=2**40, seed=2**64 - 1, n=2, stop_token_ids=[70])
    assert texts(engine.generate("A", params, use_tqdm=False)) == ["BCDE"]
    for bad in ({"seed": 2**64}, {"stop": 5}, {"stop_token_ids": 5}, {"top_k": 1.5}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_counts_of_params_and_priorities_must_match(engine):
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        engine.generate(["A", "B"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(ValueError, match="priority has 1 numbers"):
        engine.generate(["A", "B"], priority=[1], use_tqdm=False)
    with pytest.raises(ValueError, match="scheduling_policy='priority'"):
        engine.generate("A", priority=[1], use_tqdm=False)


def test_engine_in_process_that_is_dropped_waits_for_its_steps_in_flight(model_folder):
    engine = make_engine(model_folder)
    engine.llm_engine.add_request("a", [65], SamplingParams(max_tokens=50))
    for _ in range(3):
        engine.llm_engine.step()
    in_flight = engine.llm_engine._client._core._in_flight
    assert in_flight
    del engine
    gc.collect()
    assert not in_flight


def test_batch_without_text_shows_nothing_before_the_end(engine):
    core = engine.llm_engine
    params = SamplingParams(max_tokens=7, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    for request_id in ("a", "b"):
        core.add_request(request_id, [65], params)
    steps = []
    while core.has_unfinished_requests():
        steps.append(core.step())
    assert len(steps) >= 7 and not any(steps[:-1]) and len(steps[-1]) == 2
    for output in steps[-1]:
        assert output.outputs[0].token_ids == list(range(66, 73))
        metrics = output.metrics
        assert 0 < metrics.queued_ts < metrics.scheduled_ts < metrics.first_token_ts < metrics.last_token_ts
        assert metrics.first_token_latency > 0 and metrics.num_generation_tokens == 7


@pytest.mark.parametrize("multiprocess", [True, False])
def test_unsupported_architecture_is_refused_before_a_core_starts(tmp_path, monkeypatch, multiprocess):
    monkeypatch.setattr("jaxvllm.llm_engine.make_client", lambda *args: pytest.fail("started a core"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "d_model": 64}))
    with pytest.raises(ValueError, match=r"MambaForCausalLM is not supported; supported are Gemma2.*LlamaForCausalLM"):
        make_engine(tmp_path, multiprocess=multiprocess)


def test_less_urgent_request_waits(model_folder):
    engine = make_engine(model_folder, scheduling_policy="priority", max_num_seqs=1)
    outputs = engine.generate(["A", "B", "C"], priority=[5, 9, 1], use_tqdm=False)
    order = sorted(range(3), key=lambda i: outputs[i].metrics.last_token_ts)
    assert order == [2, 0, 1]


def test_what_is_not_built_says_so(engine):
    for method in (engine.encode, engine.embed, engine.score, engine.classify, engine.beam_search):
        with pytest.raises(NotImplementedError):
            method(["A"])
    with pytest.raises(NotImplementedError, match="lora_request"):
        engine.generate("A", lora_request=object())


def test_chat_renders_the_template_and_answers_each_conversation(engine):
    hello = [{"role": "user", "content": "hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]
    params = SamplingParams(max_tokens=2)
    one = engine.chat(hello, params, use_tqdm=False)
    assert (one[0].prompt, one[0].outputs[0].text) == ("u:hello\na:", ";<")
    two = engine.chat([hello, parts], params, use_tqdm=False)
    assert [o.prompt for o in two] == ["u:hello\na:", "u:x\ny\na:"]
    former = [
        {"type": "output_text", "text": "x"},
        {"type": "refusal", "refusal": "no"},
        {"type": "input_text", "text": "y"},
    ]
    assert engine.chat([{"role": "user", "content": former}], params, use_tqdm=False)[0].prompt == "u:x\nno\ny\na:"
    own = engine.chat(hello, params, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert own[0].prompt == "hello"
    bare = engine.chat(hello, params, use_tqdm=False, chat_template_kwargs={"add_generation_prompt": False})
    assert bare[0].prompt == "u:hello\n"
    for template in ("{{ messages + 1 }}", "{{ 1 / 0 }}", "{{ messages[0].content.x() }}", "{{ {}['a'].b }}"):
        with pytest.raises(ValueError, match="the chat template refuses these messages"):
            engine.chat(hello, chat_template=template)
    with pytest.raises(ValueError, match="tools must be a list of dicts"):
        engine.chat(hello, tools=["add"])
    with pytest.raises(NotImplementedError, match="image_url"):
        engine.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(ValueError, match="must have a 'text'"):
        engine.chat([{"role": "user", "content": [{"type": "text"}]}])
    with pytest.raises(ValueError, match="role"):
        engine.chat([{"content": "x"}])


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_a_message_without_content_has_an_empty_one(engine, content):
    messages = [{"role": "assistant", **content}, {"role": "user", "content": "x"}]
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }};{% endfor %}"
    (output,) = engine.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=template)
    assert output.prompt == "assistant:;user:x;"


def test_templates_see_the_arguments_of_former_calls_as_objects(engine):
    def prompt(*arguments) -> str:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": a}} for a in arguments]
        messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
        template = "{% for c in messages[0].tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}."
        return engine.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=template)[0].prompt

    assert prompt('{"city": "Oslo"}', {"city": "Rome"}, "", None) == '{"city": "Oslo"}{"city": "Rome"}{}{}.'
    assert prompt() == "."
    with pytest.raises(ValueError, match="the arguments of the tool call of 'f' are no valid JSON"):
        prompt("{")


def test_n_completions_share_a_request(engine):
    output = engine.generate("A", SamplingParams(n=3, max_tokens=4, seed=5), use_tqdm=False)[0]
    assert [(c.index, c.text) for c in output.outputs] == [(0, "BCDE"), (1, "BCDE"), (2, "BCDE")]


def test_default_params_come_from_the_generation_config(tmp_path):
    defaults = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}
    folder = write_model(tmp_path, generation_config=defaults)
    engine = make_engine(folder)
    assert engine.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=7, max_tokens=3)
    assert texts(engine.generate("A", use_tqdm=False)) == ["BCD"]
    assert make_engine(folder, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    override = make_engine(folder, override_generation_config={"top_k": 9}).get_default_sampling_params()
    assert (override.top_k, override.max_tokens) == (9, 3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1, "min_p": 0.25}))
    assert make_engine(folder).get_default_sampling_params() == SamplingParams(repetition_penalty=1.1, min_p=0.25)


def test_engine_without_a_tokenizer_takes_and_gives_ids(model_folder):
    engine = make_engine(model_folder, skip_tokenizer_init=True)
    output = run(engine, [258], max_tokens=9)
    assert (output.text, output.token_ids) == ("", [259, 260, 261, 262])
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        engine.generate("A")
    with pytest.raises(ValueError, match="use stop_token_ids"):
        engine.generate([5], SamplingParams(stop="x"))


def test_max_model_len_above_the_pool_is_refused_at_the_start(model_folder):
    with pytest.raises(ValueError, match=r"max_model_len=100 does not fit .* 96 tokens"):
        make_engine(model_folder, num_gpu_blocks_override=7, max_model_len=100)
    make_engine(model_folder, num_gpu_blocks_override=7, max_model_len=96)


def test_repeated_prompt_hits_the_prefix_cache_until_it_is_reset(engine):
    prompt = [9] * 50
    cached = []
    for _ in range(2):
        cached.append(engine.generate([prompt], use_tqdm=False)[0].num_cached_tokens)
    assert engine.reset_prefix_cache()
    cached.append(engine.generate([prompt], use_tqdm=False)[0].num_cached_tokens)
    assert cached == [0, 48, 0]


def test_progress_bar_speaks_vllms_words(engine):
    calls = []

    class Bar:
        postfix = ""

        def __init__(self, **kwargs):
            calls.append(kwargs)

        def update(self, count):
            calls.append(self.postfix)

        def close(self):
            calls.append("closed")

    engine.generate(["A", "B"], use_tqdm=Bar)
    assert calls[0]["desc"] == "Processed prompts"
    assert calls[0]["total"] == 2
    assert "est. speed input: " in calls[1] and " toks/s, output: " in calls[1]
    assert calls[-1] == "closed"


def test_outputs_of_requests_that_were_added_to_llm_engine_are_left_to_their_caller(model_folder):
    engine = make_engine(model_folder)
    engine.llm_engine.add_request("mine", "A", SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match=r"llm_engine has 1 unfinished requests .*: call llm_engine\.step\(\)"):
        engine.generate("K", use_tqdm=False)
    assert drain(engine.llm_engine)[-1].outputs[0].text == "BCD"
    engine.llm_engine.add_request("dropped", "A", SamplingParams(max_tokens=3))
    engine.llm_engine.drop_requests(["dropped"])
    assert texts(engine.generate("K", SamplingParams(max_tokens=2), use_tqdm=False)) == ["LM"]


def test_a_progress_bar_that_generates_takes_no_outputs_of_the_call_that_it_shows(model_folder):
    engine = make_engine(model_folder)

    class Bar:
        postfix = ""

        def __init__(self, **kwargs):
            pass

        def update(self, count):
            engine.generate("K", use_tqdm=False)

        def close(self):
            pass

    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=9)]
    with pytest.raises(ValueError, match="llm_engine has 1 unfinished requests"):
        engine.generate(["A", "B"], params, use_tqdm=Bar)
    assert not engine.llm_engine.has_unfinished_requests()


@pytest.fixture
def llm_engine(model_folder) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model_folder, executor=SUCCESSOR, multiprocess=False, device="cpu"))


def drain(llm_engine: LLMEngine, limit: int = 500) -> list:
    outputs = []
    while llm_engine.has_unfinished_requests() and limit:
        outputs += llm_engine.step()
        limit -= 1
    assert limit, "requests never finished"
    return outputs


def test_streamed_pieces_join_to_the_final_text(llm_engine):
    for kind in RequestOutputKind:
        params = SamplingParams(max_tokens=20, stop=["LMN", "456"], output_kind=kind)
        llm_engine.add_request(kind.name, "A", params)
    outputs = drain(llm_engine)
    by_kind = {kind: [o.outputs[0] for o in outputs if o.request_id == kind.name] for kind in RequestOutputKind}
    final = by_kind[RequestOutputKind.FINAL_ONLY]
    assert len(final) == 1 and final[0].text == "BCDEFGHIJK"
    deltas = by_kind[RequestOutputKind.DELTA]
    assert "".join(o.text for o in deltas) == final[0].text
    assert [i for o in deltas for i in o.token_ids] == final[0].token_ids
    growing = [o.text for o in by_kind[RequestOutputKind.CUMULATIVE]]
    assert growing[-1] == final[0].text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(growing))


def test_abort_is_reported_once_whenever_it_comes(llm_engine):
    for i in range(1, 7):
        llm_engine.add_request(f"r{i}", [i] * 20, SamplingParams(max_tokens=12))
    llm_engine.abort_request("r5")
    llm_engine.abort_request(["r5", "nope"])
    outputs = llm_engine.step() + llm_engine.step()
    llm_engine.abort_request("r1")
    outputs += drain(llm_engine)
    ends = [(o.request_id, o.outputs[0].finish_reason) for o in outputs if o.finished]
    assert sorted(ends) == [(f"r{i}", "abort" if i in (1, 5) else "length") for i in range(1, 7)]
    last = {o.request_id: k for k, o in enumerate(outputs)}
    assert all(outputs[k].finished for k in last.values())


def test_request_id_in_use_is_refused_and_free_after_the_end(llm_engine):
    llm_engine.add_request("a", "A", SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        llm_engine.add_request("a", "A", SamplingParams(max_tokens=2))
    drain(llm_engine)
    llm_engine.add_request("a", "A", SamplingParams(max_tokens=2))
    assert llm_engine.get_num_unfinished_requests() == 1


def test_completions_of_a_streamed_request_carry_their_index(llm_engine):
    llm_engine.add_request("a", "A", SamplingParams(n=2, max_tokens=3, output_kind=RequestOutputKind.DELTA))
    outputs = drain(llm_engine)
    joined = ["".join(o.outputs[0].text for o in outputs if o.outputs[0].index == i) for i in range(2)]
    assert joined == ["BCD", "BCD"]
    assert [o.finished for o in outputs].count(True) == 1 and outputs[-1].finished
