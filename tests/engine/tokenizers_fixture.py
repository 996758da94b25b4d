"""The tiny tokenizers of the text tests: K-bytes (byte-level BPE) and K-sp (sentencepiece-like with byte fallback)."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS, TAG = 262, 263


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {b: chr(b) for b in printable}, 256
    for b in range(256):
        if b not in letters:
            letters[b] = chr(extra)
            extra += 1
    return [letters[b] for b in range(256)]


def k_bytes() -> Tokenizer:
    """0..255 bytes, 256 'st', 257 'on', 258 'ston', 259 'stone', 260 ' w', 261 F0 9F, 262 <eos>, 263 <tag>."""
    letter = byte_letters()
    vocab = {letter[i]: i for i in range(256)}
    pairs = [("s", "t"), ("o", "n"), ("st", "on"), ("ston", "e"), (letter[32], "w"), (letter[0xF0], letter[0x9F])]
    for i, (left, right) in enumerate(pairs):
        vocab[left + right] = 256 + i
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken("<tag>", special=False, normalized=False)])
    return tokenizer


def k_sp() -> Tokenizer:
    """<unk> <s> </s>, byte tokens 3..258, then a few pieces with the sentencepiece space mark."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "▁river", "▁z", "a", "b", "▁a", "Boat", "▁drifts", ".", "▁So"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
