"""The Executor: which dtype is served, and one model on two devices through the whole engine."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxvllm import Engine, SamplingParams
from jaxvllm.config import MemoryConfig
from jaxvllm.executor import compile_ahead, with_dtype
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.model_config import ModelConfig
from jaxvllm.parallel import kv_cache_sharding, make_mesh
from jaxvllm.pool_size import PoolSizer
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, explicit
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


class HungryPrograms:
    """A ModelRunner whose programs need what workspace the test says."""

    def __init__(self, workspace_bytes: dict[BucketKey, int]) -> None:
        self._workspace_bytes = workspace_bytes
        self.pools: list[int] = []
        self.programs = SimpleNamespace(compile_seconds={}, load_seconds={})

    def set_num_blocks(self, num_blocks: int) -> None:
        self.pools.append(num_blocks)
        assert len(self.pools) < 10, "it never ends"

    def program_keys(self) -> list[BucketKey]:
        return list(self._workspace_bytes)

    def warm_up(self, lowering: None) -> Iterator[BucketKey]:
        yield from self._workspace_bytes

    def workspace_bytes(self, key: BucketKey) -> int:
        return self._workspace_bytes[key]


@pytest.mark.parametrize("other_mib", [100, 1000])
@pytest.mark.parametrize("largest_mib", [100, 700, 3000])
def test_a_pool_that_one_program_has_made_smaller_stays_so_and_leaves_room_for_all(largest_mib, other_mib):
    policy, limits = explicit(256, 8192, [256], [1024, 8192]), BatchLimits(256, 8192, 16, 151_936)
    model = ModelConfig.from_hf(T_TINY | {"vocab_size": 151_936})
    spec, free_bytes = KVCacheSpec(28, 8, 128, 16, np.dtype(np.float16)), 10 << 30
    sizer = PoolSizer(MemoryConfig(), spec, limits, model, policy, free_bytes, param_bytes=2 << 30)
    needs = dict.fromkeys(policy.keys(), other_mib << 20) | {sizer.largest: largest_mib << 20}
    num_blocks, workspace_bytes = compile_ahead(HungryPrograms(needs), sizer, sizer.guess(), lambda: None, None)
    assert workspace_bytes == max(needs.values())
    assert sizer.bytes_at_work(num_blocks, workspace_bytes) <= free_bytes - (2 << 30)
