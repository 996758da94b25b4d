"""Log-probabilities in the shapes of the two APIs."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxvllm.detokenizer import TextDecoder
from jaxvllm.server.responses import (
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
)
from jaxvllm.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf


class TokenNames:
    """How tokens are written: as their text, or as "token_id:17"."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token_id: int, logprob: Any = None) -> str:
        """The token's name; logprob: its Logprob, which may know the text."""
        if self._as_ids:
            return f"token_id:{token_id}"
        decoded = getattr(logprob, "decoded_token", None)
        if decoded is not None:
            return decoded
        assert self._tokenizer is not None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _likeliest(entry: Mapping[int, Any], count: int) -> list[tuple[int, Any]]:
    """The `count` most likely tokens of a position, best first; -1: all."""
    ordered = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return ordered if count < 0 else ordered[:count]


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Any]], num_top: int, names: TokenNames
) -> ChatLogprobs:
    """What choices[].logprobs of a chat holds."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [TokenLogprob(*_described(i, logprob, names)) for i, logprob in _likeliest(entry, num_top)]
        content.append(ChosenLogprob(*_described(token_id, entry[token_id], names), top))
    return ChatLogprobs(content)


def _described(token_id: int, logprob: Any, names: TokenNames) -> tuple[str, float, list[int]]:
    text = names.name(token_id, logprob)
    return text, max(logprob.logprob, LOWEST), list(text.encode("utf-8", "replace"))


class CompletionLogprobsBuilder:
    """Follows one choice of a completion, and gives each of its tokens the place of its text.

    Args:
      num_top: most likely tokens an entry.
      prompt_token_ids: what the tokens follow; [] for the prompt's own tokens.
      text_offset: length of the text before the first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        names: TokenNames,
        num_top: int,
        prompt_token_ids: Sequence[int],
        text_offset: int,
        skip_special_tokens: bool,
    ) -> None:
        self._names = names
        self._num_top = num_top
        self._offset = text_offset
        self._decoder = (
            TextDecoder(tokenizer.backend, prompt_token_ids, skip_special_tokens) if tokenizer is not None else None
        )

    def build(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Any] | None]) -> CompletionLogprobs:
        """The lists for the next tokens; an entry is None where a token has no probability (the first of a prompt)."""
        lists = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            lists.text_offset.append(self._offset)
            if self._decoder is not None:
                self._offset += len(self._decoder.step(token_id))
            lists.tokens.append(self._names.name(token_id, entry[token_id] if entry else None))
            lists.token_logprobs.append(max(entry[token_id].logprob, LOWEST) if entry else None)
            lists.top_logprobs.append(self._top(token_id, entry) if entry else None)
        return lists

    def _top(self, token_id: int, entry: Mapping[int, Any]) -> dict[str, float]:
        """The most likely tokens and, behind them, the one that came."""
        shown = dict(_likeliest(entry, self._num_top))
        shown.setdefault(token_id, entry[token_id])
        return {self._names.name(i, logprob): max(logprob.logprob, LOWEST) for i, logprob in shown.items()}


def prompt_logprobs(entries: Sequence[Mapping[int, Any] | None] | None) -> PromptLogprobs | None:
    """vLLM's prompt_logprobs: a dict by token id for each token of the prompt, None for the first."""
    if entries is None:
        return None
    return [None if entry is None else {i: _plain(logprob) for i, logprob in entry.items()} for entry in entries]


def _plain(logprob: Any) -> dict[str, Any]:
    return {
        "logprob": max(logprob.logprob, LOWEST),
        "rank": logprob.rank,
        "decoded_token": logprob.decoded_token,
    }
