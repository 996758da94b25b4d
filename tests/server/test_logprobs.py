"""Cases C08 and C09 over HTTP: logprobs against a dense reference, with prefixes in the cache and prompts in chunks."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxvllm.logprobs import Logprob
from jaxvllm.server.logprobs import TokenNames, chat_logprobs
from tests.engine.dense import dense_logits, random_tensors, write_folder
from tests.server.process import Server, running_server
from tests.tiny_config import T_TINY

PROMPT = np.random.default_rng(7).integers(97, 123, 50).tolist()  # letters: a token is a character
GREEDY = {"temperature": 0, "ignore_eos": True}
TENSORS = random_tensors(T_TINY)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = write_folder(tmp_path_factory.mktemp("t_tiny"), T_TINY, TENSORS)
    limits = ("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "24", "--block-size", "16")
    with running_server(
        folder, "", *limits, "--bucket-policy", "one_shape", "--enable-prompt-tokens-details"
    ) as server:
        yield server


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def strict(body: bytes) -> dict:
    """JSON without NaN and infinities."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(body, parse_constant=refuse)


def complete(server: Server, **fields) -> dict:
    answer = server.post("/v1/completions", GREEDY | {"return_token_ids": True} | fields)
    assert answer.status == 200, answer.body
    return strict(answer.body)["choices"][0]


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"logprobs": 3, "temperature": 2.0, "seed": 1},
        {"logprobs": 20},
        {"logprobs": 2, "logit_bias": {"5": -100}, "allowed_token_ids": [1, 2, 3]},
    ],
    ids=["0", "3", "20", "2 masked"],
)
def test_c08_logprobs_are_of_the_raw_logits_and_strict_json(server, params):
    choice = complete(server, prompt=PROMPT, max_tokens=4, return_tokens_as_token_ids=True, **params)
    expected = log_softmax(dense_logits(T_TINY, TENSORS, PROMPT + choice["token_ids"])[len(PROMPT) - 1 :])
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    for token, value, top, row in zip(
        choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"] or [{}] * 4, expected, strict=False
    ):
        assert value == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row)[: params["logprobs"]].tolist()
        assert set(top) == {f"token_id:{i}" for i in [token, *best]}, "the sampled one is always there"
        assert top == pytest.approx({name: row[int(name.split(":")[1])] for name in top}, abs=1e-4)


def test_c08_more_logprobs_than_allowed_are_refused(server):
    answer = server.post("/v1/completions", GREEDY | {"prompt": PROMPT, "logprobs": 21})
    assert answer.status == 400 and answer.error()["message"].startswith("logprobs=21 must be at most max_logprobs=20")
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 30}
    error = server.post("/v1/chat/completions", body).error()
    assert error["param"] == "top_logprobs" and error["message"].startswith("top_logprobs=30 must be at most")


def test_logprob_token_ids_are_shown_in_both_apis(server):
    fields = {"logprob_token_ids": [7, 9], "max_tokens": 2, "return_tokens_as_token_ids": True}
    for logprobs in (0, 2):
        tops = complete(server, prompt=PROMPT, logprobs=logprobs, **fields)["logprobs"]["top_logprobs"]
        assert len(tops) == 2 and all({"token_id:7", "token_id:9"} <= set(top) for top in tops)
    body = GREEDY | {"messages": [{"role": "user", "content": "a"}], "logprobs": True} | fields
    [choice] = strict(server.post("/v1/chat/completions", body).body)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert {"token_id:7", "token_id:9"} <= {top["token"] for top in entry["top_logprobs"]}


def test_an_unknown_custom_argument_is_refused_by_the_servers_name_for_it(server):
    error = server.post("/v1/completions", {"prompt": PROMPT, "vllm_xargs": {"a": 1}}).error()
    assert error["param"] == "vllm_xargs" and error["message"].startswith("vllm_xargs has the key 'a'")


def test_c08_chat_logprobs_without_top_logprobs_have_empty_lists(server):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "logprobs": True, "top_logprobs": None}
    answer = server.post("/v1/chat/completions", GREEDY | body)
    assert answer.status == 200, answer.body
    content = strict(answer.body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 3 and all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in content)


def test_c08_a_probability_of_zero_is_a_large_negative_number():
    entry = {5: Logprob(-math.inf, 9, None), 6: Logprob(-0.5, 1, None)}
    [chosen] = chat_logprobs([5], [entry], 2, TokenNames(None, as_ids=True)).content
    assert chosen.logprob == -9999.0 and [top.logprob for top in chosen.top_logprobs] == [-0.5, -9999.0]


@pytest.mark.parametrize("company", [0, 3])
def test_c09_echo_gives_all_prompt_logprobs_with_the_prefix_in_the_cache_and_in_chunks(server, company):
    for _ in range(2):
        warm = server.post("/v1/completions", GREEDY | {"prompt": PROMPT, "max_tokens": 1})
        assert warm.status == 200
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    expected = log_softmax(dense_logits(T_TINY, TENSORS, PROMPT))
    body = GREEDY | {"max_tokens": 40}
    with ThreadPoolExecutor() as pool:
        others = [
            pool.submit(server.post, "/v1/completions", body | {"prompt": PROMPT[i + 1 :]}) for i in range(company)
        ]
        choice = complete(server, prompt=PROMPT, max_tokens=1, echo=True, logprobs=2, return_tokens_as_token_ids=True)
        assert all(other.result().status == 200 for other in others)
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 51
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    for i in range(1, 50):
        row = expected[i - 1]
        assert logprobs["token_logprobs"][i] == pytest.approx(row[PROMPT[i]], abs=1e-4)
        assert set(logprobs["top_logprobs"][i]) == {f"token_id:{t}" for t in [PROMPT[i], *np.argsort(-row)[:2]]}
