"""The whole engine against transformers.generate: a saved model, long prompts in chunks, prefix hits, pre-emptions."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from jaxvllm.metrics import HELP
from jaxvllm.models import causal_lm, opt
from tests.engine.tokenizers_fixture import k_bytes
from tests.parity.tiny_models import TinyModel, tiny_model

NUM_OUTPUTS = 64
MARGIN = 1e-3  # between the two largest logits, at every token that is compared
BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)

rng = np.random.default_rng(9)
PREFIX = rng.integers(3, 262, 37).tolist()
TWIN = rng.integers(3, 262, 17).tolist()
PROMPTS = [TWIN, TWIN, *(PREFIX + rng.integers(3, 262, n).tolist() for n in (4, 13)), [5, 7], PREFIX[:33]]


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return tiny_model("LlamaConfig", vocab_size=264)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """As a hub repository holds it: sharded safetensors with an index, config, generation config, tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    tiny.torch_model.save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").exists()
    k_bytes().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def assert_greedy(tiny: TinyModel, prompt: list[int], ids: list[int]) -> None:
    """Each id is transformers' choice after all before it: by induction, what its generate() gives."""
    logits = tiny.expected_logits(prompt + ids)[len(prompt) - 1 : -1]
    top = np.sort(logits, axis=-1)
    assert (top[:, -1] - top[:, -2]).min() > MARGIN, "a rounding error could change the answer: take another seed"
    assert ids == logits.argmax(-1).tolist()
    assert len(ids) == NUM_OUTPUTS


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_greedy_ids_equal_those_of_transformers_under_pressure(tiny, folder, async_scheduling):
    engine = Engine(
        folder,
        device="cpu",
        multiprocess=False,
        async_scheduling=async_scheduling,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=14,
        num_growth_tokens=0,
    )
    outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in outputs]
    for prompt, ids in zip(PROMPTS, answers, strict=True):
        assert_greedy(tiny, prompt, ids)
    assert answers[0] == answers[1] == tiny.greedy(TWIN, NUM_OUTPUTS)
    assert outputs[1].num_cached_tokens == BLOCK_SIZE, "a prompt equal to one of the same step shares its block"
    again = [engine.generate(TWIN, PARAMS, use_tqdm=False)[0] for _ in range(2)]
    assert [output.outputs[0].token_ids for output in again] == [answers[0]] * 2
    assert again[1].num_cached_tokens == BLOCK_SIZE
    assert {metric.name for metric in engine.get_metrics()} <= HELP.keys()
    metrics = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    assert metrics["vllm:num_preemptions"] >= 3
    assert metrics["vllm:prefix_cache_hits"] >= 5 * BLOCK_SIZE
    assert metrics["jaxvllm:num_programs"] == metrics["jaxvllm:late_compiles"] <= 6


WITH_LOGPROBS = {
    "norm behind, narrow embedding": (
        "OPTConfig",
        {"ffn_dim": 58, "word_embed_proj_dim": 30, "head_dim": None, "num_key_value_heads": None}
        | {"do_layer_norm_before": False},
        {},
        1e-4,
    ),
    "8-bit cache": ("LlamaConfig", {}, {"kv_cache_dtype": "fp8"}, 0.3),
}


@pytest.mark.parametrize("name", WITH_LOGPROBS)
def test_prompt_logprobs_in_chunks_are_those_of_transformers(name, tmp_path, monkeypatch):
    """By programs that end the last layer themselves, as on a GPU."""
    for module in (causal_lm, opt):
        monkeypatch.setattr(module, "default_unroll", lambda: True)
    config, changes, options, tolerance = WITH_LOGPROBS[name]
    model = tiny_model(config, vocab_size=264, **changes)
    model.torch_model.save_pretrained(tmp_path)
    k_bytes().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    prompt = PROMPTS[3]
    with Engine(
        tmp_path, device="cpu", multiprocess=False, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=128,
        kv_cache_memory_bytes=1 << 22, **options,
    ) as engine:  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        [output] = engine.generate([prompt], params, use_tqdm=False)
    logits = model.expected_logits(prompt)
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    found = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
    np.testing.assert_allclose(found, expected[np.arange(len(prompt) - 1), prompt[1:]], atol=tolerance)
