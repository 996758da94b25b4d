"""Values and bodies that no server should fall over: each gets an answer of the right shape, soon."""

import time

import pytest

from tests.server.watch import HealthWatch, resident_bytes

LONG = 1024  # max_model_len
BASE = {"prompt": "A", "max_tokens": 2}
# (fields, the field that the error names; None: the request is served)
TABLE = [
    *(({"max_tokens": value}, "max_tokens") for value in (0, -1, "5", 3.7, True)),
    *(({"max_tokens": value}, None) for value in (10**12, None, 5.0)),
    *(({"n": value}, "n") for value in (0, -1, 10**8, 2049, "2")),
    ({"n": 3}, None),
    *(({"stop": value}, "stop") for value in ([""], "", ["x"] * 200_000, ["x"] * 65, ["x" * 2**20], "x" * 1025, 7)),
    ({"stop": ["a", "b", "c", "d", "e"]}, None),
    *(({"bad_words": value}, "bad_words") for value in (["x"] * 65, ["x" * 2**20], [7])),
    *(({"top_p": value}, "top_p") for value in (0, -1, 1.5, "1")),
    *(({"temperature": value}, "temperature") for value in (-1, "hot", True)),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1)),
    *(({"logprobs": value}, "logprobs") for value in (-2, 21, 10**6)),
    ({"prompt_logprobs": -1, "prompt": [7] * (LONG - 2)}, "prompt_logprobs"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    *(({"seed": value}, "seed") for value in (2**63, 2**64, -(2**63) - 1, 1.5)),
    *(({"seed": value}, None) for value in (-1, 0, 2**63 - 1, -(2**63))),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"temprature": 1.0}, "temprature"),
    *(({name: "x"}, None) for name in ("user", "safety_identifier")),
    ({"prompt": [7] * (LONG - 1), "max_tokens": None}, None),
    ({"prompt": [7] * LONG}, "prompt"),
    ({"prompt": ["A", [75]]}, "prompt"),
    ({"prompt": [[65], "A"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["A"] * 2049}, "prompt"),
    ({"model": "no-such-model"}, "model"),
    ({"model": 7}, "model"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"priority": 3}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"response_format": {"type": "poem"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"request_id": "x" * 1000}, "request_id"),
]
RAW = [
    (b"not JSON", 400),
    (b"", 400),
    (b"[]", 400),
    (b'"x"', 400),
    (b'{"a":', 400),
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "A", "temperature": NaN}', 400),
    (b'{"prompt": "A", "temperature": Infinity}', 400),
    (b'{"prompt": "A", "temperature": 1e999}', 400),
    (b'{"prompt": "A", "vllm_xargs": {"a": [1e999]}}', 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"prompt": "A", "structured_outputs": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", 400),
    (b'{"prompt": "A", "max_tokens": ' + b"9" * 10_000 + b"}", 400),
    (b" " * 100_000_000, 413),
    (b'{"prompt": "A", "\\u0000": 1}', 400),
    (b'{"prompt": "A\\u0000B", "max_tokens": 2}', 200),
    (b'\xef\xbb\xbf{"prompt": "A", "max_tokens": 2}', 200),
    (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "A", "max_tokens": 2}', 400),
]


def test_e03_every_value_is_served_or_refused_by_name_and_nothing_is_left_behind(server):
    assert server.post("/v1/completions", BASE).status == 200  # what is made once is made
    before = resident_bytes(server.process.pid)
    with HealthWatch(server) as watch:
        for fields, param in TABLE:
            start = time.monotonic()
            answer = server.post("/v1/completions", BASE | fields)
            assert time.monotonic() - start < 2.0, fields
            if param is None:
                assert answer.status == 200, (str(fields)[:100], answer.body[:300])
            else:
                error = answer.error()
                assert error["code"] in (400, 404), (str(fields)[:100], error)
                assert error["param"] == param, (str(fields)[:100], error)
                assert len(error["message"]) < 1100
        for body, status in RAW:
            start = time.monotonic()
            answer = server.post("/v1/completions", body)
            assert time.monotonic() - start < 2.0, body[:50]
            assert answer.status == status, (body[:50], answer.body[:300])
            if status != 200:
                answer.error()
    assert watch.longest_s < 0.5  # 0.1 on a quiet machine
    assert resident_bytes(server.process.pid) - before < 50 << 20
    assert server.post("/v1/completions", BASE).json()["choices"][0]["text"] == "BC"
    server.wait_until_idle()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_e03_another_content_type_is_refused(server, kind):
    assert server.post("/v1/completions", BASE, **{"Content-Type": kind}).error()["code"] == 415


def test_e03_a_body_in_chunks_is_limited_too(server):
    connection = server.connect()
    body = iter([b" " * (1 << 20)] * 20)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_e03_headers_without_end_close_the_connection(server):
    connection = server.connect()
    connection.connect()
    connection.sock.sendall(b"POST /v1/completions HTTP/1.1\r\nX-Long: ")
    answer = b""
    try:
        for _ in range(64):
            connection.sock.sendall(b"x" * 65536)
        answer = connection.sock.recv(100)
    except (BrokenPipeError, ConnectionResetError):
        answer = b"closed"
    assert answer == b"closed" or answer.startswith(b"HTTP/1.1 400")
    assert server.get("/health").status == 200


def test_max_tokens_null_fills_the_context_of_a_chat_and_is_16_for_a_completion(server):
    def tokens(path: str, body: dict) -> int:
        return server.post(path, body | {"max_tokens": None, "ignore_eos": True}).json()["usage"]["completion_tokens"]

    assert tokens("/v1/completions", {"prompt": "A"}) == 16
    messages = [{"role": "user", "content": "x" * (LONG - 30)}]
    assert tokens("/v1/chat/completions", {"messages": messages}) == LONG - (LONG - 30 + len("u:\na:"))
    assert tokens("/v1/completions", {"prompt": [7] * (LONG - 1)}) == 1
