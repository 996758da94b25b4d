"""Failures that users of other engines reported about text and stops, on the real engine; named by case id.

The model's next token is the last one + 1, so texts are exact.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxvllm import EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from jaxvllm.detokenizer import IncrementalDetokenizer, TextDecoder
from tests.engine.dense import successor_tensors, write_folder
from tests.engine.tokenizers_fixture import EOS, TAG, k_bytes, k_sp
from tests.tiny_config import T_TINY

T_SUCC = T_TINY | {"hidden_size": 272, "num_hidden_layers": 1}
COMPASS_PLANE = [259, 32, 261, 167, 173, 226, 156, 136, 239, 184, 143, 120]
ENGINE = {
    "device": "cpu", "multiprocess": False, "max_num_batched_tokens": 16, "max_model_len": 320,
    "kv_cache_memory_bytes": 1 << 23,
}  # fmt: skip


def make_engine(
    folder: Path, config: dict, next_ids: dict[int, int], tokenizer: Tokenizer, eos: str, max_num_seqs: int = 1
) -> LLMEngine:
    """T-succ, but for ids whose next one is given; one request at a time needs two programs only."""
    tensors = successor_tensors(config)
    for token_id, next_id in next_ids.items():
        tensors["lm_head.weight"][:, token_id] = np.eye(config["vocab_size"], dtype=np.float32)[next_id]
    write_folder(folder, config, tensors, eos=eos)
    tokenizer.save(str(folder / "tokenizer.json"))
    return LLMEngine.from_engine_args(EngineArgs(folder, max_num_seqs=max_num_seqs, **ENGINE))


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> LLMEngine:
    return make_engine(tmp_path_factory.mktemp("t_succ"), T_SUCC, {}, k_bytes(), "<eos>")


@pytest.fixture(scope="module")
def chains(tmp_path_factory) -> LLMEngine:
    """Behind id 1 come the compass and the plane; A B C goes round."""
    follows = dict(zip([1, *COMPASS_PLANE[:-1]], COMPASS_PLANE, strict=True)) | {120: EOS, 67: 65}
    return make_engine(tmp_path_factory.mktemp("chains"), T_SUCC, follows, k_bytes(), "<eos>")


class Answer:
    """What one request gave, streamed in pieces; the same request not streamed must give the same text."""

    def __init__(self, pieces: list[RequestOutput], final: RequestOutput) -> None:
        self.deltas = [piece.outputs[0].text for piece in pieces]
        self.ids = [i for piece in pieces for i in piece.outputs[0].token_ids]
        last = pieces[-1].outputs[0]
        self.end = (last.finish_reason, last.stop_reason)
        self.text = final.outputs[0].text
        assert "".join(self.deltas) == self.text
        assert (final.outputs[0].token_ids, final.outputs[0].finish_reason) == (self.ids, last.finish_reason)
        assert final.outputs[0].stop_reason == last.stop_reason


def answer(engine: LLMEngine, *requests: tuple[str | list[int], dict]) -> list[Answer]:
    """All requests together, each once streamed and once not."""
    got: dict[str, list[RequestOutput]] = {}
    for index, (prompt, params) in enumerate(requests):
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
            sampling = SamplingParams(**{"temperature": 0.0, "output_kind": kind} | params)
            engine.add_request(f"{index} {kind.name}", given, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            got.setdefault(output.request_id, []).append(output)
    return [Answer(got[f"{index} DELTA"], got[f"{index} FINAL_ONLY"][0]) for index in range(len(requests))]


def deltas(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    decoder = TextDecoder(tokenizer, prompt, skip)
    pieces = [decoder.step(i) for i in ids]
    return [*pieces, tail] if (tail := decoder.flush()) else pieces


def test_b01_characters_over_several_tokens_arrive_whole_through_the_engine(chains):
    (got,) = answer(chains, ([1], {"max_tokens": 20}))
    assert got.ids == [*COMPASS_PLANE, EOS] and got.end == ("stop", None)
    assert got.deltas == ["stone", " ", "", "", "🧭", "", "", "✈", "", "", "\ufe0f", "x", ""]


@pytest.mark.parametrize("text", ["ไทยแลนด์", "नमस्ते क्षि", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "漢字かな"])
def test_b01_every_cut_between_two_calls_gives_whole_characters(text):
    tokenizer = k_bytes()
    ids = tokenizer.encode(text).ids
    for cut in [0, *(i for i in range(len(ids)) if not 0x80 <= ids[i] < 0xC0)]:
        got = deltas(tokenizer, [65, *ids[:cut]], ids[cut:])
        assert not any("\ufffd" in piece for piece in got)
        assert tokenizer.decode(ids[:cut]) + "".join(got) == tokenizer.decode(ids) == text


def test_b03_a_byte_that_turns_text_invalid_ends_nobodys_request(tmp_path):
    chain = [262, 229, 133, 175, 131, 263]  # a, the three bytes of the euro sign, a stray byte, b
    config = T_SUCC | {"vocab_size": 269, "eos_token_id": 2}
    follows = dict(zip([265, *chain[:-1]], chain, strict=True)) | {263: 2, 268: 264}
    engine = make_engine(tmp_path, config, follows, k_sp(), "</s>", max_num_seqs=4)
    neighbours = [([266], {"max_tokens": 8}), ([264], {"max_tokens": 8}), ([267], {"max_tokens": 8})]
    alone = [answer(engine, request)[0] for request in neighbours]
    bad, *beside = answer(engine, ([265], {"max_tokens": 20}), *neighbours)
    assert bad.ids == [*chain, 2] and bad.end == ("stop", None)
    assert bad.deltas[:4] == ["a", "", "", "€"] and bad.text.endswith("b")
    assert set("".join(bad.deltas[4:])) <= {"\ufffd", "b"}
    for one, other in zip(alone, beside, strict=True):
        assert (one.deltas, one.ids, one.end) == (other.deltas, other.ids, other.end)


@pytest.mark.parametrize(
    ("make", "prompt", "ids", "expected"),
    [
        (k_sp, [265], [266, 267, 268], [" drifts", ".", " So"]),
        (k_sp, [], [259, 260, 261], ["", " river", " z"]),
        (k_bytes, [65], [32, 259], [" ", "stone"]),
    ],
)
def test_b04_one_leading_space_is_stripped_at_the_start_of_the_sequence_alone(make, prompt, ids, expected):
    tokenizer = make()
    assert deltas(tokenizer, prompt, ids) == expected
    assert tokenizer.decode(prompt) + "".join(expected) == tokenizer.decode(prompt + ids)


def test_b05_a_stop_string_over_tokens_is_cut_and_no_part_of_it_was_streamed(engine):
    found, flushed, included = answer(
        engine,
        ("0", {"stop": ["4567"], "max_tokens": 20}),
        ("0", {"stop": ["456X"], "max_tokens": 6}),
        ("0", {"stop": ["4567"], "max_tokens": 20, "include_stop_str_in_output": True}),
    )
    assert (found.text, found.ids, found.end) == ("123", list(range(49, 56)), ("stop", "4567"))
    assert not any("4" in delta for delta in found.deltas)
    assert (flushed.text, flushed.end) == ("123456", ("length", None))
    assert (included.text, included.end) == ("1234567", ("stop", "4567"))


def test_b05_the_stop_string_may_begin_inside_a_token():
    tokenizer = k_bytes()
    tokenizer.add_tokens(["34"])  # id 264
    detokenizer = IncrementalDetokenizer(tokenizer, [48], SamplingParams(stop=["4567"], max_tokens=20))
    found, pieces = None, []
    for token_id in (49, 50, 264, 53, 54, 55):
        assert found is None
        found = detokenizer.update(token_id, None)
        pieces.append(detokenizer.next_text(found is not None, delta=True))
    assert (detokenizer.text, "".join(pieces), found) == ("123", "123", "4567")


def test_b07_stop_tokens_stay_in_the_ids_and_their_text_is_dropped_unless_asked_for(engine):
    stop, included, eos, shown, ignored = answer(
        engine,
        ("A", {"stop_token_ids": [70], "max_tokens": 20}),
        ("A", {"stop_token_ids": [70], "max_tokens": 20, "include_stop_str_in_output": True}),
        ([258], {"max_tokens": 20}),
        ([258], {"max_tokens": 20, "skip_special_tokens": False}),
        ([258], {"max_tokens": 7, "ignore_eos": True}),
    )
    assert (stop.ids, stop.text, stop.end) == ([66, 67, 68, 69, 70], "BCDE", ("stop", 70))
    assert (included.ids, included.text, included.end) == ([66, 67, 68, 69, 70], "BCDEF", ("stop", 70))
    for got in (eos, shown):
        assert (got.ids, got.end) == ([259, 260, 261, EOS], ("stop", None))
        assert re.fullmatch("stone w\ufffd?", got.text)
    assert (ignored.ids, ignored.end) == ([259, 260, 261, EOS, TAG, 0, 1], ("length", None))


def test_b07_the_eos_text_is_there_if_it_is_asked_for_and_not_skipped(engine):
    kept, skipped = answer(
        engine,
        ([260], {"max_tokens": 9, "skip_special_tokens": False, "include_stop_str_in_output": True}),
        ([260], {"max_tokens": 9, "include_stop_str_in_output": True}),
    )
    assert kept.text.endswith("<eos>") and "<eos>" not in skipped.text


def test_b08_stop_strings_apply_to_generated_text_wherever_they_end(engine):
    got = answer(
        engine,
        ("N", {"stop": ["NO"], "max_tokens": 5}),
        ("A" * 301, {"stop": ["E"], "max_tokens": 10}),
        ("A", {"stop": ["B"], "max_tokens": 5}),
        ("A", {"stop": ["BCDEFGHIJ"], "max_tokens": 9}),
        ("XYZ stop A", {"stop": ["stop"], "max_tokens": 4}),
        ("A", {"stop": ["EF", "CD"], "max_tokens": 9}),
        ("A", {"stop": ["CD", "FG"], "min_tokens": 3, "max_tokens": 9}),
    )
    assert [(one.text, one.end, len(one.ids)) for one in got] == [
        ("OPQRS", ("length", None), 5),
        ("BCD", ("stop", "E"), 4),
        ("", ("stop", "B"), 1),
        ("", ("stop", "BCDEFGHIJ"), 9),
        ("BCDE", ("length", None), 4),
        ("B", ("stop", "CD"), 3),
        ("BCDE", ("stop", "FG"), 6),
    ]


def test_b09_added_tokens_get_no_spaces_and_special_ones_are_skipped_as_in_a_whole_decode():
    tokenizer = k_bytes()
    for skip in (True, False):
        for ids, expected in (
            ([TAG, 117, 112, TAG, 55], "<tag>up<tag>7"),
            ([259, EOS, 259], "stonestone" if skip else "stone<eos>stone"),
        ):
            assert "".join(deltas(tokenizer, [65], ids, skip)) == expected
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_b09_a_stop_string_that_spells_a_skipped_special_token_does_not_fire(engine):
    hidden, shown = answer(
        engine,
        ([260], {"stop": ["<eos>"], "ignore_eos": True, "max_tokens": 5}),
        ([260], {"stop": ["<eos>"], "ignore_eos": True, "max_tokens": 5, "skip_special_tokens": False}),
    )
    assert hidden.ids == [261, EOS, TAG, 0, 1] and hidden.end == ("length", None)
    assert shown.ids == [261, EOS] and shown.end == ("stop", "<eos>")


def test_repetition_detection_ends_a_loop_and_says_so(chains):
    loop = {"max_pattern_size": 4, "min_count": 3}
    free, found, too_long = answer(
        chains,
        ("y", {"max_tokens": 6, "repetition_detection": loop}),
        ("A", {"max_tokens": 30, "repetition_detection": loop}),
        ("A", {"max_tokens": 30, "repetition_detection": {"max_pattern_size": 2, "min_count": 3}}),
    )
    assert (free.text, free.end) == ("z{|}~\x7f", ("length", None))
    assert (found.text, found.end) == ("BCABCABCA", ("repetition", "repetition_detected"))
    assert too_long.end == ("length", None) and len(too_long.ids) == 30
