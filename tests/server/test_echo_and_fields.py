"""Echo, log-probabilities and the fields of SamplingParams over HTTP, with a random model that computes logits."""

import json
from collections.abc import Iterator

import openai
import pytest

from tests.engine.tokenizers_fixture import k_bytes
from tests.server.process import Server, running_server

TEXT = "naïve 0"
IDS = k_bytes().encode(TEXT).ids
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(model_folder) -> Iterator[Server]:
    limits = ("--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "16")
    few_programs = ("--bucket-policy", "one_shape", "--block-size", "16")
    with running_server(model_folder, "", "--load-format", "dummy", *limits, *few_programs) as server:
        yield server


def complete(server: Server, **fields) -> dict:
    answer = server.post("/v1/completions", GREEDY | fields)
    assert answer.status == 200, answer.body
    return answer.json()


def choice(server: Server, **fields) -> dict:
    return complete(server, **fields)["choices"][0]


def streamed(server: Server, **fields) -> list[dict]:
    """The choices of a stream, put together."""
    choices: dict[int, dict] = {}
    for chunk in server.stream("/v1/completions", GREEDY | fields):
        [piece] = chunk["choices"]
        whole = choices.setdefault(piece["index"], {"text": "", "logprobs": None})
        whole["text"] += piece["text"]
        if piece["logprobs"]:
            whole["logprobs"] = whole["logprobs"] or {name: [] for name in piece["logprobs"]}
            for name, values in piece["logprobs"].items():
                whole["logprobs"][name] += values
    return [choices[i] for i in sorted(choices)]


def assert_lists(logprobs: dict, text: str, num_prompt: int, num_output: int) -> None:
    lengths = {name: len(values) for name, values in logprobs.items()}
    assert set(lengths.values()) == {num_prompt + num_output}, lengths
    if num_prompt:
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value is not None and value <= 0 for value in logprobs["token_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
    for i, token in enumerate(logprobs["tokens"][:-1]):
        if "\ufffd" not in token and "\ufffd" not in text[offsets[i] : offsets[i + 1]]:
            assert text[offsets[i] : offsets[i + 1]] in (token, ""), (i, token, text, offsets)


@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
def test_e07_echo_puts_the_prompt_in_front_with_its_logprobs(tiny, prompt):
    plain = choice(tiny, prompt=prompt, max_tokens=3)["text"]
    assert choice(tiny, prompt=prompt, max_tokens=3, echo=True) | {"logprobs": None} == choice(
        tiny, prompt=prompt, max_tokens=3, echo=True
    )
    assert choice(tiny, prompt=prompt, max_tokens=3, echo=True)["text"] == TEXT + plain
    whole = choice(tiny, prompt=prompt, max_tokens=3, echo=True, logprobs=1)
    assert whole["text"] == TEXT + plain
    assert_lists(whole["logprobs"], whole["text"], len(IDS), 3)
    [pieces] = streamed(tiny, prompt=prompt, max_tokens=3, echo=True, logprobs=1)
    assert pieces["text"] == whole["text"]
    assert pieces["logprobs"]["text_offset"] == whole["logprobs"]["text_offset"]
    assert pieces["logprobs"]["tokens"] == whole["logprobs"]["tokens"]
    assert pieces["logprobs"]["token_logprobs"][1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_e07_max_tokens_0_gives_the_prompt_alone(tiny):
    answer = complete(tiny, prompt=TEXT, max_tokens=0, echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == TEXT and answer["usage"]["completion_tokens"] == 0
    assert_lists(answer["choices"][0]["logprobs"], TEXT, len(IDS), 0)
    [pieces] = streamed(tiny, prompt=TEXT, max_tokens=0, echo=True, logprobs=1)
    assert pieces["text"] == TEXT and len(pieces["logprobs"]["tokens"]) == len(IDS)


def test_e07_logprobs_of_a_prompt_are_those_that_it_was_generated_with(tiny):
    generated = choice(tiny, prompt=IDS, max_tokens=5, logprobs=0, return_token_ids=True)
    again = choice(tiny, prompt=IDS + generated["token_ids"], max_tokens=0, echo=True, logprobs=0)
    assert again["logprobs"]["token_logprobs"][-5:] == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-4)


def test_e07_each_of_n_choices_echoes_once_and_stop_strings_in_the_prompt_do_not_fire(tiny):
    fields = {"prompt": TEXT, "n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 2, "echo": True, "logprobs": 1}
    for pieces in (complete(tiny, **fields)["choices"], streamed(tiny, **fields)):
        assert len(pieces) == 3
        for piece in pieces:
            assert piece["text"].startswith(TEXT) and not piece["text"][1:].startswith(TEXT)
            assert_lists(piece["logprobs"], piece["text"], len(IDS), 2)
    assert complete(tiny, prompt=TEXT, max_tokens=3, echo=True, stop=["naïve"])["usage"]["completion_tokens"] == 3


def test_top_logprobs_are_the_most_likely_and_the_chosen_one(tiny):
    fields = {"prompt": IDS, "max_tokens": 4, "logprobs": 3, "logit_bias": {"7": 100}}
    assert choice(tiny, **fields)["logprobs"]["tokens"] == ["\x07"] * 4
    logprobs = choice(tiny, **fields, return_tokens_as_token_ids=True)["logprobs"]  # several ids may have one text
    assert logprobs["tokens"] == ["token_id:7"] * 4
    for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 4, "three, and the chosen one, which the bias took from below"
        assert top["token_id:7"] == value == min(top.values())


def test_chat_logprobs(tiny):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    } | GREEDY
    [answer] = tiny.post("/v1/chat/completions", body).json()["choices"]
    content = answer["logprobs"]["content"]
    assert len(content) == 4
    for entry in content:
        assert len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert bytes(entry["bytes"]).decode() == entry["token"]
    pieces = [chunk["choices"][0]["logprobs"] for chunk in tiny.stream("/v1/chat/completions", body)]
    found = [entry["token"] for piece in pieces if piece for entry in piece["content"]]
    assert found == [entry["token"] for entry in content]


def test_logprobs_are_what_openais_client_expects(tiny):
    strict, loose = (
        openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, _strict_response_validation=is_strict)
        for is_strict in (True, False)
    )
    model, messages = tiny.get("/v1/models").json()["data"][0]["id"], [{"role": "user", "content": "hi"}]
    fields = {"model": model, "temperature": 0, "max_tokens": 3}
    answer = strict.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **fields)
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * 3
    assert strict.completions.create(prompt=TEXT, logprobs=2, **fields).choices[0].logprobs.text_offset[0] == 0
    # Not strict: the first token of a prompt has no logprob, and the client's type has no null.
    whole = loose.completions.create(prompt=TEXT, logprobs=2, echo=True, **fields).choices[0]
    assert whole.logprobs.token_logprobs[0] is None and len(whole.logprobs.tokens) == len(IDS) + 3


def test_prompt_logprobs(tiny):
    entries = choice(tiny, prompt=IDS, max_tokens=1, prompt_logprobs=2)["prompt_logprobs"]
    assert len(entries) == len(IDS) and entries[0] is None
    for token_id, entry in zip(IDS[1:], entries[1:], strict=True):
        assert {"logprob", "rank", "decoded_token"} == entry[str(token_id)].keys() and len(entry) in (2, 3)
    error = tiny.post("/v1/completions", {"prompt": IDS, "prompt_logprobs": 1, "stream": True}).error()
    assert error["param"] == "prompt_logprobs"


def ids(server: Server, **fields) -> list[int]:
    return choice(server, prompt=IDS, max_tokens=12, return_token_ids=True, **fields)["token_ids"]


def test_fields_of_sampling_params_have_their_effect(tiny):
    plain = ids(tiny)
    assert set(ids(tiny, allowed_token_ids=[70, 71])) <= {70, 71}
    assert set(ids(tiny, logit_bias={"70": 100.0})) == {70}
    assert set(ids(tiny, logit_bias={"70": 1e9})) == {70}, "clamped to 100, as in vLLM"
    assert ids(tiny, logit_bias={str(plain[0]): -100}) != plain
    assert ids(tiny, stop_token_ids=[plain[3]]) == plain[: plain.index(plain[3]) + 1]
    assert len(set(ids(tiny, repetition_penalty=50.0))) > len(set(plain)) or len(set(plain)) == 12
    assert len(set(ids(tiny, frequency_penalty=2.0, presence_penalty=2.0))) >= len(set(plain))
    sampled = [ids(tiny, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert ids(tiny, temperature=1.5, seed=2, top_k=1) == ids(tiny, temperature=1.5, min_p=1.0) == plain
    assert ids(tiny, temperature=1.5, top_p=1e-6) == plain


def streamed_error(server: Server, body: dict) -> dict:
    """The error that ends a stream: an event behind those of its text, or the answer if there is none."""
    answer = server.post("/v1/completions", body | {"stream": True})
    if answer.status != 200:
        return answer.error()
    *_, last, done, _ = answer.body.decode().split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))["error"]


def test_the_form_of_an_answer_is_refused_under_the_name_that_the_client_gave_it(tiny):
    messages = {"messages": [{"role": "user", "content": "x"}]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    tag = {"type": "structural_tag", "format": {"type": "nonsense"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    for path, fields, param in (
        ("completions", {"prompt": IDS, "response_format": form}, "response_format"),
        ("chat/completions", messages | {"response_format": form}, "response_format"),
        ("chat/completions", messages | {"response_format": tag}, "response_format"),
        ("chat/completions", messages | {"tools": [tool], "tool_choice": "required"}, "tools"),
        ("chat/completions", messages | {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ):
        error = tiny.post(f"/v1/{path}", fields).error()
        assert (error["code"], error["param"]) == (400, param) and error["message"].startswith(f"{param}: "), error
        assert "nonsense" in error["message"] or param == "structured_outputs"
    # What a form leaves no token for shows while the text is made.
    stuck = {"prompt": IDS, "response_format": {"type": "json_object"}, "allowed_token_ids": [ord("{")]}
    error = tiny.post("/v1/completions", stuck).error()
    assert error["param"] == "response_format" and error["message"].startswith("response_format cannot take token")
    assert streamed_error(tiny, stuck) == error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output_has_its_form(tiny, temperature):
    def text(**fields) -> str:
        return choice(tiny, prompt=IDS, max_tokens=50, temperature=temperature, seed=5, ignore_eos=False, **fields)[
            "text"
        ]

    assert text(structured_outputs={"choice": ["red", "green"]}) in ("red", "green")
    assert text(structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"})[3] == "-"
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wanted = (
        {"response_format": form}
        if temperature
        else {
            # A random model that always takes the likeliest token may write white space without end.
            "structured_outputs": {"json": schema, "disable_any_whitespace": True}
        }
    )
    assert json.loads(text(**wanted))["a"] in (True, False)
    for bad in ({"regex": "("}, {"json": {"type": "nonsense"}}, {"choice": []}, {"choice": ["x"] * 5000}, {}, {"a": 1}):
        body = {"prompt": IDS, "structured_outputs": bad}
        error = tiny.post("/v1/completions", body).error() if bad else None
        assert error is None or (error["code"], error["param"]) == (400, "structured_outputs"), bad
    for stuck in (
        {"structured_outputs": {"grammar": 'start: "ab" /[^\\s\\S]/'}},
        {"structured_outputs": {"regex": "ab"}, "min_tokens": 3},
    ):
        error = tiny.post("/v1/completions", {"prompt": IDS, "max_tokens": 9} | stuck).error()
        assert error["code"] == 400 and error["message"].startswith("structured_outputs"), error
        assert streamed_error(tiny, {"prompt": IDS, "max_tokens": 9} | stuck) == error
    tiny.wait_until_idle()
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert tiny.post("/v1/completions", {"prompt": IDS} | both).error()["param"] == "response_format"
