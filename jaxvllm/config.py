"""EngineConfig: what the engine core is told; and all that is read from the environment, here and nowhere else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxvllm.device_probe import has_cuda_plugin, has_nvidia_device
from scheduler.config import SchedulerConfig

Device = Literal["cpu", "gpu"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"
DEFAULT_EXECUTOR = "jaxvllm.executor_start:make_executor"
DEFAULT_STEP_TIMEOUT_S = 300.0  # as long as vLLM waits for a step


@dataclass(frozen=True)
class ModelLoadConfig:
    """Which model, and how its weights come in.

    Attributes:
      model: local folder, GGUF file, hub id, or None for the default model.
      seed: of dummy weights, in [0, 2**32).
      dtype: "auto" is float32 on a CPU and on a GPU the checkpoint's own, bfloat16 in the place of float32.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    load_format: LoadFormat = "auto"
    dtype: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class MemoryConfig:
    """How large the KV pool is. num_blocks counts the null block; None: sized by the executor.

    kv_cache_dtype is "auto", the model's dtype, or the name of another. kv_cache_bytes is the pool's size where it is
    fixed (a CPU, or kv_cache_memory_bytes); otherwise the pool takes what gpu_memory_utilization of the GPU's memory
    leaves after weights and workspace.
    """

    block_size: int = 16
    enable_prefix_caching: bool = True
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class CompileConfig:
    """When programs are compiled, and where they are kept.

    Attributes:
      ahead: all of them before the first request; otherwise each at its first use.
      strict: a compile after that is an error.
      store_folder: of programs from earlier starts; None keeps none.
      xla_flags: of the process that compiles; a program depends on them.
    """

    ahead: bool = False
    strict: bool = False
    store_folder: str | None = None
    xla_flags: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine core is told; plain data, so that it travels to the core's process.

    Attributes:
      executor: "module:function" that makes the Executor from this config.
      seed: of requests that bring none; None: the operating system's entropy.
      attention_backend: None: chosen by the device.
      tensor_parallel_size: devices that one model is spread over.
      bucket_policy: a strategy or a file, see bucket_choice; None: chosen by the device.
      max_logprobs: the most logprobs a position that a request may ask for; -1: all.
      logits_processors: custom ones, "module:attribute" each.
      thinking: the strings that open and close the model's thinking, for thinking_token_budget.
    """

    model: ModelLoadConfig = field(default_factory=ModelLoadConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    device: Device = "cpu"
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    bucket_policy: str | None = None
    compile: CompileConfig = field(default_factory=CompileConfig)
    executor: str = DEFAULT_EXECUTOR
    seed: int | None = 0
    max_logprobs: int = 20
    logits_processors: tuple[str, ...] = ()
    thinking: tuple[str, str] | None = None

    def core_environment(self) -> dict[str, str]:
        """Variables that the core's process needs before JAX starts, where the caller's environment has none.

        XLA_FLAGS alone is extended: the caller's flags stay in front.
        """
        if self.device == "cpu":
            return _missing_in_environment({"JAX_PLATFORMS": "cpu"}) | self._host_devices_environment()
        wanted = {}
        if (folder := _cache_folder()) is not None:
            # The many small programs of a start (drawing weights, filling the pool) are worth keeping too.
            wanted["JAX_COMPILATION_CACHE_DIR"] = str(folder / "xla")
            wanted["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
            wanted["XLA_CLIENT_MEM_FRACTION"] = f"{self.memory.gpu_memory_utilization:.4f}"
        return _missing_in_environment(wanted)

    def _host_devices_environment(self) -> dict[str, str]:
        """One CPU as tensor_parallel_size devices, unless the caller's flags say how many there are."""
        flags = xla_flags()
        if self.tensor_parallel_size == 1 or HOST_DEVICES_FLAG in flags:
            return {}
        return {"XLA_FLAGS": f"{flags} {HOST_DEVICES_FLAG}={self.tensor_parallel_size}".strip()}

    def core_process_environment(self, package_root: str | None) -> dict[str, str]:
        """The whole environment of the core's process; package_root is put in front of its import path."""
        return os.environ | self.core_environment() | _import_path(package_root)

    @contextmanager
    def applied_core_environment(self) -> Iterator[None]:
        """For an engine in this process: the variables are set here while it starts, and then are what they were.

        Has no effect if a JAX backend runs already.
        """
        wanted = self.core_environment()
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def lowering_environment(package_root: str | None) -> dict[str, str]:
    """The whole environment of a process that lowers programs: it must touch no GPU, nor have threads as it forks."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"} | _import_path(package_root)


def _import_path(package_root: str | None) -> dict[str, str]:
    if package_root is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))}


def _missing_in_environment(wanted: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _cache_folder() -> Path | None:
    """Where this user's compiled programs are kept for later starts; None if JAXVLLM_DISABLE_COMPILE_CACHE is 1."""
    if _is_set("JAXVLLM_DISABLE_COMPILE_CACHE", default="0"):
        return None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxvllm"


def _is_set(name: str, default: str) -> bool:
    value = os.environ.get(name, default)
    if value not in ("0", "1"):
        raise ValueError(f"environment variable {name}={value!r} must be 0 or 1.")
    return value == "1"


def default_program_folder() -> str | None:
    """Where programs for a GPU are kept unless the caller names a folder; None: nowhere."""
    folder = _cache_folder()
    return None if folder is None else str(folder / "programs")


def multiprocess_from_environment() -> bool:
    """Whether the core gets a process of its own where the caller does not say: unless JAXVLLM_MULTIPROCESS is 0."""
    return _is_set("JAXVLLM_MULTIPROCESS", default="1")


def xla_flags() -> str:
    """XLA's flags of this process."""
    return os.environ.get("XLA_FLAGS", "")


def log_level() -> str:
    """How much the core's process logs: JAXVLLM_LOG_LEVEL, else INFO."""
    level = os.environ.get("JAXVLLM_LOG_LEVEL", "INFO").upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"environment variable JAXVLLM_LOG_LEVEL={level!r} must be one of {', '.join(LOG_LEVELS)}.")
    return level


def api_key_from_environment() -> str | None:
    """The server's key where the command line gives none: JAXVLLM_API_KEY, or VLLM_API_KEY as vLLM reads it."""
    return os.environ.get("JAXVLLM_API_KEY") or os.environ.get("VLLM_API_KEY")


def find_device() -> Device:
    """The device that JAX in the core's process will find: a GPU if there is one that JAX can use."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and platforms.split(",")[0] not in ("cuda", "gpu"):
        return "cpu"
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return "gpu" if has_cuda_plugin() and has_nvidia_device() and not is_hidden else "cpu"


def first_gpu_index() -> int:
    """The number that the driver gives the first GPU that this process may see."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(first) if first.isdigit() else 0
