"""Empty prompts and begin tokens over HTTP, with a tokenizer that adds one and one that does not."""

from collections.abc import Iterator

import pytest

from jaxvllm import Engine, SamplingParams
from tests.server.conftest import BOS
from tests.server.process import EXECUTORS, Server, running_server

EMPTY = ["", [], [""], [[]], ["ok", ""]]
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def bos_server(bos_folder) -> Iterator[Server]:
    with running_server(bos_folder, "successor") as server:
        yield server


def complete(server: Server, prompt, **fields):
    return server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2} | fields)


@pytest.mark.parametrize("prompt", EMPTY, ids=repr)
def test_e01_without_bos_an_empty_prompt_is_refused_and_nothing_runs(server, prompt):
    before = server.gauges()["vllm:prompt_tokens"]
    error = complete(server, prompt).error()
    assert error["code"] == 400 and "empty" in error["message"]
    server.wait_until_idle()
    assert server.gauges()["vllm:prompt_tokens"] == before
    assert complete(server, "A").json()["choices"][0]["text"] == "BC"


def test_e01_with_bos_the_empty_text_is_one_token_but_no_ids_are_none(bos_server):
    assert complete(bos_server, "", return_token_ids=True).json()["choices"][0]["prompt_token_ids"] == [BOS]
    assert len(complete(bos_server, ["ok", ""]).json()["choices"]) == 2
    for prompt in ([], [[]]):
        assert "empty" in complete(bos_server, prompt).error()["message"]


def test_e01_a_space_works_and_a_chat_needs_messages_not_content(server):
    assert complete(server, " ").json()["choices"][0]["text"] == '!"'
    error = server.post("/v1/chat/completions", {"messages": []}).error()
    assert (error["code"], error["param"]) == (400, "messages")
    empty = [{"role": "user", "content": ""}]
    assert server.post("/v1/chat/completions", {"messages": empty, "max_tokens": 2}).status == 200


def prompt_ids(answer) -> list[int]:
    answer = answer.json()
    return answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]


def test_e12_one_begin_token_in_a_chat_and_in_plain_text_two_in_rendered_text(bos_server, bos_folder):
    fields = {"max_tokens": 1, "return_token_ids": True}
    chat = prompt_ids(bos_server.post("/v1/chat/completions", {"messages": HELLO} | fields))
    assert chat.count(BOS) == 1 and chat[0] == BOS
    plain = prompt_ids(complete(bos_server, "hi", **fields))
    assert plain == [BOS, 104, 105]
    rendered = bos_server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert rendered.startswith("<s>")
    assert prompt_ids(complete(bos_server, rendered, **fields)) == [BOS, *chat], "as Hugging Face: both add one"
    assert prompt_ids(complete(bos_server, rendered, add_special_tokens=False, **fields)) == chat
    assert prompt_ids(complete(bos_server, [BOS, 104], **fields)) == [BOS, 104]
    assert bos_server.post("/tokenize", {"messages": HELLO}).json()["tokens"] == chat
    with Engine(bos_folder, executor=f"{EXECUTORS}:successor", device="cpu", multiprocess=False) as engine:
        outputs = engine.chat(HELLO, SamplingParams(max_tokens=1), use_tqdm=False)
    assert outputs[0].prompt_token_ids == chat, "the Python API and the server agree"
