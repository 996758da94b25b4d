"""What a client is told of a body that does not fit."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from jaxvllm.server.body import parse_body
from jaxvllm.server.errors import ApiError, to_api_error
from jaxvllm.server.protocol import ChatCompletionRequest, CompletionRequest


def error_of(model: type[BaseModel], **fields: Any) -> ApiError:
    with pytest.raises(ValueError, match="validation error") as caught:
        parse_body(json.dumps(fields).encode(), model)
    error = to_api_error(caught.value, model.model_fields)
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["x"] * 65, "...: List should have at most 64 items after validation, not 65."),
        ("x" * 1025, "...: String should have at most 1024 characters."),
        (["a", "x" * 1025], "...: String should have at most 1024 characters."),
        (["a", 3], "stop.1=3: Input should be a valid string."),
        (3, "stop=3: Input should be a valid string or a valid list."),
    ],
)
def test_a_field_of_several_types_is_refused_for_what_is_wrong_with_the_type_that_was_sent(stop, message):
    error = error_of(CompletionRequest, prompt="a", stop=stop)
    assert error.message.endswith(message) and error.param == "stop" and "constrained-str" not in error.message


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("sometimes", "tool_choice='sometimes': Input should be 'none', 'auto' or 'required'."),
        ({"type": "function"}, "tool_choice.function is missing."),
        ({"function": {"name": 5}}, "tool_choice.function.name=5: Input should be a valid string."),
    ],
)
def test_a_tool_choice_is_refused_for_the_part_that_is_wrong(choice, message):
    assert error_of(ChatCompletionRequest, messages=[{"role": "user"}], tool_choice=choice).message == message


def test_the_first_of_several_bad_parts_is_named():
    error = error_of(CompletionRequest, prompt="a", stop_token_ids=["a", "b"], top_p="c")
    assert (error.param, error.message) == ("top_p", "top_p='c': Input should be a valid number.")
    error = error_of(CompletionRequest, prompt="a", stop_token_ids=[1, "b", "c"])
    assert error.message == "stop_token_ids.1='b': Input should be a valid integer."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "logprob_token_ids needs logprobs=0, or their number, 2."),
        ({"logprobs": 3}, "logprob_token_ids needs logprobs=0, or their number, 2."),
    ],
)
def test_completions_ask_for_listed_logprobs_with_their_number(fields, message):
    error = error_of(CompletionRequest, prompt="a", logprob_token_ids=[5, 6], **fields)
    assert (error.param, error.message) == ("logprob_token_ids", message)


def test_chats_ask_for_listed_logprobs_with_their_number():
    error = error_of(
        ChatCompletionRequest, messages=[{"role": "user"}], logprobs=True, logprob_token_ids=[5, 6], top_logprobs=3
    )
    assert error.param == "top_logprobs" and "must be the number of logprob_token_ids, 2" in error.message
