"""Usage in streams, lists of prompts, prompts at the limit, ids outside the vocabulary."""

import threading

import pytest

from tests.server.process import Server, running_server

ONE = {"prompt": "A", "max_tokens": 3}


def test_e06_usage_comes_where_it_is_asked_for(server):
    for options in ({}, {"stream_options": {}}):
        assert all("usage" not in chunk for chunk in server.stream("/v1/completions", ONE | options))
    *chunks, last = server.stream("/v1/completions", ONE | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and all(chunk.get("usage") is None for chunk in chunks)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (
        1,
        3,
        4,
    )
    error = server.post("/v1/completions", ONE | {"stream_options": {"include_usage": True}}).error()
    assert (error["code"], error["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_e06_usage_in_every_chunk_never_shrinks_and_ends_at_the_total(server, path):
    body = {"max_tokens": 9, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body |= {"prompt": "A"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    counts = [chunk["usage"]["completion_tokens"] for chunk in server.stream(path, body)]
    assert counts == sorted(counts) and counts[-1] == 9


def test_e06_completions_of_all_choices_are_added_up_and_the_prompt_counts_once(server):
    body = ONE | {"n": 3, "stream_options": {"include_usage": True}}
    *chunks, last = server.stream("/v1/completions", body)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (1, 9)
    assert sorted(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]) == [0, 1, 2]


def test_e06_stop_tokens_count_and_cached_tokens_do_only_on_a_second_visit(model_folder):
    with running_server(model_folder, "successor", "--enable-prompt-tokens-details") as server:
        prompt = list(range(100, 150))
        usages = [server.post("/v1/completions", ONE | {"prompt": prompt}).json()["usage"] for _ in range(2)]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 48]
        for fields in ({"prompt": [258]}, {"prompt": [65], "stop_token_ids": [69]}):
            answer = server.post("/v1/completions", {"max_tokens": 9} | fields).json()
            assert answer["usage"]["completion_tokens"] == 4 and answer["choices"][0]["finish_reason"] == "stop"
        with_small_pool = ("--num-gpu-blocks-override", "9", "--max-model-len", "128", "--max-num-seqs", "4")
        with_small_pool += ("--num-growth-tokens", "0")  # else nobody is pre-empted
    prompts = [[i] * 40 for i in range(1, 5)]
    with running_server(model_folder, "successor", *with_small_pool, "--enable-prompt-tokens-details") as server:
        body = {"prompt": prompts, "max_tokens": 40, "ignore_eos": True}
        usage = server.post("/v1/completions", body).json()["usage"]
        assert server.gauges()["vllm:num_preemptions"] > 0
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (160, 160)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "to recompute is not to hit"


@pytest.mark.parametrize("prompt", [["A", "K", "P"], [[65], [75], [80]]], ids=["text", "ids"])
def test_e13_choices_of_a_list_of_prompts_are_in_order(server, prompt):
    expected = ["BCD", "BCD", "LMN", "LMN", "QRS", "QRS"]
    body = {"prompt": prompt, "n": 2, "max_tokens": 3, "temperature": 1.0}
    answer = server.post("/v1/completions", body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(expected))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 18)
    texts, ends = [""] * 6, [0] * 6
    for chunk in server.stream("/v1/completions", body):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert (texts, ends) == (expected, [1] * 6)


def test_e13_one_bad_prompt_in_a_list_leaves_none_running(server):
    before = server.gauges()["vllm:prompt_tokens"]
    for bad in (["A", [75]], ["A", ""], [[65], [264]], [[65], []]):
        error = server.post("/v1/completions", {"prompt": bad, "max_tokens": 900}).error()
        assert error["code"] == 400 and ("prompt 1 of 2" in error["message"] or "not mixed" in error["message"])
    server.wait_until_idle()
    assert server.gauges()["vllm:prompt_tokens"] == before


def test_a02_prompts_at_the_context_limit(model_folder):
    options = ("--max-model-len", "32", "--num-gpu-blocks-override", "33", "--block-size", "16")
    with running_server(model_folder, "successor", *options) as server:
        limit = server.post("/v1/completions", {"prompt": [5] * 31, "max_tokens": 10}).json()
        assert limit["usage"]["completion_tokens"] == 1 and limit["choices"][0]["finish_reason"] == "length"
        for length in (32, 33):
            message = server.post("/v1/completions", {"prompt": [5] * length, "max_tokens": 10}).error()["message"]
            assert f"has {length} tokens" in message and "at most 31" in message
        assert server.post("/v1/completions", {"prompt": [5] * 5, "max_tokens": 3}).json()["usage"]["total_tokens"] == 8
        server.wait_until_idle()


BAD_IDS = [
    *({"prompt": prompt} for prompt in ([264], [-1], [4611686018427387904], [1.5], [True], [[1, 2], [999999]])),
    *({"logit_bias": bias} for bias in ({"264": 5}, {"-1": 5}, {"abc": 5})),
    *({"stop_token_ids": ids} for ids in ([264], [-5], ["7"], [True], [1.5])),
    *({"allowed_token_ids": ids} for ids in ([264], [-1], [])),
    {"bad_words": [""]},
]


def test_e02_ids_outside_the_vocabulary_are_refused_and_the_neighbour_notices_nothing(slow_server: Server):
    stream = {"prompt": [7], "max_tokens": 250, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    ids: list[int] = []

    def neighbour() -> None:
        for chunk in slow_server.stream("/v1/completions", stream):
            ids.extend(chunk["choices"][0]["token_ids"])

    thread = threading.Thread(target=neighbour)
    thread.start()
    for bad in BAD_IDS:
        error = slow_server.post("/v1/completions", ONE | bad).error()
        assert error["code"] == 400, (bad, error)
    thread.join()
    assert ids == [(8 + i) % 264 for i in range(250)]
