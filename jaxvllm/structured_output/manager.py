"""GrammarManager: compiles the grammars of requests and computes their masks, beside the engine's loop."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from jaxvllm.config import ModelLoadConfig
from jaxvllm.model_source import load_tokenizer, resolve
from jaxvllm.structured_output.grammar import special_texts, to_llguidance
from jaxvllm.tokenizer import Tokenizer
from scheduler.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

NUM_COMPILE_THREADS = 2
NUM_MASK_THREADS = 2  # each starts a computation that uses all CPUs
MAX_CACHED_GRAMMARS = 64
# Masks that take no longer together are computed by the loop itself: to hand one to a thread and to wait for it takes
# 0.5 ms (2 CPUs under load), the mask 0.02 to 0.1 ms.
INLINE_S = 0.0002
# Others a step waits for rather than leave their requests out; slow ones cost the others no more.
MASK_WAIT_S = 0.001
IDLE_WAIT_S = 0.002  # how long the loop sleeps if there is nothing but grammars to wait for


@dataclass(frozen=True)
class GrammarTokenizer:
    """The vocabulary as grammars see it. num_words: length of a mask."""

    llguidance: LLTokenizer
    special_texts: frozenset[str]

    @property
    def num_words(self) -> int:
        """Words of 32 tokens."""
        return -(-self.llguidance.vocab_size // 32)


def make_grammar_tokenizer(tokenizer: Tokenizer, eos_token_ids: list[int]) -> GrammarTokenizer:
    """The vocabulary of a tokenizer.

    Args:
      eos_token_ids: those that end a text that is complete; all of them are allowed then.

    Raises: ValueError if there is none, or llguidance does not know the tokenizer's kind.
    """
    if not eos_token_ids:
        raise ValueError("structured_outputs need an end token, and the model names none.")
    vocabulary = LLTokenizer(tokenizer.backend.to_str(), eos_token=eos_token_ids)
    return GrammarTokenizer(vocabulary, special_texts(tokenizer.backend))


class TokenGrammar:
    """One request's grammar: a scheduler.grammar.RequestGrammar.

    The manager's threads set mask and error; nothing touches the matcher while they work on it, as the request is not
    scheduled before they are done. mask_s: seconds that its last mask took.
    """

    def __init__(self) -> None:
        self.mask: np.ndarray | None = None
        self.error: str | None = None
        self.is_closed = False
        self.matcher: LLMatcher | None = None
        self.needs_mask = False
        self.mask_s = 0.0

    def accept(self, token_id: int) -> str | None:
        """See RequestGrammar."""
        assert self.matcher is not None and self.mask is not None, "a token before its mask"
        self.mask = None
        if self.matcher.consume_token(token_id):
            self.needs_mask = True
            return None
        return f"token {token_id} does not fit structured_outputs: {self.matcher.get_error() or 'the text is complete'}"

    def close(self) -> None:
        """See RequestGrammar."""
        self.is_closed = True


class GrammarManager:
    """Owns the threads, the vocabulary (loaded at first use) and the compiled grammars.

    Args:
      load_tokenizer: makes the vocabulary; called once, in a thread.
    """

    def __init__(self, load_tokenizer: Callable[[], GrammarTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._compile_pool = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="grammar-compile")
        self._mask_pool = ThreadPoolExecutor(NUM_MASK_THREADS, thread_name_prefix="grammar-mask")
        self._executor = LLExecutor()
        self._tokenizer: Future[GrammarTokenizer] | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # grammar -> a matcher that stands at its start
        self._compiled_lock = Lock()
        self._open: list[TokenGrammar] = []
        self._pending: set[Future[None]] = set()
        self._new_masks: set[Future[None]] = set()  # that the loop has not waited for

    def prepare(self) -> None:
        """Start to load the vocabulary, which stops the whole process for some tenths of a second."""
        if self._tokenizer is None:
            self._tokenizer = self._compile_pool.submit(self._load_tokenizer)

    def add(self, params: StructuredOutputsParams) -> TokenGrammar:
        """Start to compile a request's grammar; its mask or its error shows when that is done."""
        self.prepare()
        grammar = TokenGrammar()
        self._open.append(grammar)
        self._pending.add(self._compile_pool.submit(self._compile, grammar, params))
        return grammar

    def start_masks(self) -> None:
        """Compute the masks behind the tokens that were just accepted, or start to if that takes long."""
        self._open = [grammar for grammar in self._open if not (grammar.is_closed or grammar.error)]
        wanted = [grammar for grammar in self._open if grammar.needs_mask]
        if wanted:
            for grammar in wanted:
                grammar.needs_mask = False
            if sum(grammar.mask_s for grammar in wanted) <= INLINE_S:
                self._compute_masks(wanted)
                return
            future = self._mask_pool.submit(self._compute_masks, wanted)
            self._pending.add(future)
            self._new_masks.add(future)

    def wait_for_masks(self) -> None:
        """Give the masks of the last step a moment; those that take longer keep their requests out of the next one."""
        if self._new_masks:
            wait(self._new_masks, MASK_WAIT_S)
            self._new_masks.clear()
        self._pending = {future for future in self._pending if not future.done()}

    def wait(self) -> None:
        """Sleep until something is ready, for IDLE_WAIT_S at most; not at all if nothing is being computed."""
        self._pending = {future for future in self._pending if not future.done()}
        if self._pending:
            wait(self._pending, IDLE_WAIT_S, FIRST_COMPLETED)

    def shutdown(self) -> None:
        """End the threads; what they were doing is lost."""
        self._compile_pool.shutdown(wait=False, cancel_futures=True)
        self._mask_pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: TokenGrammar, params: StructuredOutputsParams) -> None:
        if grammar.is_closed:
            return
        try:
            assert self._tokenizer is not None
            tokenizer = self._tokenizer.result()  # submitted before, so a thread has it already
            matcher = self._matcher(tokenizer, to_llguidance(params, tokenizer.special_texts))
        except Exception as error:  # whatever it is, it is this request's alone
            grammar.error = str(error)
            return
        if matcher.is_error():
            grammar.error = f"structured_outputs cannot be followed: {matcher.get_error()}"
            return
        grammar.matcher = matcher
        self._compute_masks([grammar])

    def _matcher(self, tokenizer: GrammarTokenizer, text: str) -> LLMatcher:
        """A matcher at the start of a grammar; the same grammar is compiled once, as long as it is remembered."""
        with self._compiled_lock:
            compiled = self._compiled.get(text)
            if compiled is not None:
                self._compiled.move_to_end(text)
                return compiled.deep_copy()
        start = time.perf_counter()
        compiled = LLMatcher(tokenizer.llguidance, text, log_level=0)
        logger.debug("Compiled a grammar of %d characters in %.3f s", len(text), time.perf_counter() - start)
        if compiled.is_error():
            return compiled
        with self._compiled_lock:
            self._compiled[text] = compiled
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def _compute_masks(self, grammars: list[TokenGrammar]) -> None:
        """Set the mask or the error of each grammar."""
        assert self._tokenizer is not None
        matchers = [grammar.matcher for grammar in grammars if grammar.matcher is not None]
        try:
            masks = np.zeros((len(grammars), self._tokenizer.result().num_words), np.int32)
            start = time.perf_counter()
            if len(matchers) == 1:
                fill_next_token_bitmask(matchers[0], masks)
            else:
                fill_next_token_bitmask_par(self._executor, [(m, i) for i, m in enumerate(matchers)], masks)
        except Exception as error:
            for grammar in grammars:
                grammar.error = f"structured_outputs cannot be followed further: {error}"
            return
        mask_s = (time.perf_counter() - start) / len(grammars)
        for grammar, matcher, mask in zip(grammars, matchers, masks, strict=True):
            grammar.mask_s = mask_s
            if matcher.is_error():
                grammar.error = f"structured_outputs cannot be followed further: {matcher.get_error()}"
            else:
                grammar.mask = mask


def make_grammar_manager(model: ModelLoadConfig) -> GrammarManager:
    """The manager for a model, whose tokenizer it reads when the first grammar comes."""

    def load() -> GrammarTokenizer:
        source = resolve(model.model, revision=model.revision, download_dir=model.download_dir)
        tokenizer = load_tokenizer(source, model.tokenizer, model.tokenizer_revision, model.download_dir)
        eos = source.eos_ids(tokenizer)
        return make_grammar_tokenizer(tokenizer, [i for i in (eos.primary, *eos.extra) if i is not None])

    return GrammarManager(load)
