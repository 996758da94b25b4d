"""Requests that cannot be served, beside a running one on a real model: refused by name, and nobody else notices."""

import re

import pytest

from jaxvllm import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jaxvllm.input_processor import NOT_APPLIED

PROMPT = [7, 201, 33, 5, 118]
BAD_PROMPTS = [
    ([264], "prompt_token_ids[0]=264 is outside the vocabulary: ids must be in [0, 263]"),
    ([3, -1], "prompt_token_ids[1]=-1 is outside"),
    ([4611686018427387904], "4611686018427387904 is outside"),
    ([1.5], "prompt_token_ids[0]=1.5 must be an integer, got float"),
    ([True], "must be an integer, got bool"),
    (["7"], "must be an integer, got str"),
    ([[1, 2], [999999]], "must be an integer, got list"),
    ([], "the prompt is empty"),
    ([1] * 64, "the prompt has 64 tokens; with at least 1 output token at most 63 fit max_model_len=64: shorten it"),
]
BAD_PARAMS = [
    ({"stop_token_ids": [264]}, "stop_token_ids[0]=264 is outside the vocabulary: ids must be in [0, 263]"),
    ({"stop_token_ids": [-5]}, "stop_token_ids[0]=-5 is outside"),
    ({"stop_token_ids": ["7"]}, "stop_token_ids[0]='7' must be an integer, got str"),
    ({"logit_bias": {264: 5.0}}, "logit_bias has the key 264, which is outside the vocabulary"),
    ({"logit_bias": {-1: 5.0}}, "logit_bias has the key -1, which is outside"),
    ({"logit_bias": {"abc": 5.0}}, "logit_bias key='abc' must be an integer, got str"),
    ({"allowed_token_ids": [264]}, "allowed_token_ids[0]=264 is outside the vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids=[] allows no token"),
    (
        {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1},
        "allowed_token_ids=[9] are all ends of the text",
    ),
    ({"logprob_token_ids": [264]}, "logprob_token_ids[0]=264 is outside the vocabulary"),
    ({"bad_words": [""]}, "bad_words=[''] must not hold an empty string"),
    ({"logprobs": 21}, "logprobs=21 must be at most max_logprobs=20"),
    ({"logprobs": -1}, "logprobs=-1 must be at most max_logprobs=20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs=21 must be at most max_logprobs=20"),
    ({"thinking_token_budget": 3}, "thinking_token_budget=3 needs an engine that knows"),
    ({"extra_args": {"a": 1}}, "extra_args has the key 'a', which is no custom logits processor"),
    ({"min_tokens": 60, "max_tokens": None}, "min_tokens=60 can never be reached"),
]


@pytest.fixture(scope="module")
def engine(model_folder) -> LLMEngine:
    args = EngineArgs(model_folder, load_format="dummy", device="cpu", multiprocess=False, max_model_len=64)
    return LLMEngine.from_engine_args(args)


def test_e02_bad_ids_are_refused_by_name_and_the_neighbour_equals_its_solo_run(engine):
    params = SamplingParams(
        temperature=0.0, max_tokens=50, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False
    )
    runs = []
    for bad in ([], [*((p, {}, m) for p, m in BAD_PROMPTS), *((PROMPT, p, m) for p, m in BAD_PARAMS)]):
        engine.add_request("neighbour", PROMPT, params)
        ids: list[int] = []
        queue = list(bad)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.request_id == "neighbour"
                ids += output.outputs[0].token_ids
            if queue and len(ids) > 2:
                prompt, bad_fields, message = queue.pop(0)
                with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
                    engine.add_request("bad", prompt, SamplingParams(**{"max_tokens": 3} | bad_fields))
                assert engine.get_num_unfinished_requests() == 1
        assert not queue, "the neighbour ran out before the bad requests did"
        runs.append(ids)
    assert runs[0] == runs[1] and len(set(runs[0])) > 5


def test_what_is_not_applied_is_refused_by_name(engine):
    """tests/engine/test_sampling_fields.py has a test for each field that is applied."""
    for name, reason in NOT_APPLIED.items():
        with pytest.raises(NotImplementedError, match=rf"sampling parameter {name}=2 is not supported \({reason}\)"):
            engine.add_request("bad", PROMPT, SamplingParams(**{name: 2}))
    assert not engine.has_unfinished_requests()
