"""One request's grammar at the token it has come to, and the masks of a step's grammars."""

import time
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher

# A mask takes 0.01 to 0.1 ms, and a step's masks must not hold up its sampling: one that took longer than this (CPU
# time) is the last that a step waited for. From then on its request waits for it, as long as they are slow.
SLOW_MASK_S = 0.002
# Of masks computed together only the wall time is known, which may be that of other processes.
SLOW_MASKS_S, QUICK_MASK_S = 0.004, 0.00005  # for all of them, and for each

_IS_COMPLETE = "the text is complete"
_REASONS = {  # for llguidance's words that say too little
    "NoExtensionBias": "no token may come next",
    "parser stopped in consume_token; no error message": _IS_COMPLETE,
}
MANY_TOKENS = 32  # more are taken in in parallel; one takes 2 us


class TokenGrammar:
    """One request's grammar: a scheduler.grammar.RequestGrammar.

    Whoever may touch the matcher is given by the tokens: a step's masks are computed between the tokens before it and
    its own, by the thread that dispatches it; all else belongs to the loop, but for slow masks, which a thread computes
    while no step holds the request.

    Attributes:
      matcher: None until the grammar is compiled, and the first mask known.
      mask: i32[words] of the next token, where it was computed ahead of a step; not to be written to.
      error: why the request cannot go on.
      refusal: see RequestGrammar.
      is_closed: the request has ended.
      is_slow: its last mask took long.
      num_in_flight: steps under way that sample for the request.
    """

    def __init__(self) -> None:
        self.matcher: LLMatcher | None = None
        self.mask: np.ndarray | None = None
        self.error: str | None = None
        self.refusal: str | None = None
        self.is_closed = False
        self.is_slow = False
        self.num_in_flight = 0

    @property
    def is_ready(self) -> bool:
        """See RequestGrammar."""
        if self.matcher is None:
            return False
        return not self.is_slow or (self.num_in_flight == 0 and self.mask is not None)

    @property
    def is_over(self) -> bool:
        """Whether nobody needs its masks any more."""
        return self.is_closed or self.error is not None

    def close(self) -> None:
        """See RequestGrammar."""
        self.is_closed = True

    def compute_mask(self, num_words: int) -> None:
        """Set the mask of the next token, or the error, and whether that was slow."""
        assert self.matcher is not None
        mask = np.zeros((1, num_words), np.int32)
        start = time.thread_time()
        _compute([self], mask, [0], None)
        self.mask = mask[0]
        self.is_slow = time.thread_time() - start > SLOW_MASK_S


class GrammarStepMasks:
    """The masks of one step: a scheduler.grammar.StepMasks.

    Args:
      grammars: of the requests that sample in the step.
      executor: computes masks in parallel, without Python's lock.
      num_words: length of llguidance's masks.
    """

    def __init__(self, grammars: list[TokenGrammar], executor: LLExecutor, num_words: int) -> None:
        self._grammars = grammars
        self._executor = executor
        self._num_words = num_words
        self._is_open = False
        self._gate = Lock()  # held until then: the cheapest event there is
        self._gate.acquire()

    def open(self) -> None:
        """See StepMasks."""
        if not self._is_open:
            self._is_open = True
            self._gate.release()

    def fill(self, start: int, masks: np.ndarray) -> list[bool]:
        """See StepMasks. The device's words may be fewer than the tokenizer's, or more: those hold nothing allowed."""
        with self._gate:
            pass
        grammars = self._grammars[start : start + len(masks)]
        if masks.shape[1] == self._num_words:
            return self._fill(grammars, masks)
        full = np.zeros((len(masks), self._num_words), np.int32)
        counts = self._fill(grammars, full)
        num_words = min(masks.shape[1], self._num_words)
        masks[:, :num_words] = full[:, :num_words]
        masks[:, num_words:] = 0
        return counts

    def _fill(self, grammars: list[TokenGrammar], masks: np.ndarray) -> list[bool]:
        wanted = []
        for index, grammar in enumerate(grammars):
            if grammar.mask is not None:
                masks[index] = grammar.mask
            elif not grammar.is_over:
                wanted.append(index)
        if wanted:
            of_wanted = [grammars[index] for index in wanted]
            start = time.perf_counter()
            _compute(of_wanted, masks, wanted, self._executor)
            if time.perf_counter() - start > SLOW_MASKS_S + QUICK_MASK_S * len(wanted):
                for grammar in of_wanted:  # whose it was, shows when each is computed for itself
                    grammar.is_slow = True
        return [not grammar.is_over for grammar in grammars]


def error_of(matcher: LLMatcher) -> str:
    """What went wrong, without the parser's state that stands behind it."""
    reason = matcher.get_error().split("\n<state>", 1)[0]
    return _REASONS.get(reason, reason)


def accept(grammars: list[TokenGrammar], token_ids: list[int], executor: LLExecutor) -> None:
    """Tell grammars of one sampled token each; their refusals show which they do not take."""
    open_ones = []
    for grammar, token_id in zip(grammars, token_ids, strict=True):
        assert grammar.matcher is not None, "a token before its mask"
        grammar.mask = None
        if grammar.error is not None:
            grammar.refusal = grammar.error
        elif not grammar.is_closed:
            open_ones.append((grammar, grammar.matcher, token_id))
    pairs = [(matcher, token_id) for _, matcher, token_id in open_ones]
    if len(pairs) > MANY_TOKENS:
        are_taken = executor.consume_token_par(pairs)
    else:
        are_taken = [matcher.consume_token(token_id) for matcher, token_id in pairs]
    if not all(are_taken):
        for (grammar, matcher, token_id), is_taken in zip(open_ones, are_taken, strict=True):
            if not is_taken:
                grammar.refusal = _refusal(matcher, token_id)


def _refusal(matcher: LLMatcher, token_id: int) -> str:
    reason = error_of(matcher)
    if reason == _IS_COMPLETE or "doesn't satisfy the grammar" in reason:
        return (
            f"structured_outputs cannot take token {token_id}: {reason}. The request's other fields (min_tokens, "
            "allowed_token_ids, bad_words) leave none that does."
        )
    return f"structured_outputs cannot be followed further: {reason}"  # a limit of llguidance's


def _compute(grammars: list[TokenGrammar], masks: np.ndarray, places: list[int], executor: LLExecutor | None) -> None:
    """Write grammars' masks to rows of an array. What goes wrong becomes the error of those it concerns."""
    matchers = [grammar.matcher for grammar in grammars if grammar.matcher is not None]
    assert len(matchers) == len(grammars) and masks.flags.c_contiguous
    row_bytes = masks[0].nbytes
    try:
        if executor is None or len(matchers) == 1:
            for matcher, place in zip(matchers, places, strict=True):
                matcher.unsafe_compute_mask_ptr(masks.ctypes.data + place * row_bytes, row_bytes)
        else:  # once without Python's lock for all: to get it back takes as long as the loop likes
            pairs = list(zip(matchers, places, strict=True))
            executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, row_bytes, len(masks))
    except Exception as error:
        for grammar in grammars:
            grammar.error = f"structured_outputs cannot be followed further: {error}"
        return
    for grammar, matcher in zip(grammars, matchers, strict=True):
        if matcher.is_error():
            grammar.error = f"structured_outputs cannot be followed further: {error_of(matcher)}"
