"""Every argument of vLLM's LLM is applied or refused by name."""

import os

import numpy as np
import pytest

from jaxvllm import engine_args
from jaxvllm.device_probe import GpuInfo
from jaxvllm.engine_args import EngineArgs, default_limits
from jaxvllm.vllm_args import NOT_BUILT
from pallas_kernels import mosaic_attention


def test_unknown_argument_is_named_with_the_nearest_known_one():
    with pytest.raises(TypeError, match=r"'max_num_seq'.*'max_num_seqs'"):
        EngineArgs(max_num_seq=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "awq"),
        ("pipeline_parallel_size", 2),
        ("speculative_config", {"method": "ngram"}),
        ("enable_lora", True),
        ("enforce_eager", True),
        ("kv_cache_dtype_skip_layers", ["0"]),
        ("trust_remote_code", True),
    ],
)
def test_argument_that_is_not_built_is_refused_by_name_and_taken_with_its_default(name, value):
    with pytest.raises(NotImplementedError, match=name):
        EngineArgs(**{name: value})
    EngineArgs(**{name: NOT_BUILT[name]})


def test_every_block_size_has_kernels():
    assert engine_args.BLOCK_SIZES == mosaic_attention.BLOCK_SIZES


def test_no_argument_is_both_applied_and_refused():
    assert not set(NOT_BUILT) & set(EngineArgs.__dataclass_fields__)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"block_size": 7}, "block_size=7 must be one of 16, 32, 64, 128"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"max_num_seqs": "3"}, "max_num_seqs='3' must be of type"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be of type"),
        ({"gpu_memory_utilization": 1.5}, r"must be in \(0, 1\]"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' must be one of 'auto', 'fp8', 'fp8_e4m3'"),
        ({"load_format": "pt"}, "load_format='pt' must be one of"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo'"),
        ({"num_gpu_blocks_override": 1}, "null block"),
        ({"max_model_len": 1}, "max_model_len=1 must be at least 2"),
        ({"seed": -1}, "seed=-1 must be in"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be in"),
    ],
)
def test_bad_value_is_refused_with_value_and_range(kwargs, message):
    with pytest.raises(ValueError, match=message):
        EngineArgs(**kwargs)


def test_numbers_of_numpy_become_pythons_own_which_a_message_to_the_core_can_carry():
    args = EngineArgs(max_model_len=np.int64(64), gpu_memory_utilization=np.float64(0.5), enforce_eager=False)
    assert (type(args.max_model_len), type(args.gpu_memory_utilization)) == (int, float)


def test_limits_depend_on_the_device_as_in_vllm():
    assert default_limits("cpu", None) == (512, 16)
    assert default_limits("gpu", GpuInfo("NVIDIA H200", 141 << 30)) == (16384, 1024)
    assert default_limits("gpu", GpuInfo("NVIDIA A100-SXM4-80GB", 80 << 30)) == (8192, 256)
    assert default_limits("gpu", GpuInfo("NVIDIA H200", 141 << 30), is_server=True) == (8192, 1024)
    assert default_limits("gpu", GpuInfo("NVIDIA A100-SXM4-80GB", 80 << 30), is_server=True) == (2048, 256)


def test_one_given_limit_bends_the_other_default():
    few_tokens = EngineArgs(device="cpu", max_num_batched_tokens=5).create_engine_config(64).scheduler
    many_seqs = EngineArgs(device="cpu", max_num_seqs=700).create_engine_config(64).scheduler
    whole_prompts = EngineArgs(device="cpu", enable_chunked_prefill=False).create_engine_config(900).scheduler
    assert (few_tokens.max_num_batched_tokens, few_tokens.max_num_seqs) == (5, 5)
    assert (many_seqs.max_num_batched_tokens, many_seqs.max_num_seqs) == (700, 700)
    assert whole_prompts.max_num_batched_tokens == 900
    with pytest.raises(ValueError, match="max_num_batched_tokens=3 must be at least max_num_seqs=4"):
        EngineArgs(device="cpu", max_num_batched_tokens=3, max_num_seqs=4).create_engine_config(64)


def test_max_model_len_beyond_the_model_is_refused():
    assert EngineArgs(device="cpu").create_engine_config(64).scheduler.max_model_len == 64
    with pytest.raises(ValueError, match=r"max_model_len=65 must not exceed .*64"):
        EngineArgs(device="cpu", max_model_len=65).create_engine_config(64)


def test_cpu_computes_in_float32_with_a_pool_of_a_gibibyte():
    config = EngineArgs(device="cpu").create_engine_config(64)
    assert (config.model.dtype, config.memory.kv_cache_bytes) == ("float32", 1 << 30)
    gpu = EngineArgs(device="gpu").create_engine_config(64)
    assert (gpu.model.dtype, gpu.memory.kv_cache_bytes) == ("auto", None)


@pytest.fixture
def bare_environment(monkeypatch):
    """Without the variables that core_environment may set; the user's cache is in /cache."""
    names = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION")
    names += ("XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    for name in (*names, "JAXVLLM_DISABLE_COMPILE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    return monkeypatch


def test_core_environment_keeps_what_the_caller_has_set(bare_environment):
    assert EngineArgs(device="cpu").create_engine_config(64).core_environment() == {"JAX_PLATFORMS": "cpu"}
    gpu = EngineArgs(device="gpu", gpu_memory_utilization=0.5).create_engine_config(64)
    cache = {"JAX_COMPILATION_CACHE_DIR": "/cache/jaxvllm/xla", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    assert gpu.core_environment() == {"XLA_CLIENT_MEM_FRACTION": "0.5000"} | cache
    bare_environment.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    assert gpu.core_environment() == cache
    bare_environment.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert "JAX_COMPILATION_CACHE_DIR" not in gpu.core_environment()
    bare_environment.setenv("JAXVLLM_DISABLE_COMPILE_CACHE", "1")
    assert gpu.core_environment() == {}


def test_an_engine_in_this_process_leaves_the_environment_as_it_was(bare_environment):
    bare_environment.setenv("XLA_FLAGS", "--xla_dump_to=/tmp")
    before = dict(os.environ)
    config = EngineArgs(device="cpu", tensor_parallel_size=2).create_engine_config(64)
    with pytest.raises(RuntimeError, match="its start fails"), config.applied_core_environment():
        assert os.environ["JAX_PLATFORMS"] == "cpu" and "device_count=2" in os.environ["XLA_FLAGS"]
        raise RuntimeError("its start fails")
    assert dict(os.environ) == before


def test_a_gpu_compiles_ahead_and_keeps_programs_and_a_cpu_does_neither_unless_told(bare_environment):
    def compiling(**args):
        return EngineArgs(**args).create_engine_config(64).compile

    gpu = compiling(device="gpu")
    assert (gpu.ahead, gpu.strict, gpu.store_folder) == (True, False, "/cache/jaxvllm/programs")
    assert not compiling(device="gpu", compile_ahead=False).ahead
    assert compiling(device="gpu", program_cache_dir="/here").store_folder == "/here"
    cpu = compiling(device="cpu")
    assert (cpu.ahead, cpu.strict, cpu.store_folder) == (False, False, None)
    assert compiling(device="cpu", strict_compile=True).ahead
    assert compiling(device="cpu", program_cache_dir="/here").store_folder == "/here"
    with pytest.raises(ValueError, match="strict_compile=True needs compile_ahead=True"):
        compiling(strict_compile=True, compile_ahead=False)
    bare_environment.setenv("JAXVLLM_DISABLE_COMPILE_CACHE", "1")
    assert compiling(device="gpu").store_folder is None
    bare_environment.setenv("JAXVLLM_DISABLE_COMPILE_CACHE", "yes")
    with pytest.raises(ValueError, match="JAXVLLM_DISABLE_COMPILE_CACHE='yes' must be 0 or 1"):
        compiling(device="gpu")


def test_a_cpu_is_as_many_devices_as_the_model_is_split_over(bare_environment):
    config = EngineArgs(device="cpu", tensor_parallel_size=2).create_engine_config(64)
    assert config.core_environment()["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    bare_environment.setenv("XLA_FLAGS", "--xla_dump_to=x")
    environment = config.core_process_environment(None)
    assert environment["XLA_FLAGS"] == "--xla_dump_to=x --xla_force_host_platform_device_count=2"
    bare_environment.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert "XLA_FLAGS" not in config.core_environment()


def test_more_than_one_gpu_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="tensor_parallel_size=2 is not supported on GPUs"):
        EngineArgs(device="gpu", tensor_parallel_size=2).create_engine_config(64)
    with pytest.raises(ValueError, match="tensor_parallel_size=0 must be at least 1"):
        EngineArgs(tensor_parallel_size=0)


def test_multiprocess_follows_the_argument_then_the_environment(monkeypatch):
    monkeypatch.setenv("JAXVLLM_MULTIPROCESS", "0")
    assert not EngineArgs().use_multiprocess
    assert EngineArgs(multiprocess=True).use_multiprocess
    monkeypatch.setenv("JAXVLLM_MULTIPROCESS", "maybe")
    with pytest.raises(ValueError, match="JAXVLLM_MULTIPROCESS='maybe'"):
        assert EngineArgs().use_multiprocess
