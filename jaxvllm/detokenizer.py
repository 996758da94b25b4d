"""Incremental detokenising and stop strings: ids in, text that only ever grows out.

The text of a token depends on the tokens before it (a character may span tokens, some decoders strip the first space
of a sequence), so a stream of ids is decoded by `tokenizers.decoders.DecodeStream`, primed with the end of the prompt.
"""

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from scheduler.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what undecodable bytes become
MAX_CHARACTER_TOKENS = 4  # UTF-8: a character is at most 4 bytes, so at most 4 tokens
ANCHOR_WINDOW = 64  # tokens searched backwards for a place where decoding may start
MAX_HELD_TOKENS = 32  # a run without a character border this long is garbage: give it out, or decoding is quadratic


class TextDecoder:
    """Turns one sequence's ids into text piece by piece. The pieces never change what was given out before.

    Args:
      tokenizer: the fast tokenizer.
      prompt_token_ids: what the output follows; read once, not kept.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: False: added tokens that follow one another are joined without the decoder.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context = list(prompt_token_ids[-ANCHOR_WINDOW:])
        self._held: list[int] = []  # ids whose text has not been given out
        self._added_tokens: dict[int, str] = {}
        if not (spaces_between_special_tokens or skip_special_tokens):
            self._added_tokens = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._last_was_added = False
        self._stream = self._primed_stream(prompt_token_ids)

    def step(self, token_id: int) -> str:
        """The text that becomes certain with this token; often empty while a character is incomplete."""
        if self._added_tokens:
            is_added = token_id in self._added_tokens
            joined, self._last_was_added = is_added and self._last_was_added, is_added
            if joined:
                return self.flush() + self._added_tokens[token_id]
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if type(error) is not Exception:  # a bare Exception is the library's sign of text that changes backwards
                raise
            return self._restart(token_id)
        if text is None:
            return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""
        self._remember_held()
        return text

    def flush(self) -> str:
        """The text of what is held back (an incomplete character gives replacement marks); starts afresh behind it."""
        if not self._held:
            return ""
        context = self._context[_anchor(self._tokenizer, self._context) :]
        before = self._decode(context)
        after = self._decode(context + self._held)
        self._remember_held()
        self._stream = self._primed_stream(self._context)
        return after[len(before) :] if after.startswith(before) else ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _remember_held(self) -> None:
        self._context.extend(self._held)
        if len(self._context) > 2 * ANCHOR_WINDOW:
            del self._context[:-ANCHOR_WINDOW]
        self._held.clear()

    def _restart(self, token_id: int) -> str:
        """Goes on behind a run of bytes that turned out not to be text: what was held of it is dropped."""
        del self._held[:-1]
        anchor = _last_clean(self._tokenizer, self._context)
        prime = [] if anchor is None else [self._context[anchor]]
        self._stream, text = self._new_stream(prime, [token_id])
        if text:
            self._remember_held()
        return text

    def _primed_stream(self, ids: Sequence[int]) -> DecodeStream:
        """A stream that stands behind `ids`: ids of an incomplete last character are stepped, not primed."""
        tail = list(ids[_anchor(self._tokenizer, ids) :])
        cut = len(tail)
        while cut > max(0, len(tail) - MAX_CHARACTER_TOKENS) and self._decode(tail[:cut]).endswith(REPLACEMENT):
            cut -= 1
        if self._decode(tail[:cut]).endswith(REPLACEMENT):  # garbage, not the beginning of a character
            return DecodeStream(ids=[], skip_special_tokens=self._skip_special_tokens)
        return self._new_stream(tail[:cut], tail[cut:])[0]

    def _new_stream(self, prime: list[int], ids: list[int]) -> tuple[DecodeStream, str]:
        """A stream behind `prime` that has taken `ids`, and their text; an empty stream if they do not decode."""
        stream = DecodeStream(ids=prime, skip_special_tokens=self._skip_special_tokens)
        try:
            return stream, "".join(stream.step(self._tokenizer, i) or "" for i in ids)
        except Exception as error:
            if type(error) is not Exception:
                raise
            return DecodeStream(ids=[], skip_special_tokens=self._skip_special_tokens), ""


def _last_clean(tokenizer: Tokenizer, ids: Sequence[int]) -> int | None:
    """Index of the last id that is whole visible text by itself, within ANCHOR_WINDOW of the end; None if none is."""
    for i in range(len(ids) - 1, max(-1, len(ids) - 1 - ANCHOR_WINDOW), -1):
        text = tokenizer.decode([ids[i]], skip_special_tokens=True)
        if text and REPLACEMENT not in text:
            return i
    return None


def _anchor(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Where decoding may start so that the text behind `ids` comes out right; 0 if only the beginning is safe."""
    return _last_clean(tokenizer, ids) or 0


def find_stop_string(text: str, num_new_chars: int, stop: list[str], include: bool) -> tuple[str, int] | None:
    """The first of `stop`, in list order, with a match that holds at least one of the last num_new_chars characters.

    Returns: (stop string, length to which the text is cut), or None.
    """
    for candidate in stop:
        start = text.find(candidate, max(0, len(text) - num_new_chars - len(candidate) + 1))
        if start >= 0:
            return candidate, start + len(candidate) if include else start
    return None


class Detokenizer(Protocol):
    """What the output processor asks of one completion's text."""

    def update(self, token_id: int, finish_reason: str | None) -> str | None:
        """Takes one token; returns the stop string it completed, if any."""
        ...

    def finish(self) -> None:
        """Gives out what was held back, for an end without a token: no stop string is looked for, as in vLLM."""
        ...

    def next_text(self, finished: bool, delta: bool) -> str:
        """The text to show now: all of it, or what is new since the last call."""
        ...


class NoDetokenizer:
    """For detokenize=False and for an engine without a tokenizer: there is no text."""

    def update(self, token_id: int, finish_reason: str | None) -> str | None:
        """Nothing to decode."""
        return None

    def finish(self) -> None:
        """Nothing is held back."""

    def next_text(self, finished: bool, delta: bool) -> str:
        """Always empty."""
        return ""


class IncrementalDetokenizer:
    """One completion's text: decodes token by token, finds stop strings, holds back what may become one."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._decoder = TextDecoder(
            tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._hold_back = 0 if self._include_stop or not self._stop else max(map(len, self._stop)) - 1
        self._num_tokens = 0
        self._num_sent_chars = 0
        self._stop_check_from = 0  # characters produced up to min_tokens do not make a stop string
        self.text = ""

    def update(self, token_id: int, finish_reason: str | None) -> str | None:
        """Takes one token.

        Args:
          finish_reason: how the core ended the request with this token. "stop" means that it is a stop token, whose
            text is left out unless include_stop_str_in_output.

        Returns: the stop string that this token completed; the text is cut there.
        """
        before = len(self.text)
        if finish_reason != "stop" or self._include_stop:
            self.text += self._decoder.step(token_id)
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            self._stop_check_from = len(self.text)
        if finish_reason is not None:
            self.text += self._decoder.flush()
        return self._check_stop(before)

    def finish(self) -> None:
        """Gives out what was held back, for an end without a token: no stop string is looked for, as in vLLM."""
        self.text += self._decoder.flush()

    def next_text(self, finished: bool, delta: bool) -> str:
        """The text to show now: all of it, or what is new since the last call. Held-back text waits for `finished`."""
        end = len(self.text) if finished else max(self._num_sent_chars, len(self.text) - self._hold_back)
        if not delta:
            return self.text[:end]
        start, self._num_sent_chars = self._num_sent_chars, end
        return self.text[start:end]

    def _check_stop(self, before: int) -> str | None:
        new = len(self.text) - max(before, self._stop_check_from)
        if not self._stop or new <= 0 or self._num_tokens <= self._min_tokens:
            return None
        found = find_stop_string(self.text, new, self._stop, self._include_stop)
        if found is None:
            return None
        stop_string, length = found
        self.text = self.text[:length]
        return stop_string


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer:
    """The detokenizer that a request asks for."""
    if tokenizer is None or not params.detokenize:
        return NoDetokenizer()
    return IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
