"""Tool calls of both styles: what is one, what is content, and that cutting the text up changes nothing."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.tool_parsers import ContentDelta, ToolCall, ToolDelta, get_tool_parser
from jaxvllm.tool_parsers.base import join

HERMES, LLAMA = get_tool_parser("hermes")(None), get_tool_parser("llama3_json")(None)
WEATHER = '{"city": "Zürich", "days": [1, 2], "unit": {"kind": "C"}}'
CALL = '<tool_call>\n{"name": "weather", "arguments": ' + WEATHER + "}\n</tool_call>"


def streamed(parser, pieces):
    stream = parser.stream()
    deltas = [delta for piece in pieces for delta in stream.push(piece)]
    return [*deltas, *stream.finish()]


def test_hermes_calls_with_text_in_front():
    message = HERMES.parse("I look it up.\n" + CALL + "\n" + CALL.replace("weather", "time") + "\n")
    assert message.content == "I look it up.\n"
    assert message.tool_calls == [ToolCall("weather", WEATHER), ToolCall("time", WEATHER)]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        '\n <|python_tag|> {"name": "f", "arguments": {"a": 1}}\n',
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{"parameters": {"a": 1}, "name": "f"}',
        '{"name": "f", "parameters": {"a": 1}, "id": [1, {"x": "}"}], "n": -1.5e3, "t": null}',
    ],
)
def test_one_llama_call_in_all_its_forms(text):
    message = LLAMA.parse(text)
    assert (message.content, message.tool_calls) == (None, [ToolCall("f", '{"a": 1}')])


def test_several_llama_calls():
    text = '{"name": "f", "parameters": {"a": ";"}}; {"name": "g", "parameters": {}};<|python_tag|>{"name": "h", '
    message = LLAMA.parse(text + '"arguments": {"b": "}"}}')
    assert message.content is None
    assert message.tool_calls == [ToolCall("f", '{"a": ";"}'), ToolCall("g", "{}"), ToolCall("h", '{"b": "}"}')]
    as_list = LLAMA.parse('[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]')
    assert as_list.content is None
    assert [call.name for call in as_list.tool_calls] == ["f", "g"]


def test_llama_call_behind_text():
    message = LLAMA.parse('Sure {ok}: {"name": "f", "parameters": {}}')
    assert (message.content, message.tool_calls) == ("Sure {ok}: ", [ToolCall("f", "{}")])


def test_tags_within_a_string_are_part_of_it():
    arguments = '{"text": "a </tool_call> \\" <tool_call> {"}'
    message = HERMES.parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert (message.content, message.tool_calls) == (None, [ToolCall("f", arguments)])


@pytest.mark.parametrize("parser", [HERMES, LLAMA])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "Plain text, 1 < 2.",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call></tool_call>",
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f", "argu',
        '<tool_call>{"arguments": {"name": "f"}}</tool_call>',
        '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>{"answer": 42}',
        '{"answer": {"name": "f"}}',
        "{" * 100_000,
        '{"a":' * 10_000,
    ],
)
def test_what_is_no_call_is_content_to_the_letter(parser, text):
    message = parser.parse(text)
    assert (message.content, message.tool_calls) == (text, [])


def test_only_the_broken_call_becomes_content():
    message = HERMES.parse(CALL + "\n<tool_call>oops</tool_call>\n" + CALL)
    assert message.tool_calls == [ToolCall("weather", WEATHER)] * 2
    assert message.content == "\n<tool_call>oops</tool_call>\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1'),  # the longest answer was reached
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>', '{"a": '),
        ('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', '{"a": oops}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_ca', '{"a": 1}'),
    ],
)
def test_arguments_that_break_off_stay_what_the_model_wrote(text, arguments):
    message = HERMES.parse(text)
    assert (message.content, message.tool_calls) == (None, [ToolCall("f", arguments)])


def test_stream_gives_the_name_as_soon_as_arguments_begin_and_then_pieces():
    stream = HERMES.stream()
    assert stream.push("Well") == [ContentDelta("Well")]
    assert stream.push("<tool_call>") == []
    assert stream.push('{"name": "f"') == []
    (named, opened) = stream.push(', "arguments": {')
    assert isinstance(named, ToolDelta) and named.name == "f" and named.index == 0 and named.id
    assert opened == ToolDelta(0, arguments="{")
    assert stream.push('"a": "x') == [ToolDelta(0, arguments='"a": "x')]
    assert stream.push('y"}') == [ToolDelta(0, arguments='y"}')]
    assert stream.push("}\n</tool_call>\n") == []
    again = stream.push(CALL)
    assert isinstance(again[0], ToolDelta) and again[0].index == 1 and again[0].id != named.id
    assert stream.finish() == []


# Pieces that matter to the parsers, so that random texts hit every state.
MARKS = [
    *["<tool_call>", "</tool_call>", "<|python_tag|>", CALL, "<", "{", "}", "[", "]", ",", ":", ";", '"', "\\", "\n"],
    *['"name"', '"arguments"', '"parameters"', '"f"', '{"name": "f", ', '"arguments": {"a": "b', "{}", "1", "null"],
    *[" ", "é🙂"],
]
texts = st.lists(st.sampled_from(MARKS), max_size=25).map("".join) | st.text(max_size=20)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from([HERMES, LLAMA]), texts, st.randoms(use_true_random=False))
def test_cutting_the_text_up_changes_nothing(parser, text, rng):
    whole = parser.parse(text)
    deltas = streamed(parser, chunks(text, rng))
    assert join(deltas) == whole
    assert join(streamed(parser, text)) == whole
    assert_in_order(deltas)
    if not whole.tool_calls:
        assert whole.content == text


def chunks(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def assert_in_order(deltas):
    """Every call: its id and name once, first; then its arguments; then the next call."""
    index = -1
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
        elif delta.name is not None:
            index += 1
            assert delta.index == index and delta.id and delta.arguments is None
        else:
            assert delta.index == index and delta.arguments


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=4)), min_size=1, max_size=3))
def test_well_formed_calls_come_back_whole(calls):
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    hermes = HERMES.parse("\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies))
    llama = LLAMA.parse("; ".join(bodies))
    for message in (hermes, llama):
        assert message.content is None
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls


def test_long_arguments_in_small_pieces_take_linear_time():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 300_000 + '"}}</tool_call>'
    start = time.perf_counter()
    message = join(streamed(HERMES, text))
    assert time.perf_counter() - start < 20  # about 1 s
    assert len(message.tool_calls[0].arguments) == 300_000 + len('{"a": ""}')


def test_unknown_parser_names_those_there_are():
    with pytest.raises(ValueError, match="'pythonic' must be one of hermes, llama3_json"):
        get_tool_parser("pythonic")
