"""Structured output through the real engine on a random model: whatever it draws, the text follows the constraint."""

import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import jsonschema
import msgspec
import pytest

from jaxvllm import Engine, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxvllm.structured_output.grammar import to_llguidance
from jaxvllm.structured_output.manager import GrammarTokenizer, make_grammar_tokenizer
from jaxvllm.tokenizer import Tokenizer
from tests.engine.random_schemas import complete, random_schema
from tests.engine.tiny_core import EXECUTOR, solo
from tests.engine.tokenizers_fixture import EOS, TAG

CHOICES = ["yes", "no", 'may"be', "", "nöt", "<tag>", "a.c", "x|y\n[z]{2}\\d", "(^$*+?)", "/-~#&"]
TINY = {"executor": EXECUTOR, "multiprocess": False, "device": "cpu", "max_num_batched_tokens": 64}
LARK = 'start: greeting ("," NUMBER)+\ngreeting: "hi" | "hello"\nNUMBER: /[1-9][0-9]{0,2}/'
EBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-c] | root'


def ids(count: int, seed: int = 0) -> list[int]:
    """A prompt of letters: one that ended inside a character would show in the text."""
    rng = random.Random(seed * 1009 + count)
    return [rng.randint(97, 122) for _ in range(count)]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    return Engine(model_folder, **TINY, max_model_len=256, max_logprobs=-1)


@pytest.fixture(scope="module")
def vocabulary(model_folder: Path) -> GrammarTokenizer:
    return make_grammar_tokenizer(Tokenizer.from_folder(model_folder), [EOS])


def params(seed: int = 0, max_tokens: int = 60, **kind) -> SamplingParams:
    constraint = StructuredOutputsParams(**kind)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, structured_outputs=constraint)


def generate(engine: Engine, params_list: list[SamplingParams]):
    outputs = engine.generate([ids(3 + i % 20, i) for i in range(len(params_list))], params_list, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def test_200_texts_of_random_schemas_are_valid_or_the_beginning_of_a_valid_text(engine, vocabulary):
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in range(200)]
    wanted = [params(seed=i, max_tokens=30, json=schema) for i, schema in enumerate(schemas)]
    ends: Counter[str | None] = Counter()
    for schema, given, output in zip(schemas, wanted, generate(engine, wanted), strict=True):
        ends[output.finish_reason] += 1
        if output.finish_reason == "stop":
            text = output.text
            assert output.token_ids[-1] == EOS
        else:
            assert output.finish_reason == "length" and len(output.token_ids) == 30
            assert given.structured_outputs is not None
            grammar = to_llguidance(given.structured_outputs, vocabulary.special_texts)
            text = complete(vocabulary, grammar, output.token_ids).decode()
        jsonschema.validate(json.loads(text), schema)
    assert min(ends["stop"], ends["length"]) > 30, ends


@pytest.mark.parametrize("num_logprobs", [20, 30, -1])
def test_logprobs_are_of_the_logits_that_a_grammar_leaves(engine, num_logprobs):
    """As in vLLM, which masks before its sampler begins: what is not allowed has no share of the probability.

    More than 20 logprobs do not come from the step.
    """
    prompt, free = ids(4), SamplingParams(temperature=1.0, seed=0, max_tokens=1, logprobs=-1)
    asked = params(max_tokens=1, choice=["a", "b"])
    asked.logprobs = num_logprobs
    outputs = engine.generate([prompt, prompt, ids(9)], [asked, free, free], use_tqdm=False)
    given, raw = (output.outputs[0].logprobs[0] for output in outputs[:2])
    total = math.exp(raw[97].logprob) + math.exp(raw[98].logprob)
    for token_id, entry in given.items():
        expected = raw[token_id].logprob - math.log(total) if token_id in (97, 98) else -math.inf
        assert entry.logprob == pytest.approx(expected, abs=1e-4)
    assert len(given) == (num_logprobs if num_logprobs > 0 else 264)
    assert sorted(entry.rank for token_id, entry in given.items() if token_id in (97, 98)) == [1, 2]
    assert outputs[0].outputs[0].cumulative_logprob == given[outputs[0].outputs[0].token_ids[0]].logprob


def accepts_ebnf(text: str) -> bool:
    """EBNF by hand: nested lists of the letters a to c, none of them empty."""
    try:
        value = json.loads(re.sub("[a-c]", "1", text))
    except ValueError:
        return False

    def is_list(v) -> bool:
        return isinstance(v, list) and len(v) > 0 and all(item == 1 or is_list(item) for item in v)

    return is_list(value)


@pytest.mark.parametrize(
    ("kind", "accepts"),
    [
        ({"regex": r"[a-f]{2,8}(é|🧭)?-[0-9]+"}, re.compile(r"[a-f]{2,8}(é|🧭)?-[0-9]+").fullmatch),
        ({"choice": CHOICES}, CHOICES.__contains__),
        ({"grammar": LARK}, re.compile(r"(hi|hello)(,[1-9][0-9]{0,2})+").fullmatch),
        ({"grammar": EBNF}, accepts_ebnf),
        ({"json_object": True, "disable_any_whitespace": True}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"json": '{"type": "array", "items": {"type": "integer"}}', "whitespace_pattern": "_?"},
            lambda text: isinstance(json.loads(text.replace("_", "")), list) and " " not in text,
        ),
    ],
    ids=["regex", "choice", "lark", "ebnf", "json_object", "json text"],
)
def test_each_kind_of_constraint_holds(engine, vocabulary, kind, accepts):
    wanted = [params(seed=i, **kind) for i in range(16)]
    texts = set()
    for given, output in zip(wanted, generate(engine, wanted), strict=True):
        text = output.text
        if output.finish_reason == "length":
            assert given.structured_outputs is not None
            grammar = to_llguidance(given.structured_outputs, vocabulary.special_texts)
            text = complete(vocabulary, grammar, output.token_ids).decode()
        assert accepts(text), text
        texts.add(output.text)
    assert len(texts) > 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"choice": ["a<eos>b"]}, "a<eos>b"),
        ({"choice": ["<tag>"]}, "<tag>"),
        ({"regex": "<tag>stone<eos>?"}, "<tag>stone<eos>?"),
        ({"json": {"const": "<eos>"}}, '"<eos>"'),
        ({"json": {"const": "<tag>"}, "disable_any_whitespace": True}, '"<tag>"'),
        ({"grammar": 'start: "<tag>" "z"'}, "<tag>z"),
    ],
)
def test_text_that_spells_a_special_token_is_written_in_letters(engine, kind, expected):
    (output,) = generate(engine, [params(**kind)])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert expected.startswith(output.text) if expected.endswith("?") else output.text == expected
    assert TAG not in output.token_ids and output.token_ids.index(EOS) == len(output.token_ids) - 1


def test_a_schema_may_be_a_truth_value(engine):
    (output,) = generate(engine, [params(json="true", max_tokens=3)])
    assert output.finish_reason in ("stop", "length")
    with pytest.raises(ValueError, match="json=false cannot be followed: Unsatisfiable"):
        generate(engine, [params(json="false")])


def test_an_end_with_an_error_says_what_is_wrong_and_nothing_of_the_parser_s_state(engine):
    (never,) = generate(engine, [params(regex="[^\\s\\S]")])
    assert never.finish_reason == "error"
    assert never.stop_reason == "structured_outputs cannot be followed further: no token may come next"
    stuck = params(choice=["b"])
    stuck.allowed_token_ids = [97]
    (output,) = generate(engine, [stuck])
    reason = str(output.stop_reason)
    assert reason.startswith("structured_outputs cannot take token ") and len(reason) < 300 and "\n" not in reason
    assert reason.endswith("(min_tokens, allowed_token_ids, bad_words) leave none that does.")
    optional = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(600)}}
    (wide,) = generate(engine, [params(json=optional)])
    assert "cannot be followed further: Parser Error: Current row has" in str(wide.stop_reason)
    assert "other fields" not in str(wide.stop_reason)


def test_a_grammar_that_comes_to_where_no_token_may_come_ends_its_request_alone_with_the_text_so_far(engine):
    dead_end, choice = params(grammar='start: "ab" /[^\\s\\S]/'), params(choice=["abcd"])
    free = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    outputs = engine.generate([ids(7), ids(4), ids(5)], [dead_end, free, choice], use_tqdm=False)
    ended, of_free, of_choice = (output.outputs[0] for output in outputs)
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("ab", [97, 98], "error")
    assert ended.stop_reason == "structured_outputs cannot be followed further: no token may come next"
    assert of_free.token_ids == solo(ids(4), max_tokens=9) and of_choice.text == "abcd"
    assert engine.reset_prefix_cache(), "blocks are held"


def test_additional_properties_can_be_switched_off(engine):
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "null"}}}}}
    outputs = generate(engine, [params(i, json=schema, disable_additional_properties=True) for i in range(8)])
    strict = {"type": "object", "properties": {"a": {"enum": [{}, {"b": None}]}}, "additionalProperties": False}
    for output in outputs:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), strict)
    assert any(output.finish_reason == "stop" for output in outputs)


STRUCTURES = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}],
    "triggers": ["<f="],
}
TAGS = {"format": {"type": "tags_with_separator", "separator": ";", "at_least_one": True, "tags": [
    {"begin": "<tag>", "content": {"type": "regex", "pattern": "[xy]{1,3}"}, "end": "."},
    {"begin": "b(", "content": {"type": "or", "elements": [
        {"type": "const_string", "value": "one"}, {"type": "json_schema", "json_schema": {"type": "integer"}}]},
     "end": ")"},
]}}  # fmt: skip
TRIGGERED = {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "go "}, {
    "type": "triggered_tags", "triggers": ["<"], "at_least_one": True, "stop_after_first": True,
    "tags": [{"begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}]}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "accepted", "refused"),
    [
        (STRUCTURES, ["free text", "x <f=a>true</f> y <f=a>false</f>"], ["<f=b>", "<f=a>1</f>"]),
        (TAGS, ["<tag>xy.", "b(one);<tag>x.;b(-12)"], ["", "b(two)", "<tag>z.", "b(one)b(one)"]),
        (TRIGGERED, ["go then <t>any thing</t>"], ["go ", "then <t></t>", "go <u>", "go <t>a</t> and <t>b</t>"]),
    ],
)
def test_structural_tags_hold_their_content_and_leave_the_rest_free(vocabulary, tag, accepted, refused):
    from llguidance import LLMatcher

    grammar = to_llguidance(StructuredOutputsParams(structural_tag=json.dumps(tag)), vocabulary.special_texts)

    def accepts(text: str) -> bool:
        matcher = LLMatcher(vocabulary.llguidance, grammar)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = []
        for k, piece in enumerate(text.split("<tag>")):
            token_ids += [263] * (k > 0) + list(piece.encode())
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    assert all(map(accepts, accepted))
    assert not any(map(accepts, refused))


def test_a_structural_tag_is_followed_by_the_engine(engine):
    outputs = generate(engine, [params(i, structural_tag=json.dumps(TAGS)) for i in range(8)])
    pattern = re.compile(r"(<tag>[xy]{1,3}\.|b\((one|-?\d+)\))(;(<tag>[xy]{1,3}\.|b\((one|-?\d+)\)))*")
    assert all(pattern.fullmatch(o.text) for o in outputs if o.finish_reason == "stop")
    assert any(o.finish_reason == "stop" for o in outputs)


def test_greedy_structured_and_free_requests_share_steps_and_the_free_ones_notice_nothing(engine):
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [ids(17), [70, 71, 72], ids(17), ids(5, 3)]
    choice = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(choice=["abc", "abd"]))
    outputs = engine.generate(prompts, [free, choice, free, choice], use_tqdm=False)
    for index in (0, 2):
        assert outputs[index].outputs[0].token_ids == solo(prompts[index], max_tokens=20)
    for index in (1, 3):
        assert outputs[index].outputs[0].text in ("abc", "abd") and len(outputs[index].outputs[0].token_ids) == 4


@pytest.mark.parametrize("num_blocks", [65, 9])
def test_synchronous_and_asynchronous_scheduling_give_equal_tokens_under_preemption(model_folder, num_blocks):
    """The same seeds and prompts with shared prefixes; with 8 usable blocks requests pre-empt one another."""
    shared = ids(32)
    wanted = [
        params(seed=i, max_tokens=40, json=random_schema(random.Random(i)))
        if i % 3
        else SamplingParams(temperature=1.0, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(12)
    ]
    results, num_preemptions = [], []
    for async_scheduling in (False, True):
        engine = Engine(
            model_folder, **TINY, max_model_len=112, max_num_seqs=6, num_gpu_blocks_override=num_blocks,
            async_scheduling=async_scheduling, num_growth_tokens=0,
        )  # fmt: skip
        outputs = engine.generate([[*shared, 65 + i] for i in range(12)], wanted, use_tqdm=False)
        results.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
        metrics = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
        num_preemptions.append(metrics["vllm:num_preemptions"])
        assert engine.reset_prefix_cache()
        engine.shutdown()
    assert results[0] == results[1]
    assert all((n > 0) == (num_blocks == 9) for n in num_preemptions)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_aborts_at_random_times_leave_the_others_texts_as_they_are(model_folder, async_scheduling):
    args = EngineArgs(
        model_folder, **TINY, max_model_len=112, max_num_seqs=6, num_gpu_blocks_override=9,
        async_scheduling=async_scheduling,
    )  # fmt: skip
    llm_engine = LLMEngine.from_engine_args(args)
    rng, ends = random.Random(5), []
    victims = rng.sample(range(16), 6)
    for abort_share in (0.0, 0.2):
        for i in range(16):
            given = params(seed=i, max_tokens=25, json=random_schema(random.Random(i)))
            given.output_kind = RequestOutputKind.FINAL_ONLY
            llm_engine.add_request(str(i), ids(20, i), given)
        finished = {}
        while llm_engine.has_unfinished_requests():
            if rng.random() < abort_share:
                llm_engine.abort_request(str(rng.choice(victims)))
            finished |= {o.request_id: o.outputs[0] for o in llm_engine.step() if o.finished}
        ends.append({name: (end.token_ids, end.finish_reason) for name, end in finished.items()})
    aborted = {name for name, (_, reason) in ends[1].items() if reason == "abort"}
    assert len(aborted) > 0 and aborted <= set(map(str, victims))
    assert {name: end for name, end in ends[1].items() if name not in aborted} == {
        name: end for name, end in ends[0].items() if name not in aborted
    }
    assert llm_engine.reset_prefix_cache()


def test_children_of_one_request_follow_the_grammar_each_with_its_own_seed(engine):
    given = params(seed=5, max_tokens=30, regex="[a-z]{3,9}!")
    given.n = 6
    (output,) = engine.generate(ids(40), given, use_tqdm=False)
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{3,9}!", text) for text in texts) and len(set(texts)) > 3
    for index in (0, 4):
        (alone,) = engine.generate(ids(40), params(seed=5 + index, max_tokens=30, regex="[a-z]{3,9}!"), use_tqdm=False)
        assert alone.outputs[0].text == texts[index]


def test_end_tokens_and_min_tokens_obey_the_grammar_and_each_other(engine):
    def run(**fields):
        given = SamplingParams(
            **{"temperature": 1.0, "seed": 1, "max_tokens": 12, "structured_outputs": {"regex": "a{2,}"}} | fields
        )
        return engine.generate([[65, 66]], given, use_tqdm=False)[0].outputs[0]

    assert re.fullmatch("a{6,}", run(min_tokens=6).text)  # until then EOS is masked though the grammar allows it
    stopped = run(stop_token_ids=[ord("a")])
    assert (stopped.token_ids, stopped.stop_reason, stopped.text) == ([97], 97, "")
    ignored = run(ignore_eos=True, structured_outputs={"regex": "ab"})
    assert (ignored.token_ids, ignored.finish_reason) == ([97, 98, *[EOS] * 10], "length")
    # Nothing is allowed that both sides allow: the grammar refuses what was drawn, and the message says so.
    stuck = run(min_tokens=6, structured_outputs={"regex": "ab"})
    assert stuck.finish_reason == "error"
    assert (stuck.text, stuck.token_ids) == ("ab", [97, 98])
    assert re.match(r"structured_outputs cannot take token \d+: the text is complete\.", str(stuck.stop_reason))


BAD = [
    ({"regex": "("}, "regex=\\( cannot be followed: .*unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"json": "nope"}, "json=nope cannot be followed: Expecting value"),
    ({"json": {"type": "objct"}}, "Invalid type: objct"),
    ({"json": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
    ({"json": {"enum": [float("nan")]}}, "not JSON compliant"),
    ({"json": {"type": "string"}, "whitespace_pattern": "("}, "unclosed group"),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"grammar": 'item ::= "a"'}, "No 'root' rule found"),
    ({"regex": "a" * 300_000}, "regex makes 300000 characters; at most 262144 are compiled: shorten it"),
    ({"choice": ["word"] * 60_000}, "choice makes .* characters; at most 262144"),
    ({"choice": ["\ud800"]}, "half of a surrogate pair"),
    ({"structural_tag": "[]"}, "a structural tag must be a JSON object, got list"),
    ({"structural_tag": '{"format": {"type": "x"}}'}, "structural tag format 'x' is not supported"),
]


@pytest.mark.parametrize(("kind", "message"), BAD, ids=[message[:20] for _, message in BAD])
def test_a_constraint_that_cannot_be_compiled_is_refused_at_submission(engine, kind, message):
    with pytest.raises(ValueError, match=f"(?s)structured_outputs: .*{message}"):
        engine.generate([[65]], params(**kind), use_tqdm=False)
    assert engine.llm_engine.get_num_unfinished_requests() == 0


def test_schemas_whose_keys_or_numbers_no_message_knows_work_all_the_same(engine):
    """A core in a process of its own reads the schema from msgpack, which knows neither."""
    given = params(json={"type": "integer", "minimum": 10**30, "maximum": 10**30, "x-note": {7: None}})
    assert given.structured_outputs is not None
    (child,) = engine.llm_engine.process_request("a", [65], given).children
    assert child.sampling_params.structured_outputs == given.structured_outputs.with_json_text()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(child.sampling_params), type=SamplingParams)
    assert decoded == child.sampling_params
    assert isinstance(given.structured_outputs.json, dict)


def test_deeply_nested_schemas_are_refused_too(engine):
    schema: dict = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="cannot be followed"):
        engine.generate([[65]], params(json=schema), use_tqdm=False)
    with pytest.raises(ValueError, match="cannot be followed"):
        engine.generate([[65]], params(json="[" * 100_000), use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "sets no constraint: give exactly one of json, regex"),
        ({"json_object": False}, "sets no constraint"),
        ({"regex": "a", "choice": ["b"]}, "sets regex and choice: give exactly one"),
        ({"choice": []}, r"choice=\[\] must hold at least one string"),
        ({"choice": "abc"}, "choice='abc' must be a list"),
        ({"regex": ""}, "regex='' must be a non-empty string"),
        ({"json": 3}, "json=3 must be a JSON schema"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace has no meaning with regex"),
        ({"regexp": "a"}, r"unknown keys \['regexp'\]"),
    ],
)
def test_contradicting_fields_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=fields)


def test_models_and_modes_that_cannot_honour_a_constraint_say_so(tmp_path, model_folder):
    from tests.engine.conftest import write_model

    no_tokenizer = Engine(model_folder, **TINY, skip_tokenizer_init=True, max_model_len=256)
    with pytest.raises(ValueError, match="structured_outputs cannot be followed without a tokenizer"):
        no_tokenizer.generate([[65]], params(regex="a"), use_tqdm=False)
    no_end = Engine(write_model(tmp_path, config={"eos_token_id": None}, eos=None), **TINY, max_model_len=256)
    with pytest.raises(ValueError, match="without a token that ends the text"):
        no_end.generate([[65]], params(regex="a"), use_tqdm=False)


def test_others_go_on_while_a_grammar_compiles_and_aborts_work_meanwhile(model_folder, monkeypatch):
    from threading import Event

    from jaxvllm.structured_output import manager

    may_load = Event()
    load = manager.load_tokenizer
    monkeypatch.setattr(manager, "load_tokenizer", lambda *args: (may_load.wait(20), load(*args))[1])
    llm_engine = LLMEngine.from_engine_args(EngineArgs(model_folder, **TINY, max_model_len=256))
    for request_id in ("g", "aborted"):
        given = params(choice=["left", "right"])
        given.output_kind = RequestOutputKind.FINAL_ONLY
        llm_engine.add_request(request_id, ids(4), given)
    llm_engine.add_request("free", ids(4), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    outputs = {}
    while "free" not in outputs:
        outputs |= {o.request_id: o for o in llm_engine.step() if o.finished}
    assert outputs["free"].outputs[0].token_ids == solo(ids(4), max_tokens=9)
    llm_engine.abort_request("aborted")
    while "aborted" not in outputs:
        outputs |= {o.request_id: o for o in llm_engine.step() if o.finished}
    assert outputs.keys() == {"free", "aborted"}
    may_load.set()
    while "g" not in outputs:
        outputs |= {o.request_id: o for o in llm_engine.step() if o.finished}
    assert outputs["g"].outputs[0].text in ("left", "right")
    assert outputs["aborted"].outputs[0].finish_reason == "abort"


def test_a_tokenizer_that_the_core_cannot_read_costs_the_structured_request_alone(model_folder, monkeypatch):
    from jaxvllm.structured_output import manager

    def fail(*args):
        raise ValueError("the tokenizer cannot be read")

    monkeypatch.setattr(manager, "load_tokenizer", fail)
    engine = Engine(model_folder, **TINY, max_model_len=256)
    free = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    outputs = engine.generate([ids(4), ids(4)], [params(regex="a"), free], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "the tokenizer cannot be read" in str(outputs[0].outputs[0].stop_reason)
    assert outputs[1].outputs[0].token_ids == solo(ids(4), max_tokens=9)
