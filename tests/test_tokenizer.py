"""Tokenizers from GGUF metadata split as the original does; folders are taken at their word; templates render."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from jaxvllm.gguf_tokenizer import build_tokenizer
from jaxvllm.tokenizer import Tokenizer

TEXTS = [
    "40719",
    "6.02 + 1.38",
    "a  b   c\n\n\td",
    "we're They'LL",
    "<eos>user\nhi<eos>",
    "crème № 7 — 🧭",
    "",
    "   ",
    "\u0000\u0001",
    "港口",
    "stone on stone  12\r\n\r\n  x",
]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in of each byte, in byte order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]


BYTES = byte_alphabet()
MERGES = ["s t", "o n", "st on", "ston e", f"{BYTES[32]} w", f"{BYTES[0xF0]} {BYTES[0x9F]}"]
VOCAB = [*BYTES, "st", "on", "ston", "stone", f"{BYTES[32]}w", f"{BYTES[0xF0]}{BYTES[0x9F]}", "<eos>", "<tag>"]
EOS, TAG = 262, 263


def byte_metadata(pre: str | None, **changes: object) -> dict[str, object]:
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": VOCAB,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * 262 + [3, 4],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.bos_token_id": EOS,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in metadata.items() if value is not None}


def ids(metadata: dict[str, object], text: str) -> list[int]:
    return build_tokenizer(metadata, "m.gguf").encode(text).ids


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", [*TEXTS, "<tag>stone<tag>"])
def test_decoding_gives_the_text_back(pre, text):
    tokenizer = build_tokenizer(byte_metadata(pre, add_bos_token=False), "m.gguf")
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(("pre", "original"), [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")])
def test_ids_equal_those_of_the_original_class(pre, original):
    vocab = {token: i for i, token in enumerate(VOCAB)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    reference = getattr(transformers, original)(vocab=vocab, merges=merges, unk_token=None, eos_token="<eos>")
    for text in TEXTS:
        assert ids(byte_metadata(pre), text) == reference.encode(text), text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "40719", ["4", "0", "7", "1", "9"]),
        ("smollm", "a  12", ["a", "  ", "1", "2"]),
        ("smollm", "2024-01", ["2", "0", "2", "4", "-", "0", "1"]),
        ("gpt-2", "40719", ["40719"]),
        ("gpt-2", "a  12", ["a", " ", " 12"]),
        ("llama-bpe", "40719", ["407", "19"]),
        ("llama-bpe", "we'LL x\n\n\ty", ["we", "'LL", " x", "\n\n", "\ty"]),
        ("qwen2", "40719", ["4", "0", "7", "1", "9"]),
        ("qwen2", "(a)!!\n b", ["(a", ")!!\n", " b"]),
    ],
)
def test_pre_tokenizer_splits_as_its_name_says(pre, text, pieces):
    tokenizer = build_tokenizer(byte_metadata(pre), "m.gguf")
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


def test_qwen2_composes_characters_first():
    assert ids(byte_metadata("qwen2"), "e\u0301") == ids(byte_metadata("qwen2"), "\u00e9")


def test_llama_bpe_takes_a_word_that_is_in_the_vocabulary_whole():
    tokens = [*VOCAB[:-2], "zap", "<eos>"]
    metadata = byte_metadata("llama-bpe", tokens=tokens, token_type=[1] * 263 + [3], add_bos_token=False)
    assert ids(metadata, "zap") == [262]
    assert len(ids({**metadata, "tokenizer.ggml.pre": "gpt-2"}, "zap")) == 3


@pytest.mark.parametrize("pre", ["default", "deepseek-llm", None])
def test_unknown_pre_tokenizer_is_an_error_that_lists_the_known_ones(pre):
    with pytest.raises(ValueError, match=r"m\.gguf: pre-tokenizer .* supported are gpt-2, smollm, llama-bpe, qwen2"):
        build_tokenizer(byte_metadata(pre), "m.gguf")


@pytest.mark.parametrize("kind", ["bert", "t5", None])
def test_unknown_tokenizer_kind_is_an_error(kind):
    with pytest.raises(ValueError, match=r"m\.gguf: tokenizer kind .* supported are gpt2 and llama"):
        build_tokenizer(byte_metadata("gpt-2", model=kind), "m.gguf")


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_metadata_without_a_part_of_the_tokenizer_names_the_key(key):
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.{key} is missing"):
        build_tokenizer(byte_metadata("gpt-2", **{key: None}), "m.gguf")


@pytest.mark.parametrize(
    ("pre", "flag", "has_bos"),
    [
        ("gpt-2", True, True),
        ("gpt-2", False, False),
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_is_added_when_the_flag_says_so(pre, flag, has_bos):
    tokenizer = build_tokenizer(byte_metadata(pre, add_bos_token=flag), "m.gguf")
    assert tokenizer.encode("on").ids == ([EOS, 257] if has_bos else [257])
    assert tokenizer.encode("on", add_special_tokens=False).ids == [257]


def test_eos_is_added_when_the_flag_says_so():
    assert ids(byte_metadata("gpt-2", add_eos_token=True), "on") == [257, EOS]


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = Tokenizer.from_gguf(byte_metadata("gpt-2"), "m.gguf")
    token_ids = tokenizer.encode("on<eos><tag>on")
    assert token_ids == [257, EOS, TAG, 257]
    assert tokenizer.decode(token_ids) == "on<tag>on"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "on<eos><tag>on"


# --- sentencepiece ---------------------------------------------------------------------------------------------------

PIECES = ["▁river", "▁z", "a", "b", "▁a", "Boat", "▁drifts", "."]
FRAGMENTS = [
    "▁",
    "r",
    "i",
    "v",
    "e",
    "z",
    "B",
    "o",
    "t",
    "d",
    "f",
    "s",
    "▁r",
    "iv",
    "er",
    "▁riv",
    "Bo",
    "at",
    "▁d",
    "ri",
]
FRAGMENTS += ["▁dri", "ft", "fts", "ab", "▁▁"]


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    pieces = [*PIECES, *FRAGMENTS]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    scores = np.random.default_rng(0).permutation(len(pieces)).astype(float)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(s) for s in scores],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_ids(metadata: dict, text: str) -> list[int]:
    """The algorithm itself: join the neighbours whose piece scores best, leftmost first; bytes for what is left."""
    tokens = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    types, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    pieces = {token: scores[i] for token, i in tokens.items() if types[i] == 1}
    symbols = list(("▁" + text).replace(" ", "▁"))
    while True:
        joins = [(-pieces[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    out = []
    for symbol in symbols:
        out += [tokens[symbol]] if symbol in pieces else [3 + byte for byte in symbol.encode()]
    return out


def test_sentencepiece_ids_equal_the_algorithms():
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata, "m.gguf")
    rng = np.random.default_rng(1)
    texts = ["river Boat drifts.", "a  b", "x港z", "\n\t"]
    texts += ["".join(rng.choice(list("rivetBoadfsz .x  é"), 23)) for _ in range(150)]
    for text in texts:
        assert tokenizer.encode(text).ids == [1, *sentencepiece_ids(metadata, text)], text


@pytest.mark.parametrize("text", ["river Boat", " a  b ", "x港 🧭", "", "   ", "\u0000\u0001", "crème № 7"])
def test_sentencepiece_decoding_gives_the_text_back(text):
    tokenizer = build_tokenizer(sentencepiece_metadata(), "m.gguf")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("flag", "first"), [(True, [1]), (False, []), (None, [1])])
def test_sentencepiece_bos_follows_the_flag_and_is_on_without_it(flag, first):
    metadata = sentencepiece_metadata(add_bos_token=flag)
    assert ids(metadata, "a") == [*first, metadata["tokenizer.ggml.tokens"].index("▁a")]


def test_sentencepiece_without_space_prefix():
    metadata = sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    tokenizer = build_tokenizer(metadata, "m.gguf")
    assert tokenizer.encode("a").ids == [metadata["tokenizer.ggml.tokens"].index("a")]
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


# --- the wrapper -----------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<eos>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<eos>assistant:{% endif %}"
)


def templated() -> Tokenizer:
    return Tokenizer.from_gguf({**byte_metadata("gpt-2"), "tokenizer.chat_template": TEMPLATE}, "m.gguf")


def test_chat_template_of_the_file_renders():
    tokenizer = templated()
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<eos>user:hi<eos>assistant:"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<eos>user:hi"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ messages[0].content }}!") == "hi!"


def test_messages_that_the_template_refuses_are_a_value_error():
    with pytest.raises(ValueError, match="the chat template refuses these messages: no tools"):
        templated().apply_chat_template([{"role": "tool", "content": "x"}])


def test_model_without_a_template_says_what_to_do():
    tokenizer = Tokenizer.from_gguf(byte_metadata("gpt-2"), "m.gguf")
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match=r"m\.gguf: the model has no chat template; give chat_template="):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_sizes_and_special_ids():
    tokenizer = Tokenizer.from_gguf(byte_metadata("gpt-2", bos_token_id=None), "m.gguf")
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.bos_token_id) == (264, EOS, None)


def write_folder(folder: Path, *, config: dict | None = None) -> tokenizers.Tokenizer:
    """A tokenizer.json with a pre-tokenizer that no model class would build, and a length limit left in it."""
    tokenizer = tokenizers.Tokenizer(BPE({t: i for i, t in enumerate(VOCAB)}, [tuple(m.split(" ")) for m in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **(config or {})}))
    return tokenizer


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer"])
def test_tokenizer_json_is_taken_as_it_is_whatever_class_the_config_names(tmp_path, tokenizer_class):
    original = write_folder(tmp_path, config={"tokenizer_class": tokenizer_class, "chat_template": TEMPLATE})
    original.no_truncation()
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids, text
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.has_chat_template


def test_length_limit_left_in_tokenizer_json_does_not_cut_prompts(tmp_path):
    write_folder(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer.encode("0123456789")) == 10
    assert len(tokenizer.hf.encode("0123456789")) == 10


def test_chat_template_in_a_file_of_its_own_is_found(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(messages) == "<eos>user:hi<eos>assistant:"


def test_folder_with_vocab_and_merges_only_is_read_as_its_model_type_says(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(VOCAB)}))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<eos>", "eos_token": "<eos>", "unk_token": "<eos>"}
        )
    )
    assert Tokenizer.from_folder(tmp_path).encode("stone", add_special_tokens=False) == [259]


def test_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer found \(looked for tokenizer\.json.*skip_tokenizer_init=True"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": 3}'])
def test_broken_tokenizer_json_is_an_error_that_names_the_folder(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="the tokenizer cannot be read") as error:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(error.value)
