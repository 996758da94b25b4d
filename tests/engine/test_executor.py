"""The Executor: which dtype is served, and one model on two devices through the whole engine."""

import logging

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxvllm import Engine, SamplingParams
from jaxvllm.executor import with_dtype
from jaxvllm.model_config import ModelConfig
from jaxvllm.parallel import kv_cache_sharding, make_mesh
from tests.engine.dense import dense_logits, random_tensors, write_folder
from tests.tiny_config import T_TINY


@pytest.mark.parametrize(
    ("stored", "requested", "platform", "served"),
    [
        ("float32", "auto", "gpu", "bfloat16"),
        (None, "auto", "gpu", "bfloat16"),
        ("float16", "auto", "gpu", "float16"),
        ("bfloat16", "auto", "gpu", "bfloat16"),
        ("float32", "float32", "gpu", "float32"),
        ("bfloat16", "float32", "cpu", "float32"),
    ],
)
def test_a_gpu_serves_float32_checkpoints_in_bfloat16_unless_told_otherwise(
    stored, requested, platform, served, caplog
):
    config = ModelConfig.from_hf({name: value for name, value in T_TINY.items() if name != "torch_dtype"})
    if stored is not None:
        config = ModelConfig.from_hf(T_TINY | {"torch_dtype": stored})
    with caplog.at_level(logging.INFO):
        assert with_dtype(config, requested, platform).dtype == served
    assert (f"Serving in {served}" in caplog.text) == (served != config.dtype)


def greedy_ids(config: dict, tensors, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(dense_logits(config, tensors, ids)[-1])))
    return ids[len(prompt) :]


def test_d07_a_qwen2_with_biases_on_two_devices_gives_the_ids_of_a_dense_reference(tmp_path):
    config = T_TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    tensors = random_tensors(config, bias_spread=0.3)
    prompts = [np.random.default_rng(i).integers(0, 256, n).tolist() for i, n in enumerate((29, 3))]
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    with Engine(write_folder(tmp_path, config, tensors), device="cpu", tensor_parallel_size=2, **sizes) as engine:
        params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_ids(config, tensors, prompt, 7)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size=3 needs that many devices, but JAX has 1"):
        make_mesh(jax.devices()[:1], 3)


def test_the_pool_is_split_over_kv_heads_where_they_divide():
    mesh = jax.sharding.AbstractMesh((2,), ("tp",))
    assert kv_cache_sharding(mesh, 4).spec == PartitionSpec(None, None, None, "tp")
    assert kv_cache_sharding(mesh, 3).spec == PartitionSpec()
