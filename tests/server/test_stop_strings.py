"""Cases B01 and B05 over HTTP: characters and stop strings over several tokens, streamed and not."""

import pytest

from tests.server.process import Server

COMPASS_PLANE = [259, 32, 261, 167, 173, 226, 156, 136, 239, 184, 143, 120]  # stone, a space, U+1F9ED, U+2708 U+FE0F, x


def ask(server: Server, **body) -> tuple[list[str], dict]:
    """The pieces of text of a stream, and the choice of the same request not streamed, which must agree with them."""
    fields = {"max_tokens": 100, "return_token_ids": True} | body
    answer = server.post("/v1/completions", fields)
    assert answer.status == 200, answer.body
    [whole] = answer.json()["choices"]
    pieces = [chunk["choices"][0] for chunk in server.stream("/v1/completions", fields)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]
    for name in ("finish_reason", "stop_reason"):
        assert [piece[name] for piece in pieces if piece[name] is not None] == [whole[name]] * (whole[name] is not None)
    return [piece["text"] for piece in pieces], whole


def test_b01_characters_over_several_tokens_arrive_whole(parrot):
    pieces, whole = ask(parrot, prompt=[1, *COMPASS_PLANE, 2, 3])
    assert whole["token_ids"] == [*COMPASS_PLANE, 262] and whole["finish_reason"] == "stop"
    # Deltas merge where the server is behind, and then hold several characters.
    assert "".join(pieces) == "stone \U0001f9ed\u2708\ufe0fx" and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["ไทยแลนด์", "नमस्ते क्षि", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "漢字かな"])
def test_b01_scripts_flags_and_joined_emoji_too(parrot, text):
    pieces, whole = ask(parrot, prompt=f"\x01{text}\x02\x03")
    assert whole["text"] == text and whole["finish_reason"] == "stop"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("fields", "text", "num_tokens", "end"),
    [
        ({"stop": ["4567"], "max_tokens": 20}, "123", 7, ("stop", "4567")),
        ({"stop": ["456X"], "max_tokens": 6}, "123456", 6, ("length", None)),
        ({"stop": ["4567"], "include_stop_str_in_output": True, "max_tokens": 20}, "1234567", 7, ("stop", "4567")),
    ],
    ids=["found", "held back and let go", "included"],
)
def test_b05_a_stop_string_over_tokens_is_cut_and_no_part_of_it_was_streamed(server, fields, text, num_tokens, end):
    pieces, whole = ask(server, prompt="0", **fields)
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (text, *end)
    assert whole["token_ids"] == list(range(49, 49 + num_tokens))
    if "4" not in text:
        assert not any("4" in piece for piece in pieces)
