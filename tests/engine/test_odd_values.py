"""Odd values from callers, with the core in a process of its own: served or refused by name, and the core lives on."""

import enum
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams, StructuredOutputsParams
from tests.engine.test_engine import make_engine, texts

HALF = "\ud800"  # of a surrogate pair: a str in Python, and no character


class Answer(enum.StrEnum):
    YES = "yes"


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    reasoning = {"reasoning_start_str": "(", "reasoning_end_str": ")"}
    return make_engine(model_folder, multiprocess=True, reasoning_config=reasoning)


def text(engine: Engine, prompt, **params) -> str:
    return texts(engine.generate(prompt, SamplingParams(**{"max_tokens": 3} | params), use_tqdm=False))[0]


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": np.int64(3)},
        {"top_k": np.int32(5), "seed": np.uint64(3), "n": np.int8(1)},
        {"temperature": np.float32(0.5), "top_p": np.float64(0.5), "presence_penalty": 1},
        {"ignore_eos": np.bool_(True), "skip_reading_prefix_cache": np.bool_(False)},
        {"stop_token_ids": np.array([99, 100]), "logit_bias": {np.int64(5): np.float32(2.0)}},
        {"allowed_token_ids": range(64, 90), "stop": (np.str_("x"),)},
        {"repetition_detection": {"max_pattern_size": np.int64(3), "min_count": 2}},
        {"thinking_token_budget": 10**30},
        {"repetition_penalty": 10**30},
    ],
)
def test_numbers_of_other_libraries_are_numbers_and_huge_ones_reach_the_core(engine, params):
    assert text(engine, "A", **params) == "BCD"


def test_choices_may_be_members_of_an_enum(engine):
    choice = StructuredOutputsParams(choice=[Answer.YES, np.str_("y")])
    assert text(engine, "x", max_tokens=1, structured_outputs=choice) == "y"
    assert text(engine, "A", max_tokens=10**30, stop="F") == "BCDE"


@pytest.mark.parametrize(
    "params",
    [
        {"skip_reading_prefix_cache": 1},
        {"ignore_eos": 1},
        {"max_tokens": 3.0},
        {"temperature": np.bool_(True)},
        {"repetition_penalty": 10**400},
        {"stop": HALF},
        {"bad_words": [HALF]},
        {"structured_outputs": {"regex": HALF}},
    ],
)
def test_values_of_a_wrong_kind_are_refused_by_name(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("max_tokens", 0, {}),
        ("max_tokens", "3", {}),
        ("n", 0, {}),
        ("top_p", 0.0, {}),
        ("temperature", None, {}),
        ("min_tokens", 9, {}),
        ("repetition_detection", {"min_count": "x"}, {}),
    ],
)
def test_a_field_that_is_set_later_is_checked_when_the_request_is_made(engine, name, value, other):
    params = SamplingParams(max_tokens=3, **other)
    setattr(params, name, value)
    with pytest.raises(ValueError, match=name):
        engine.generate("A", params, use_tqdm=False)
    assert text(engine, "A") == "BCD"


def test_a_stop_string_that_is_set_later_is_one_string(engine):
    params = SamplingParams(max_tokens=9)
    params.stop = "EC"
    assert texts(engine.generate("A", params, use_tqdm=False)) == ["BCDEFGHIJ"]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (f"a{HALF}b", ValueError, "half of a surrogate pair"),
        ({"prompt": "a", "cache_salt": HALF}, ValueError, "cache_salt holds"),
        (np.int64(65), ValueError, "got int64"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, NotImplementedError, "multi_modal_data"),
        ({"prompt_embeds": [1.0]}, NotImplementedError, "prompt_embeds"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(engine, prompt, error, message):
    with pytest.raises(error, match=message):
        engine.generate(prompt, use_tqdm=False)
    assert text(engine, {"prompt": "A", "multi_modal_data": None}) == "BCD"


def test_arguments_beside_the_prompt(engine):
    assert texts(engine.generate(["A"], use_tqdm=False, lora_request=[None], priority=np.array([0]))) != []
    with pytest.raises(ValueError, match="priority=1 must be a list"):
        engine.generate(["A"], priority=1)
    for name, value in {"request_id": HALF, "arrival_time": "now"}.items():
        with pytest.raises(ValueError, match=name):
            engine.llm_engine.add_request(**{"request_id": "a", "prompt": "A", "params": SamplingParams(), name: value})
    assert not engine.llm_engine.has_unfinished_requests()


def test_a_request_that_cannot_be_sent_is_not_waited_for(engine, monkeypatch):
    monkeypatch.setattr(engine.llm_engine.client, "add_requests", lambda requests: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.llm_engine.add_request("a", "A", SamplingParams())
    assert not engine.llm_engine.has_unfinished_requests()


def test_threads_that_share_an_engine_each_get_their_own_outputs(engine):
    results: dict[int, list[str]] = {}

    def ask(i: int) -> None:
        params = SamplingParams(max_tokens=20)
        results[i] = texts(engine.generate([chr(65 + i)] * 3, params, use_tqdm=False))
        assert engine.get_metrics()

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {i: [t[:2] for t in found] for i, found in results.items()} == {
        i: [chr(66 + i) + chr(67 + i)] * 3 for i in range(6)
    }


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_that_the_engine_is_not_its_own(engine):
    pid = os.fork()
    if pid == 0:
        try:
            engine.generate("A", use_tqdm=False)
        except RuntimeError as error:
            engine.shutdown()  # and may not take the core from its owner
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert text(engine, "A") == "BCD"
