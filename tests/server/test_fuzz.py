"""The API's own description, fuzzed: whatever is sent, nothing is a 500 and every error has OpenAI's shape."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode

from jaxvllm.server.app import make_app
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.serving import Serving
from tests.server.process import Server, running_server

DESCRIPTION = make_app(Serving(cast(Any, None), ServerConfig(("m",)))).openapi()
NUM_EXAMPLES = 40  # an operation
schema = schemathesis.openapi.from_dict(DESCRIPTION)
schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def small_server(model_folder) -> Iterator[Server]:
    """Short contexts: an example that is served should be served soon."""
    options = ("--max-model-len", "64", "--served-model-name", "m", "--disable-uvicorn-access-log")
    with running_server(model_folder, "successor", *options) as server:
        yield server


def test_the_description_holds_every_route():
    assert DESCRIPTION["paths"].keys() == {
        *("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"),
        *("/health", "/ping", "/version", "/load", "/metrics"),
    }


@schema.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_answer_is_a_server_error_and_every_error_has_its_shape(case, small_server):
    answer = case.call(base_url=small_server.url, timeout=30)
    assert answer.status_code < 500, (case.body, answer.content)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == ["application/json"], answer.headers
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == answer.status_code and error["message"]


def test_the_next_request_works(small_server):
    answer = small_server.post("/v1/completions", {"prompt": "A", "max_tokens": 3})
    assert answer.json()["choices"][0]["text"] == "BCD"
    small_server.wait_until_idle()
