"""Log-probabilities as the caller gets them, with vLLM's names: Logprob, FlatLogprobs, and what collects them."""

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from tokenizers import Tokenizer

from scheduler.outputs import PromptLogprobs as PromptPart
from scheduler.outputs import TokenLogprobs

_REPLACEMENT = "\ufffd"
_MAX_CONTEXT = 4  # a character has at most 4 bytes


@dataclass(slots=True)
class Logprob:
    """One token at one position.

    Attributes:
      logprob: log-softmax of the model's own logits.
      rank: 1 for the most likely token; None for a token that logprob_token_ids named.
      decoded_token: its text; None without detokenising.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


@dataclass
class FlatLogprobs(MutableSequence):
    """The same as a list of dicts, as a few flat lists: nothing for the garbage collector to walk at each position.

    Attributes:
      start_indices, end_indices: of each position's entries in the other lists.
      token_ids, logprobs, ranks, decoded_tokens: parallel.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add a position given as a dict; None: one without logprobs."""
        entries = value or {}
        self.append_fast(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position given as columns."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add positions given as dicts."""
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "LogprobsOnePosition | FlatLogprobs":
        if isinstance(index, slice):
            part = FlatLogprobs()
            for i in range(*index.indices(len(self))):
                where = slice(self.start_indices[i], self.end_indices[i])
                part.append_fast(
                    self.token_ids[where], self.logprobs[where], self.ranks[where], self.decoded_tokens[where]
                )
            return part
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __iter__(self) -> Iterator[LogprobsOnePosition]:
        for i in range(len(self)):
            yield self[i]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs can only be appended to.")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs can only be appended to.")

    def insert(self, index: int, value: LogprobsOnePosition | None) -> None:
        """Not supported: FlatLogprobs can only be appended to."""
        raise TypeError("FlatLogprobs can only be appended to.")


SampleLogprobs = FlatLogprobs | list[LogprobsOnePosition]
PromptLogprobs = FlatLogprobs | list[LogprobsOnePosition | None]


class TokenTexts:
    """The text of single tokens, as the entries of logprobs show it.

    A token is decoded by itself. Where that leaves an incomplete character, the tokens before it complete it, so the
    last token of a character carries its text and the ones before it are empty, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def of(self, token_id: int, context: Sequence[int]) -> str:
        """The text of a token behind the tokens `context`."""
        text = self._decode_alone(token_id)
        if not text.endswith(_REPLACEMENT):
            return text
        for count in range(1, min(len(context), _MAX_CONTEXT) + 1):
            before = list(context[-count:])
            text = self._decode([*before, token_id])
            if text.endswith(_REPLACEMENT):
                continue
            while before and self._decode_alone(before[-1]).endswith(_REPLACEMENT):
                before.pop()
            known = self._decode(before) if before else ""
            return text.removeprefix(known)
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _decode_alone(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._decode([token_id])
        return text


class LogprobCollector:
    """The logprobs of one completion, or of one prompt, position by position.

    Attributes:
      positions: a list of dicts, or FlatLogprobs.
      cumulative_logprob: sum over the tokens that are there.
    """

    def __init__(self, texts: TokenTexts | None, is_flat: bool) -> None:
        """Make an empty one.

        Args:
          texts: of the tokens; None: decoded_token stays None.
          is_flat: collect into FlatLogprobs.
        """
        self._texts = texts
        self.positions: Any = FlatLogprobs() if is_flat else []
        self.cumulative_logprob = 0.0

    def add(self, new: TokenLogprobs, context: Sequence[int]) -> None:
        """Add a position; context: the tokens before it."""
        ids, values, rank = new.token_ids, new.logprobs, new.rank
        texts = [None] * len(ids) if self._texts is None else [self._texts.of(i, context) for i in ids]
        self.cumulative_logprob += values[0]
        if isinstance(self.positions, FlatLogprobs):
            others = range(1, len(ids)) if new.is_ranked else [None] * (len(ids) - 1)
            self.positions.append_fast(ids, values, [rank, *others], texts)
            return
        entries: LogprobsOnePosition = {ids[0]: Logprob(values[0], rank, texts[0])}
        for i in range(1, len(ids)):
            if ids[i] != ids[0]:  # the token that is there may be among the others again
                entries[ids[i]] = Logprob(values[i], i if new.is_ranked else None, texts[i])
        self.positions.append(entries)

    def add_none(self) -> None:
        """Add a position without logprobs: the first of a prompt."""
        self.positions.append(None)


class PromptLogprobCollector:
    """The logprobs of a prompt, which come in parts, before or with the first token.

    A part may come again after a pre-emption; then what comes later replaces what came before.
    """

    def __init__(self, prompt_token_ids: Sequence[int], texts: TokenTexts | None, is_flat: bool) -> None:
        self._prompt = prompt_token_ids
        self._texts, self._is_flat = texts, is_flat
        self._parts: list[TokenLogprobs] = []
        self._result: PromptLogprobs | None = None
        self.is_sent = False

    def add(self, part: PromptPart) -> None:
        """Take in a part. Position i of the list is prompt token i + 1: the first token has no logprob."""
        assert part.start - 1 <= len(self._parts), f"part {part.start} leaves a gap behind {len(self._parts)}"
        del self._parts[part.start - 1 :]
        self._result = None
        self._parts += part.positions

    def result(self) -> PromptLogprobs | None:
        """One entry a prompt token, None first; None while the prompt is not complete. The same object every time."""
        if self._result is not None or len(self._parts) < len(self._prompt) - 1:
            return self._result
        collector = LogprobCollector(self._texts, self._is_flat)
        collector.add_none()
        for index, part in enumerate(self._parts, start=1):
            collector.add(part, self._prompt[max(0, index - _MAX_CONTEXT) : index])
        self._result = collector.positions
        return self._result
