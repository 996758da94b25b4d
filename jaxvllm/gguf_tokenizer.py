"""A `tokenizers.Tokenizer` from a GGUF file's metadata, with the pre-tokenizer that the file names."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# What cl100k-style tokenizers split by; Llama 3 keeps up to three digits together, Qwen2 each digit apart.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"  # sentencepiece's visible space


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_SPLIT_PATTERN.replace("DIGITS", digits))
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split_by("{1,3}"),
    "qwen2": lambda: _split_by(""),
}


def build_tokenizer(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """The tokenizer that the model was trained with.

    Args:
      metadata: of the GGUF file.
      origin: the file, for messages.

    Raises: ValueError for a tokenizer kind or a pre-tokenizer that is not known: a wrong guess splits text in another
      way than the model has seen, and nothing else would tell.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{origin}: tokenizer kind {kind!r} is not supported; supported are gpt2 and llama. Use the model's "
            "Hugging Face folder, or skip_tokenizer_init=True with token ids"
        )
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError(f"{origin}: metadata key tokenizer.ggml.tokens is missing; convert the model to GGUF again")
    tokenizer = _byte_level(metadata, origin) if kind == "gpt2" else _sentencepiece(metadata, origin)
    tokenizer.add_special_tokens(_added_tokens(metadata, (_UNKNOWN, _CONTROL), is_special=True))
    tokenizer.add_tokens(_added_tokens(metadata, (_USER_DEFINED,), is_special=False))
    _add_bos_and_eos(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """GPT-2 style byte-level BPE."""
    pre = str(metadata.get("tokenizer.ggml.pre"))
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{origin}: pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; supported are "
            f"{', '.join(_PRE_TOKENIZERS)}. Use the model's Hugging Face folder, or skip_tokenizer_init=True"
        )
    if "tokenizer.ggml.merges" not in metadata:
        raise ValueError(f"{origin}: metadata key tokenizer.ggml.merges is missing; convert the model to GGUF again")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(_vocab(metadata), merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """Llama-2 style sentencepiece BPE with byte fallback; the merges are rebuilt from the scores."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ValueError(f"{origin}: metadata key tokenizer.ggml.scores is missing; convert the model to GGUF again")
    tokens, types = metadata["tokenizer.ggml.tokens"], _types(metadata)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_from_scores(
        {t: (i, s) for i, (t, s, kind) in enumerate(zip(tokens, scores, types, strict=True)) if kind == _NORMAL}
    )
    tokenizer = Tokenizer(BPE(_vocab(metadata), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", left=1)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(pieces: Mapping[str, tuple[int, float]]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first: the order in which sentencepiece joins.

    Args:
      pieces: piece -> (id, score).
    """
    ranked = []
    for piece, (piece_id, score) in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-score, piece_id, pieces[left][0], pieces[right][0], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _types(metadata: Mapping[str, Any]) -> list[int]:
    return metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(metadata["tokenizer.ggml.tokens"])


def _added_tokens(metadata: Mapping[str, Any], kinds: tuple[int, ...], *, is_special: bool) -> list[AddedToken]:
    """The tokens that are matched in the text before it is split; they keep their ids."""
    tokens = zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True)
    return [AddedToken(token, special=is_special, normalized=False) for token, kind in tokens if kind in kinds]


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Let encode(add_special_tokens=True) add what the file asks for.

    Without the flag: sentencepiece and Llama 3 add bos, as llama.cpp and the original tokenizers do; others do not.
    """
    default_bos = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    flags = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", default_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in flags}
    tokens = {
        name: (metadata["tokenizer.ggml.tokens"][ids[name]], ids[name])
        for name, is_on in flags.items()
        if is_on and ids[name] is not None
    }
    if not tokens:
        return
    # A list template keeps tokens with a colon or a blank in them whole.
    pieces = [tokens[name][0] if name in tokens else "$A" for name in ("bos", "$A", "eos") if name in (*tokens, "$A")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces, pair=[*pieces, "$B"], special_tokens=list(tokens.values())
    )


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of the bos, eos, unknown or padding token, if the file names one."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if token_id is None else metadata["tokenizer.ggml.tokens"][token_id]
