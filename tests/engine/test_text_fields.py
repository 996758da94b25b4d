"""The fields of SamplingParams that shape the text, through the real engine; the reference is a whole decode."""

from itertools import product

import pytest

from jaxvllm import LLMEngine
from tests.engine.test_reported_texts import T_SUCC, answer, make_engine
from tests.engine.tokenizers_fixture import EOS, TAG, k_bytes


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> LLMEngine:
    """Behind id 1 comes u <eos> p; behind 2, stone <tag> u <eos> p."""
    follows = {1: 117, 117: EOS, EOS: 112, 2: 259, 259: TAG, TAG: 117}
    return make_engine(tmp_path_factory.mktemp("text"), T_SUCC, follows, k_bytes(), "<eos>")


@pytest.mark.parametrize(("skips", "spaces"), list(product([True, False], repeat=2)))
def test_special_tokens_are_skipped_or_not_and_no_value_puts_spaces_between_them(engine, skips, spaces):
    """A fast tokenizer puts no spaces between special tokens, whatever is asked: as in vLLM."""
    wanted = {"ignore_eos": True, "skip_special_tokens": skips, "spaces_between_special_tokens": spaces}
    short, long = answer(engine, ([1], wanted | {"max_tokens": 3}), ([2], wanted | {"max_tokens": 5}))
    assert (short.ids, long.ids) == ([117, EOS, 112], [259, TAG, 117, EOS, 112])
    for got in (short, long):
        assert got.text == k_bytes().decode(got.ids, skip_special_tokens=skips)
    assert long.text == ("stone<tag>up" if skips else "stone<tag>u<eos>p")


def test_without_detokenize_there_are_ids_and_no_text(engine):
    [got] = answer(engine, ([2], {"ignore_eos": True, "max_tokens": 5, "detokenize": False}))
    assert got.ids == [259, TAG, 117, EOS, 112] and got.text == "" and set(got.deltas) == {""}
