"""GrammarManager: compiles the grammars of requests beside the engine's loop, and has a step's masks computed."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from jaxvllm.config import ModelLoadConfig
from jaxvllm.model_source import load_tokenizer, resolve
from jaxvllm.structured_output.grammar import special_texts, to_llguidance
from jaxvllm.structured_output.token_grammar import GrammarStepMasks, TokenGrammar, accept, error_of
from jaxvllm.tokenizer import Tokenizer
from scheduler.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

NUM_COMPILE_THREADS = 2
MAX_CACHED_GRAMMARS = 64
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


def make_grammar_tokenizer(tokenizer: Tokenizer, eos_token_ids: list[int], vocab_size: int = 0) -> GrammarTokenizer:
    """The vocabulary of a tokenizer.

    Args:
      vocab_size: of the model, which may have more tokens. Masks of its length are written where it takes them.
      eos_token_ids: those that end a text that is complete; all of them are allowed then.

    Raises: ValueError if there is none, or llguidance does not know the tokenizer's kind.
    """
    if not eos_token_ids:
        raise ValueError("structured_outputs cannot be followed without an end token: the model names none.")
    num_tokens = max(vocab_size, 1 + max(tokenizer.backend.get_vocab(with_added_tokens=True).values()))
    vocabulary = LLTokenizer(tokenizer.backend.to_str(), n_vocab=num_tokens, eos_token=eos_token_ids)
    return GrammarTokenizer(vocabulary, special_texts(tokenizer.backend))


class GrammarManager:
    """Owns the threads, the vocabulary (loaded at first use) and the compiled grammars.

    Args:
      load_tokenizer: makes the vocabulary; called once, in a thread.
    """

    def __init__(self, load_tokenizer: Callable[[], GrammarTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._compile_pool = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="grammar-compile")
        self._mask_pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._executor = LLExecutor()
        self._tokenizer: Future[GrammarTokenizer] | None = None
        self._compiled: OrderedDict[str, TokenGrammar] = OrderedDict()  # at their start
        self._compiled_lock = Lock()
        self._pending: set[Future[None]] = set()  # the threads take out what is done

    def prepare(self) -> None:
        """Start to load the vocabulary, which stops the whole process for some tenths of a second."""
        if self._tokenizer is None:
            self._tokenizer = self._compile_pool.submit(self._load_tokenizer)

    def add(self, params: StructuredOutputsParams) -> TokenGrammar:
        """Start to compile a request's grammar; it is ready, or has an error, when that is done."""
        self.prepare()
        grammar = TokenGrammar()
        self._note_pending(self._compile_pool.submit(self._compile, grammar, params))
        return grammar

    def begin_step(self, grammars: list[TokenGrammar]) -> GrammarStepMasks:
        """The masks of a step that is about to run, of grammars that are ready."""
        masks = GrammarStepMasks(grammars, self._executor, self._loaded().num_words)
        if not any(grammar.num_in_flight for grammar in grammars):
            masks.open()
        for grammar in grammars:
            grammar.num_in_flight += 1
        return masks

    def end_step(self, grammars: list[TokenGrammar], token_ids: list[int]) -> None:
        """Take in the tokens of a step, and start to compute those next masks that no step is to wait for."""
        accept(grammars, token_ids, self._executor)
        slow = []
        for grammar in grammars:
            grammar.num_in_flight -= 1
            if grammar.is_slow and not (grammar.num_in_flight or grammar.is_over):
                slow.append(grammar)
        if slow:
            self._note_pending(self._mask_pool.submit(self._compute_masks, slow))

    def wait(self) -> None:
        """Sleep until something is ready, for IDLE_WAIT_S at most; not at all if nothing is being computed."""
        wait(set(self._pending), IDLE_WAIT_S, FIRST_COMPLETED)

    def shutdown(self) -> None:
        """End the threads; what they were doing is lost."""
        self._compile_pool.shutdown(wait=False, cancel_futures=True)
        self._mask_pool.shutdown(wait=False, cancel_futures=True)

    def _note_pending(self, future: Future[None]) -> None:
        self._pending.add(future)  # first: one that is done is taken out at once
        future.add_done_callback(self._pending.discard)

    def _loaded(self) -> GrammarTokenizer:
        assert self._tokenizer is not None
        return self._tokenizer.result()

    def _compile(self, grammar: TokenGrammar, params: StructuredOutputsParams) -> None:
        if grammar.is_closed:
            return
        try:
            tokenizer = self._loaded()  # submitted before, so a thread has it already
            compiled = self._compiled_grammar(tokenizer, to_llguidance(params, tokenizer.special_texts))
        except Exception as error:  # whatever it is, it is this request's alone
            grammar.error = str(error)
            return
        if compiled.error is not None:
            grammar.error = compiled.error
            return
        assert compiled.matcher is not None
        grammar.mask, grammar.is_slow = compiled.mask, compiled.is_slow
        with self._compiled_lock:
            grammar.matcher = compiled.matcher.deep_copy()  # last: from now on it is ready

    def _compiled_grammar(self, tokenizer: GrammarTokenizer, text: str) -> TokenGrammar:
        """A grammar that stays at its start; the same one is compiled once, as long as it is remembered."""
        with self._compiled_lock:
            compiled = self._compiled.get(text)
            if compiled is not None:
                self._compiled.move_to_end(text)
                return compiled
        compiled, start = TokenGrammar(), time.perf_counter()
        compiled.matcher = LLMatcher(tokenizer.llguidance, text, log_level=0)
        logger.debug("Compiled a grammar of %d characters in %.3f s", len(text), time.perf_counter() - start)
        if compiled.matcher.is_error():
            compiled.error = f"structured_outputs cannot be followed: {error_of(compiled.matcher)}"
            return compiled
        compiled.compute_mask(tokenizer.num_words)
        with self._compiled_lock:
            if compiled.error is None:
                self._compiled[text] = compiled
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _compute_masks(self, grammars: list[TokenGrammar]) -> None:
        for grammar in grammars:
            grammar.compute_mask(self._loaded().num_words)


def make_grammar_manager(model: ModelLoadConfig) -> GrammarManager:
    """The manager for a model, whose tokenizer it reads when the first grammar comes."""

    def load() -> GrammarTokenizer:
        source = resolve(model.model, revision=model.revision, download_dir=model.download_dir)
        tokenizer = load_tokenizer(source, model.tokenizer, model.tokenizer_revision, model.download_dir)
        eos = source.eos_ids(tokenizer)
        eos_ids = [i for i in (eos.primary, *eos.extra) if i is not None]
        return make_grammar_tokenizer(tokenizer, eos_ids, source.config.vocab_size)

    return GrammarManager(load)
