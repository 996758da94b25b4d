"""Incremental text equals whole text, never changes backwards, and stops where it should (CASES B01-B09)."""

import random

import pytest
from tokenizers import Tokenizer

from jaxvllm.detokenizer import IncrementalDetokenizer, TextDecoder, find_stop_string
from scheduler.sampling_params import SamplingParams
from tests.engine.tokenizers_fixture import EOS, TAG, k_bytes, k_sp

COMPASS_PLANE = [259, 32, 261, 167, 173, 226, 156, 136, 239, 184, 143, 120]


def pieces(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True, spaces: bool = True
) -> list[str]:
    decoder = TextDecoder(tokenizer, prompt, skip, spaces)
    deltas = [decoder.step(i) for i in ids]
    tail = decoder.flush()
    return [*deltas, tail] if tail else deltas


def run(prompt: str, ids: list[int], finish: str = "length", **params) -> tuple[str, list[str], int, str | None]:
    """Drives the detokenizer as the output processor does; returns text, deltas, tokens taken, stop string."""
    tokenizer = k_bytes()
    prompt_ids = list(prompt.encode())
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, SamplingParams(**params))
    deltas = []
    for k, token_id in enumerate(ids):
        reason = finish if k == len(ids) - 1 else None
        stop = detokenizer.update(token_id, reason)
        ended = stop is not None or reason is not None
        deltas.append(detokenizer.next_text(ended, delta=True))
        if ended:
            return detokenizer.text, deltas, k + 1, stop
    raise AssertionError("ids ran out")


def test_character_over_several_tokens_arrives_whole():
    deltas = pieces(k_bytes(), [65], COMPASS_PLANE)
    assert deltas == ["stone", " ", "", "", "🧭", "", "", "✈", "", "", "️", "x"]


@pytest.mark.parametrize("text", ["ไทยแลนด์", "नमस्ते", "👩‍👩‍👧‍👦!", "🇩🇪🇫🇷", "漢字かな交じり", "é\u0301 \ufffd z"])
def test_joined_deltas_equal_one_decode_at_every_cut_between_prompt_and_output(text: str):
    tokenizer = k_bytes()
    ids = tokenizer.encode("ab" + text).ids
    for cut in range(1, len(ids)):
        joined = "".join(pieces(tokenizer, ids[:cut], ids[cut:]))
        shown = tokenizer.decode(ids[:cut]).rstrip("\ufffd") if cut < len(ids) else ""
        assert (shown + joined).replace("\ufffd", "") == ("ab" + text).replace("\ufffd", "")


def test_stray_byte_token_neither_raises_nor_changes_text_given_out():
    deltas = pieces(k_sp(), [262], [262, 229, 133, 175, 131, 263])
    assert deltas[:4] == ["a", "", "", "€"]
    assert deltas[-1] == "b"
    assert set("".join(deltas[4:-1])) <= {"\ufffd"}


def test_space_after_a_stray_byte_is_kept():
    assert pieces(k_sp(), [265], [262, 229, 133, 175, 131, 266])[-1] == " drifts"


@pytest.mark.parametrize("make", [k_bytes, k_sp])
def test_random_bytes_never_raise(make):
    rng = random.Random(7)
    ids = [rng.randint(3, 258) for _ in range(20_000)]
    decoder = TextDecoder(make(), ids[:11], True)
    text = "".join(decoder.step(i) for i in ids[11:]) + decoder.flush()
    assert len(text) > 5_000


def test_endless_incomplete_characters_are_given_out_in_bounded_time():
    decoder = TextDecoder(k_bytes(), [65], True)
    assert "".join(decoder.step(0xF0) for _ in range(1_000)).count("\ufffd") > 900


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "ids", "expected"),
    [
        (k_sp, [265], [266, 267, 268], [" drifts", ".", " So"]),
        (k_sp, [], [259, 260, 261], ["", " river", " z"]),
        (k_bytes, [65], [32, 259], [" ", "stone"]),
    ],
)
def test_leading_space_is_stripped_only_at_the_start_of_the_sequence(tokenizer, prompt, ids, expected):
    assert pieces(tokenizer(), prompt, ids) == expected
    assert tokenizer().decode(prompt) + "".join(expected) == tokenizer().decode(prompt + ids)


def test_added_tokens_get_no_spaces_and_special_ones_are_skipped():
    for skip in (True, False):
        assert "".join(pieces(k_bytes(), [65], [TAG, 117, 112, TAG, 55], skip, spaces=False)) == "<tag>up<tag>7"
    assert "".join(pieces(k_bytes(), [65], [259, EOS, 259], True)) == "stonestone"
    assert "".join(pieces(k_bytes(), [65], [259, EOS, TAG, 259], False, spaces=False)) == "stone<eos><tag>stone"


def test_stop_string_over_tokens_is_cut_and_never_shown():
    text, deltas, count, stop = run("0", list(range(49, 69)), stop=["4567"], max_tokens=20)
    assert (text, count, stop) == ("123", 7, "4567")
    assert "".join(deltas) == text and not any("4" in delta for delta in deltas)


def test_held_back_text_is_flushed_at_the_end():
    text, deltas, _, stop = run("0", list(range(49, 55)), stop=["456X"], max_tokens=6)
    assert (text, "".join(deltas), stop) == ("123456", "123456", None)


def test_included_stop_string_stays_in_the_text():
    text, deltas, _, _ = run("0", list(range(49, 69)), stop=["4567"], include_stop_str_in_output=True)
    assert text == "".join(deltas) == "1234567"


@pytest.mark.parametrize(
    ("prompt", "stop", "count", "text", "found"),
    [
        ("N", "NO", 5, "OPQRS", None),
        ("A" * 301, "E", 10, "BCD", "E"),
        ("A", "B", 5, "", "B"),
        ("A", "BCDEFGHIJ", 9, "", "BCDEFGHIJ"),
        ("XYZ stop A", "stop", 4, "BCDE", None),
    ],
)
def test_stop_strings_apply_to_generated_text_wherever_they_end(prompt, stop, count, text, found):
    first = ord(prompt[-1]) + 1
    got, _, _, got_stop = run(prompt, list(range(first, first + count)), stop=[stop], max_tokens=count)
    assert (got, got_stop) == (text, found)


def test_first_stop_string_in_list_order_wins():
    assert find_stop_string("abcdef", 6, ["ef", "bc"], include=False) == ("ef", 4)


def test_stop_string_made_before_min_tokens_does_not_count():
    text, _, count, stop = run("A", list(range(66, 74)), stop=["CD", "FG"], min_tokens=3, max_tokens=8)
    assert (text, count, stop) == ("BCDE", 6, "FG")


def test_stop_token_text_is_left_out_unless_included():
    ids = list(range(66, 71))
    assert run("A", ids, finish="stop", stop_token_ids=[70])[0] == "BCDE"
    assert run("A", ids, finish="stop", stop_token_ids=[70], include_stop_str_in_output=True)[0] == "BCDEF"
    half = run("ston", [259, 260, 261, EOS], finish="stop", skip_special_tokens=False)[0]
    assert half.rstrip("\ufffd") == "stone w"


def test_stop_string_equal_to_a_skipped_special_token_does_not_fire():
    assert run("A", [259, EOS, 259], stop=["<eos>"], ignore_eos=True)[3] is None
