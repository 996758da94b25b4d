"""Tool calls over HTTP: definitions in the prompt, calls in the answer, streamed and not. The model is a parrot."""

import json

import pytest

from tests.server.process import Server

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ONE_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO_CALLS = f'Let me see. {ONE_CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'


def body(said: str, **fields) -> dict:
    """A chat in which the model says something."""
    messages = [{"role": "user", "content": f"\x01{said}\x02"}]
    return {"messages": messages, "tools": [WEATHER, CLOCK], "max_tokens": 500} | fields


def whole(server: Server, request: dict) -> tuple[str | None, list[tuple[str, str]], str]:
    """(content, calls, finish reason) of an answer."""
    answer = server.post("/v1/chat/completions", request)
    assert answer.status == 200, answer.body
    [choice] = answer.json()["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return (
        message["content"],
        [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        choice["finish_reason"],
    )


def streamed(server: Server, request: dict) -> tuple[str | None, list[tuple[str, str]], str]:
    """The same, put together as clients do."""
    content, names, arguments, reason = "", {}, {}, ""
    for chunk in server.stream("/v1/chat/completions", request):
        [choice] = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] not in names and call["type"] == "function"
                names[call["index"]] = call["function"]["name"]
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"].get("arguments", "")
        reason = choice["finish_reason"] or reason
    calls = [(names[i], arguments[i]) for i in sorted(names)]
    return content or (None if calls else ""), calls, reason


@pytest.mark.parametrize("ask", [whole, streamed])
def test_auto_calls_are_found_in_the_text(parrot, ask):
    assert ask(parrot, body("Just text.")) == ("Just text.", [], "stop")
    content, calls, reason = ask(parrot, body(TWO_CALLS))
    assert (content.strip(), reason) == ("Let me see.", "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == [("weather", {"city": "Oslo"}), ("clock", {})]
    _, calls, _ = ask(parrot, body(TWO_CALLS, parallel_tool_calls=False))
    assert [name for name, _ in calls] == ["weather"]
    assert ask(parrot, body(ONE_CALL, tool_choice="auto"))[::2] == (None, "tool_calls")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_none_leaves_text_as_it_is(parrot, ask):
    assert ask(parrot, body(ONE_CALL, tool_choice="none")) == (ONE_CALL, [], "stop")
    assert ask(parrot, body(ONE_CALL, tools=None)) == (ONE_CALL, [], "stop")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_call_that_is_cut_off_ends_with_length(parrot, ask):
    _, calls, reason = ask(parrot, body(ONE_CALL, max_tokens=len(ONE_CALL) - 25))
    assert reason == "length" and calls[0][0] == "weather"


REQUIRED = '[{"name": "weather", "parameters": {"city": "Oslo [}]"}}, {"name": "clock", "parameters": {}}]'


@pytest.mark.parametrize("ask", [whole, streamed])
def test_required_calls_are_a_list_that_the_text_is_held_to(parrot, ask):
    content, calls, reason = ask(parrot, body(REQUIRED, tool_choice="required"))
    assert (content, reason) == (None, "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == [("weather", {"city": "Oslo [}]"}), ("clock", {})]


def with_definitions(name: str, keyword: str, kind: str) -> dict:
    """A tool whose only argument is of a type that its schema defines at its root."""
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": f"#/{keyword}/X"}},
        "required": ["x"],
        keyword: {"X": {"type": kind}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_required_calls_keep_the_definitions_of_their_schemas(parrot):
    tools = [with_definitions("f", "$defs", "string"), with_definitions("g", "definitions", "integer")]
    said = '[{"name": "f", "parameters": {"x": "y"}}, {"name": "g", "parameters": {"x": 3}}]'
    _, calls, reason = whole(parrot, body(said, tools=tools, tool_choice="required"))
    assert (calls, reason) == ([("f", '{"x": "y"}'), ("g", '{"x": 3}')], "tool_calls")
    for keyword in ("$defs", "definitions"):
        tools = [with_definitions("f", keyword, "string"), with_definitions("g", keyword, "integer")]
        error = parrot.post("/v1/chat/completions", body(said, tools=tools, tool_choice="required")).error()
        assert f"tools define {keyword}/X in two ways" in error["message"]


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_named_function_gets_all_of_the_text_as_arguments(parrot, ask):
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = ask(parrot, body('{"city": "Oslo"}', tool_choice=choice))
    assert answer == (None, [("weather", '{"city": "Oslo"}')], "stop")


def test_text_that_breaks_the_demand_cannot_come(parrot):
    """The parrot ignores what it is allowed to say: the engine notices, and the answer is an error."""
    for said, choice in (("No.", "required"), ("No.", {"type": "function", "function": {"name": "weather"}})):
        assert parrot.post("/v1/chat/completions", body(said, tool_choice=choice)).error()["code"] in (400, 500)


def test_definitions_and_former_calls_are_rendered(parrot):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    tokens = parrot.post("/tokenize", {"messages": messages, "tools": [CLOCK]}).json()["tokens"]
    text = parrot.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    expected = '[{"type": "function", "function": {"name": "clock"}}]\na:x<weather|{"city": "Oslo"}>t:rain\x03'
    assert text == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "'nope'"),
        ({"tools": [CLOCK, CLOCK]}, "names of their own"),
        ({"tools": [CLOCK] * 129}, "128"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "cannot be combined"),
    ],
)
def test_contradictions_are_refused(parrot, fields, words):
    assert words in parrot.post("/v1/chat/completions", body("x", **fields)).error()["message"]


@pytest.mark.parametrize(
    "calls",
    ["x", [1], [{}], [{"function": {"name": "f", "arguments": "{"}}], [{"function": {"name": "f", "arguments": "[]"}}]],
)
def test_former_calls_that_are_none_are_refused(parrot, calls):
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert parrot.post("/v1/chat/completions", {"messages": messages}).error()["param"] == "messages"


def test_auto_needs_a_server_that_was_started_for_it(server):
    error = server.post("/v1/chat/completions", body("x")).error()
    assert error["param"] == "tool_choice" and "--enable-auto-tool-choice" in error["message"]


def test_templates_see_their_variables_and_cannot_be_tricked(parrot, server):
    messages = [{"role": "user", "content": "\x01x\x02"}]
    for kwargs in ({"tools": []}, {"tokenize": True}, {"messages": []}, {"chat_template": "x"}):
        error = parrot.post("/v1/chat/completions", {"messages": messages, "chat_template_kwargs": kwargs}).error()
        assert error["param"] == "chat_template_kwargs"
    error = server.post("/v1/chat/completions", {"messages": messages, "chat_template": "{{ 1 }}"}).error()
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
