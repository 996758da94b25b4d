"""Random token streams through the detokenizer: streamed text is the whole text, and stop strings cut it as defined."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.detokenizer import TextDecoder
from jaxvllm.metrics import FrontEndStats
from jaxvllm.output_processor import CallerRequest, OutputProcessor
from jaxvllm.outputs import RequestMetrics
from scheduler.outputs import EngineCoreOutputs, FinishedRequest
from scheduler.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.tokenizers_fixture import k_bytes, k_sp

TOKENIZERS = {"k_bytes": functools.cache(k_bytes), "k_sp": functools.cache(k_sp)}
FIRST_BYTE = {"k_bytes": 0, "k_sp": 3}  # id of byte 0
both = pytest.mark.parametrize("name", TOKENIZERS)
quick = settings(max_examples=150, deadline=None)

# Characters of one to four bytes, some of which begin with the same bytes, and marks that join others.
characters = st.sampled_from("ab4 .éÿไ€漢\u0301\u200d\ufe0f🧭🧬🇩")
texts = st.text(characters, max_size=12)
ids_of = {"k_bytes": st.integers(0, 263), "k_sp": st.integers(0, 268)}


def stream_ids(name: str, data: st.DataObject, label: str) -> list[int]:
    """Whole characters byte by byte, words, and ids of any kind in between."""
    byte = FIRST_BYTE[name]
    pieces = data.draw(st.lists(st.one_of(texts, st.lists(ids_of[name], max_size=4)), max_size=5), label)
    as_ids = [[byte + b for b in piece.encode()] if isinstance(piece, str) else piece for piece in pieces]
    return [token_id for piece in as_ids for token_id in piece]


@both
@quick
@given(data=st.data())
def test_text_of_whole_characters_is_the_one_shot_decode(name: str, data):
    """Whatever the cut between prompt and output, and between the calls."""
    tokenizer = TOKENIZERS[name]()
    ids = [FIRST_BYTE[name] + b for b in data.draw(texts, "text").encode()]
    words = {"k_bytes": [256, 259, 260, 263], "k_sp": [259, 260, 262, 266, 268]}[name]
    for word in data.draw(st.lists(st.sampled_from(words), max_size=4), "words"):
        ids.insert(data.draw(st.sampled_from(borders(name, ids)), "where"), word)
    cut = data.draw(st.sampled_from(borders(name, ids)), "cut")
    decoder = TextDecoder(tokenizer, ids[:cut], skip_special_tokens=True)
    joined = "".join(map(decoder.step, ids[cut:])) + decoder.flush()
    assert tokenizer.decode(ids[:cut]) + joined == tokenizer.decode(ids)


def borders(name: str, ids: list[int]) -> list[int]:
    """Places between characters: before an id that is no continuation byte."""
    first = FIRST_BYTE[name]
    return [i for i in range(len(ids) + 1) if i == len(ids) or not 0x80 <= ids[i] - first < 0xC0]


class Stream:
    """One request per output kind over the same tokens, through the OutputProcessor as LLMEngine drives it."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], params: dict) -> None:
        self.processor = OutputProcessor(tokenizer, FrontEndStats())
        self.texts: dict[str, list[str]] = {}
        self.ends: dict[str, tuple[str | None, int | str | None]] = {}
        self.num_ids: dict[str, int] = {}
        for kind in RequestOutputKind:
            given_params = SamplingParams(**params, output_kind=kind)
            caller = CallerRequest(kind.name, None, prompt, given_params, RequestMetrics(0.0))
            self.processor.add_request(caller, [EngineCoreRequest(kind.name, prompt, given_params)])  # type: ignore[arg-type]
            self.texts[kind.name], self.num_ids[kind.name] = [], 0

    def give(self, *token_ids: int, end: FinishedRequest | None = None) -> None:
        """Take one token or none."""
        names = [name for name in self.texts if name not in self.ends]
        finished = dict.fromkeys(names, end) if end is not None else {}
        outputs = EngineCoreOutputs(names * len(token_ids), [*token_ids] * len(names), {}, finished)
        result = self.processor.process_outputs(outputs)
        for output in result.request_outputs:
            completion = output.outputs[0]
            self.texts[output.request_id].append(completion.text)
            self.num_ids[output.request_id] += 1
            if output.finished:
                self.ends[output.request_id] = (completion.finish_reason, completion.stop_reason)


def expected_end(deltas: list[str], stop: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens, by definition, from what each token adds to the text.

    A stop string counts from the token on that completes it behind min_tokens; the first one in the list wins, at its
    first place that holds a character of that token.
    """
    text, visible_from = "", 0
    for count, delta in enumerate(deltas, 1):
        before, text = len(text), text + delta
        if count <= min_tokens:
            visible_from = len(text)
            continue
        new = len(text) - max(before, visible_from)
        for candidate in stop if new > 0 else []:
            for start in range(len(text)):
                if text.startswith(candidate, start) and start + len(candidate) > len(text) - new:
                    return text[: start + len(candidate) * include], candidate, count
    return text, None, len(deltas)


@both
@quick
@given(data=st.data())
def test_deltas_join_to_the_final_text_and_stop_strings_cut_it_as_defined(name: str, data):
    tokenizer = TOKENIZERS[name]()
    prompt = stream_ids(name, data, "prompt")
    ids = stream_ids(name, data, "ids") or [FIRST_BYTE[name] + 97]
    include = data.draw(st.booleans(), "include")
    min_tokens = data.draw(st.integers(0, 3), "min_tokens")
    skip, spaces = data.draw(st.booleans(), "skip"), data.draw(st.booleans(), "spaces")
    decoder = TextDecoder(tokenizer, prompt, skip, spaces)
    deltas = [decoder.step(i) for i in ids]
    deltas[-1] += decoder.flush()
    whole = "".join(deltas)
    likely = st.sampled_from(sorted({whole[i : i + n] for i in range(len(whole)) for n in (1, 2, 3)} or {"a"}))
    stop = data.draw(st.lists(st.one_of(likely, st.text(characters, min_size=1, max_size=3)), max_size=3), "stop")
    params = {
        "stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens, "skip_special_tokens": skip,
        "spaces_between_special_tokens": spaces, "max_tokens": None,
    }  # fmt: skip
    stream = Stream(tokenizer, prompt, params)
    for k, token_id in enumerate(ids):
        if len(stream.ends) < 3:
            stream.give(token_id, end=FinishedRequest("length") if k == len(ids) - 1 else None)

    text, found, count = expected_end(deltas, stop, include, min_tokens)
    assert stream.texts["FINAL_ONLY"] == [text]
    assert "".join(stream.texts["DELTA"]) == text
    cumulative = stream.texts["CUMULATIVE"]
    assert cumulative[-1] == text and all(b.startswith(a) for a, b in itertools.pairwise(cumulative))
    assert stream.num_ids == {"FINAL_ONLY": 1, "DELTA": count, "CUMULATIVE": count}
    assert set(stream.ends.values()) == {("length", None) if found is None else ("stop", found)}


@both
def test_a_stop_token_behind_any_stream_leaves_its_own_text_out(name: str):
    tokenizer, byte = TOKENIZERS[name](), FIRST_BYTE[name]
    for include in (False, True):
        params = {"stop_token_ids": [byte + 99], "include_stop_str_in_output": include, "stop": ["zz"]}
        stream = Stream(tokenizer, [byte + 97], params)
        for token_id in (byte + 97, byte + 98):
            stream.give(token_id)
        stream.give(byte + 99, end=FinishedRequest("stop", byte + 99))
        assert "".join(stream.texts["DELTA"]) == stream.texts["FINAL_ONLY"][0] == ("abc" if include else "ab")
        assert set(stream.ends.values()) == {("stop", byte + 99)}


@pytest.mark.parametrize(("token_id", "text"), [(ord("a"), "a"), ("é".encode()[0], "\ufffd")])
def test_an_end_without_a_token_shows_all_text_and_is_no_stop(token_id: int, text: str):
    for include in (False, True):
        params = {"max_tokens": 9, "stop": ["\ufffd", "ab"], "include_stop_str_in_output": include}
        stream = Stream(k_bytes(), [97], params)
        stream.give(token_id)
        stream.give(end=FinishedRequest("abort"))
        assert "".join(stream.texts["DELTA"]) == stream.texts["FINAL_ONLY"][0] == text
        assert set(stream.ends.values()) == {("abort", None)}


@both
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streams_of_one_step_do_not_touch_each_other(name: str, data):
    """One request draws bytes that are no text; its neighbours' texts are those that they have alone."""
    tokenizer, byte = TOKENIZERS[name](), FIRST_BYTE[name]
    bad = data.draw(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF]), min_size=6, max_size=6), "bad")
    good = list("é🧭".encode())
    processor = OutputProcessor(tokenizer, FrontEndStats())
    for request_id in ("a", "bad", "b"):
        params = SamplingParams(max_tokens=6, output_kind=RequestOutputKind.DELTA)
        caller = CallerRequest(request_id, None, [byte + 97], params, RequestMetrics(0.0))
        processor.add_request(caller, [EngineCoreRequest(request_id, [byte + 97], params)])  # type: ignore[arg-type]
    joined = dict.fromkeys(("a", "bad", "b"), "")
    for k in range(6):
        tokens = [byte + good[k], byte + bad[k], byte + good[k]]
        finished = {i: FinishedRequest("length") for i in joined} if k == 5 else {}
        outputs = processor.process_outputs(EngineCoreOutputs(list(joined), tokens, {}, finished))
        for output in outputs.request_outputs:
            joined[output.request_id] += output.outputs[0].text
    assert joined["a"] == joined["b"] == "é🧭"
    assert set(joined["bad"]) <= set(bytes(bad).decode(errors="replace")), "neither lost nor made up"
