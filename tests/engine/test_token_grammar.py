"""Masks of a step are made behind its model: when they come, for whom, and that tokens depend on none of it."""

import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher

import jaxvllm.core
from jaxvllm.structured_output import token_grammar
from jaxvllm.structured_output.grammar import to_llguidance
from jaxvllm.structured_output.manager import GrammarManager, GrammarTokenizer, make_grammar_tokenizer
from jaxvllm.structured_output.token_grammar import GrammarStepMasks, TokenGrammar, accept
from jaxvllm.tokenizer import Tokenizer
from scheduler.structured_outputs import StructuredOutputsParams
from tests.engine.random_schemas import random_schema
from tests.engine.tiny_core import VOCAB_SIZE, Ended, TinyCore, ids
from tests.engine.tokenizers_fixture import EOS


@pytest.fixture(scope="module")
def vocabulary(model_folder: Path) -> GrammarTokenizer:
    return make_grammar_tokenizer(Tokenizer.from_folder(model_folder), [EOS], VOCAB_SIZE)


@pytest.fixture
def grammars_in_core(vocabulary, monkeypatch) -> None:
    monkeypatch.setattr(jaxvllm.core, "_make_grammar_manager", lambda model: GrammarManager(lambda: vocabulary))


def start(vocabulary: GrammarTokenizer, regex: str) -> TokenGrammar:
    grammar = TokenGrammar()
    text = to_llguidance(StructuredOutputsParams(regex=regex), vocabulary.special_texts)
    grammar.matcher = LLMatcher(vocabulary.llguidance, text)
    return grammar


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def fill(grammars: list[TokenGrammar], num_words: int, of_tokenizer: int) -> tuple[list[set[int]], list[bool]]:
    masks = np.full((len(grammars), num_words), -1, np.int32)
    step = GrammarStepMasks(grammars, LLExecutor(), of_tokenizer)
    step.open()
    step.open()
    counts = step.fill(0, masks)
    return [allowed(mask) for mask in masks], counts


@pytest.mark.parametrize("extra_words", [0, -5, 3])
def test_masks_fit_models_that_have_fewer_or_more_tokens_than_the_tokenizer(vocabulary, extra_words):
    regexes = ["[a-c]x", "é|z", "\u0001b"]
    grammars = [start(vocabulary, regex) for regex in regexes]
    grammars[1].mask = np.arange(vocabulary.num_words, dtype=np.int32)  # known already
    num_words = vocabulary.num_words + extra_words
    masks, counts = fill(grammars, num_words, vocabulary.num_words)
    expected = [{97, 98, 99}, allowed(np.arange(vocabulary.num_words, dtype=np.int32)), {1}]
    assert masks == [{token for token in tokens if token < num_words * 32} for tokens in expected]
    assert counts == [True] * 3


def test_a_grammar_that_has_ended_or_failed_does_not_count_and_the_others_do(vocabulary):
    class Broken:
        def unsafe_compute_mask_ptr(self, *args):
            raise RuntimeError("out of luck")

    ended, good, failed = (start(vocabulary, "[ab]") for _ in range(3))
    ended.close()
    failed.error = "too large"
    masks, counts = fill([ended, good, failed], vocabulary.num_words, vocabulary.num_words)
    assert masks[1] == {97, 98} and counts == [False, True, False]
    broken = start(vocabulary, "a")
    broken.matcher = Broken()  # pyright: ignore[reportAttributeAccessIssue]
    assert fill([broken], vocabulary.num_words, vocabulary.num_words)[1] == [False]
    assert "out of luck" in str(broken.error)
    accept([broken, ended], [97, 97], LLExecutor())
    assert broken.refusal == broken.error and ended.refusal is None


@pytest.mark.parametrize("count", [3, 40])
def test_a_token_that_a_grammar_does_not_take_is_its_refusal_alone(vocabulary, count):
    grammars = [start(vocabulary, "ab") for _ in range(count)]
    accept(grammars, [97, 98, *[97] * (count - 2)], LLExecutor())
    assert [i for i, grammar in enumerate(grammars) if grammar.refusal] == [1]
    assert "structured_outputs cannot take token 98" in str(grammars[1].refusal)


def test_masks_wait_until_the_tokens_before_them_are_known(vocabulary):
    grammar = start(vocabulary, "ab|cd")
    step, mask = GrammarStepMasks([grammar], LLExecutor(), vocabulary.num_words), np.zeros((1, 9), np.int32)
    thread = threading.Thread(target=step.fill, args=(0, mask))
    thread.start()
    accept([grammar], [99], LLExecutor())
    assert thread.is_alive()
    step.open()
    thread.join(10)
    assert allowed(mask[0]) == {100}


@pytest.mark.usefixtures("grammars_in_core")
def test_a_structured_request_is_in_every_step_beside_the_others():
    core = TinyCore()
    core.add("g", ids(5), max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z]{30,}"))
    core.add("r", ids(7), max_tokens=100)
    ended = core.run()
    assert {name: len(tokens) for name, (tokens, _) in ended.items()} == {"g": 20, "r": 100}
    steps = [i for i, plan in enumerate(core.executor.plans) if "g" in plan.request_ids]
    assert steps == list(range(steps[0], steps[0] + 20))
    assert [len(plan.masks.places) for plan in core.executor.plans if plan.masks] == [1] * 20
    assert all(97 <= token <= 122 for token in ended["g"][0])


def run_mix(depth: int = 2, usable_blocks: int = 64) -> Ended:
    core = TinyCore(usable_blocks, max_num_seqs=6, max_model_len=112, depth=depth)
    for i in range(12):
        schema: Any = StructuredOutputsParams(json=random_schema(random.Random(i))) if i % 4 else None
        core.add(str(i), ids(20, i), max_tokens=25, temperature=1.0, seed=i, structured_outputs=schema)
    return core.run()


@pytest.mark.usefixtures("grammars_in_core")
@pytest.mark.parametrize("slow_s", [-1.0, math.inf], ids=["all masks are slow", "slow together and quick alone"])
def test_tokens_do_not_depend_on_which_masks_are_slow(slow_s, monkeypatch):
    expected = run_mix(depth=1)
    assert run_mix() == expected
    monkeypatch.setattr(token_grammar, "SLOW_MASKS_S", -1.0)
    monkeypatch.setattr(token_grammar, "SLOW_MASK_S", slow_s)
    assert run_mix() == expected
    assert run_mix(usable_blocks=9) == expected  # and under pre-emption


def test_a_manager_forgets_what_it_has_computed_without_ever_waiting_for_it(vocabulary):
    manager = GrammarManager(lambda: vocabulary)
    for _ in range(50):
        grammar = manager.add(StructuredOutputsParams(regex="a+"))
        while not grammar.is_ready:
            time.sleep(1e-4)
        grammar.is_slow = True
        manager.begin_step([grammar])
        manager.end_step([grammar], [ord("a")])
    deadline = time.monotonic() + 10
    while manager._pending and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert not manager._pending
    manager.shutdown()


@pytest.mark.usefixtures("grammars_in_core")
def test_an_engine_ends_although_a_step_waits_for_masks_that_will_not_come():
    core = TinyCore()
    core.add("g", ids(5), max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z]{30,}"))
    while len(core.executor.plans) < 2:
        core.step()

    def fail() -> None:
        raise RuntimeError("the front end is gone")

    with pytest.raises(RuntimeError, match="the front end is gone"):
        core.step(fail)  # between a result and its use
    ending = threading.Thread(target=core.core.shutdown)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
