"""EngineArgs (what the caller says, with vLLM's names) and EngineConfig (what was made of it).

The only module that reads the environment.
"""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jaxvllm.device_probe import GpuInfo, has_cuda_plugin, has_nvidia_device, probe_gpu
from jaxvllm.vllm_args import NOT_BUILT, reject_not_built, unknown_argument
from scheduler.config import SchedulerConfig

Device = Literal["cpu", "gpu"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
BLOCK_SIZES = (16, 32, 64, 128)
CPU_KV_CACHE_BYTES = 1 << 30
LARGE_GPU_BYTES = 70 << 30
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"
DEFAULT_EXECUTOR = "jaxvllm.executor_start:make_executor"
_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
_CACHE_DTYPES = {"auto": "auto", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


@dataclass(frozen=True)
class ModelLoadConfig:
    """Which model, and how its weights come in.

    Attributes:
      model: local folder, GGUF file, hub id, or None for the default model.
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
        if _keeps_programs():
            # The many small programs of a start (drawing weights, filling the pool) are worth keeping too.
            wanted["JAX_COMPILATION_CACHE_DIR"] = str(_cache_folder() / "xla")
            wanted["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
            wanted["XLA_CLIENT_MEM_FRACTION"] = f"{self.memory.gpu_memory_utilization:.4f}"
        return _missing_in_environment(wanted)

    def _host_devices_environment(self) -> dict[str, str]:
        """One CPU as tensor_parallel_size devices, unless the caller's flags say how many there are."""
        flags = os.environ.get("XLA_FLAGS", "")
        if self.tensor_parallel_size == 1 or HOST_DEVICES_FLAG in flags:
            return {}
        return {"XLA_FLAGS": f"{flags} {HOST_DEVICES_FLAG}={self.tensor_parallel_size}".strip()}

    def core_process_environment(self, package_root: str | None) -> dict[str, str]:
        """The whole environment of the core's process; package_root is put in front of its import path."""
        return os.environ | self.core_environment() | _import_path(package_root)

    def apply_core_environment(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """For an engine in this process: set the variables here. Has no effect if a JAX backend runs already."""
        environ.update(self.core_environment())


@dataclass(frozen=True, init=False)
class EngineArgs:
    """The engine's arguments with vLLM's names and defaults.

    Every argument that vLLM's LLM and EngineArgs take is applied (the fields below) or refused by name (vllm_args).
    None means: chosen by the device or by the model.

    Raises:
      NotImplementedError: an argument of vLLM that is not built here.
      TypeError: an argument that neither knows.
      ValueError: a value of the wrong type or out of range.
    """

    model: str | None = None
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    seed: int | None = 0
    max_model_len: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool | None = None
    scheduler_reserve_full_isl: bool = True
    num_growth_tokens: int = 64
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    chat_template: str | None = None
    max_logprobs: int = 20
    logits_processors: list[str] | None = None
    reasoning_config: dict[str, Any] | None = None
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    bucket_policy: str | None = None
    compile_ahead: bool | None = None
    strict_compile: bool = False
    program_cache_dir: str | None = None
    disable_log_stats: bool = True
    device: str = "auto"
    multiprocess: bool | None = None
    executor: str = DEFAULT_EXECUTOR

    def __init__(self, model: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        known = {f.name: f for f in fields(self)}
        values: dict[str, Any] = {"model": model}
        for name, value in kwargs.items():
            if name in known:
                values[name] = value
            elif name in NOT_BUILT:
                reject_not_built(name, value)
            else:
                raise TypeError(unknown_argument(name, known))
        for name in known:
            value = values.get(name, getattr(type(self), name))
            object.__setattr__(self, name, os.fspath(value) if isinstance(value, os.PathLike) else value)
        self._check()

    def _check(self) -> None:
        _check_types(self)
        choices = {
            "tokenizer_mode": ("auto", "hf"),
            "load_format": get_args(LoadFormat),
            "dtype": tuple(_DTYPES),
            "kv_cache_dtype": tuple(_CACHE_DTYPES),
            "scheduling_policy": ("fcfs", "priority"),
            "device": ("auto", "cpu", "gpu"),
            "block_size": (None, *BLOCK_SIZES),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {_words(allowed)}.")
        for name in (
            "max_model_len",
            "kv_cache_memory_bytes",
            "max_num_batched_tokens",
            "max_num_seqs",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1; leave it out for the default.")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ValueError(
                f"num_gpu_blocks_override={self.num_gpu_blocks_override} must be at least 2: block 0 is the null block."
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1].")
        if self.strict_compile and self.compile_ahead is False:
            raise ValueError("strict_compile=True needs compile_ahead=True: without it every first use compiles.")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs={self.max_logprobs} must be at least 0, or -1 for no limit.")
        if any(not isinstance(spec, str) for spec in self.logits_processors or ()):
            raise ValueError(
                f"logits_processors={self.logits_processors!r} must hold strings 'module:attribute', which the core's "
                "process imports."
            )
        if self.skip_tokenizer_init and self.chat_template is not None:
            raise ValueError("chat_template needs a tokenizer: set skip_tokenizer_init=False.")

    @property
    def use_multiprocess(self) -> bool:
        """Whether the core gets a process of its own: the argument, else JAXVLLM_MULTIPROCESS, else yes."""
        if self.multiprocess is not None:
            return self.multiprocess
        value = os.environ.get("JAXVLLM_MULTIPROCESS", "1")
        if value not in ("0", "1"):
            raise ValueError(f"environment variable JAXVLLM_MULTIPROCESS={value!r} must be 0 or 1.")
        return value == "1"

    def create_engine_config(self, max_position_embeddings: int, *, is_server: bool = False) -> EngineConfig:
        """Fill in what depends on the device and on the model.

        Args:
          max_position_embeddings: the longest context the model knows.
          is_server: limits that the caller leaves open are vLLM's for a server.

        Raises:
          ValueError: max_model_len exceeds it, or limits contradict each other.
          NotImplementedError: tensor_parallel_size above 1 on GPUs.
        """
        device = find_device() if self.device == "auto" else self.device
        if device == "gpu" and self.tensor_parallel_size > 1:
            raise NotImplementedError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not supported on GPUs yet: leave it out "
                "(device='cpu' can split a model over devices of the host)."
            )
        return EngineConfig(
            model=ModelLoadConfig(
                model=self.model,
                tokenizer=self.tokenizer,
                revision=self.revision,
                tokenizer_revision=self.tokenizer_revision,
                download_dir=self.download_dir,
                load_format=self.load_format,  # type: ignore[arg-type]  # checked against LoadFormat
                dtype="float32" if device == "cpu" and self.dtype == "auto" else _DTYPES[self.dtype],
                seed=self.seed or 0,
            ),
            scheduler=self._scheduler_config(device, max_position_embeddings, is_server),
            memory=self._memory_config(device),
            device=device,  # type: ignore[arg-type]  # checked against Device
            attention_backend=self.attention_backend,
            tensor_parallel_size=self.tensor_parallel_size,
            bucket_policy=self.bucket_policy,
            compile=self._compile_config(device),
            executor=self.executor,
            seed=self.seed,
            max_logprobs=self.max_logprobs,
            logits_processors=tuple(self.logits_processors or ()),
            thinking=_thinking(self.reasoning_config),
        )

    def _scheduler_config(self, device: str, max_position_embeddings: int, is_server: bool) -> SchedulerConfig:
        max_model_len = self.max_model_len or max_position_embeddings
        if max_model_len > max_position_embeddings:
            raise ValueError(
                f"max_model_len={max_model_len} must not exceed the model's max_position_embeddings="
                f"{max_position_embeddings}: lower it or leave it out."
            )
        chunked = self.enable_chunked_prefill is not False
        gpu = probe_gpu(_first_gpu_index()) if device == "gpu" else None
        num_tokens, num_seqs = default_limits(device, gpu, is_server=is_server)
        if not chunked:
            num_tokens = max(num_tokens, max_model_len)
        # A limit that was given bends the default of the other; two given limits may contradict and are refused.
        max_num_batched_tokens = self.max_num_batched_tokens or max(num_tokens, self.max_num_seqs or 0)
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs or min(num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=self.scheduling_policy,  # type: ignore[arg-type]  # checked by SchedulerConfig
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            reserve_full_isl=self.scheduler_reserve_full_isl,
            num_growth_tokens=self.num_growth_tokens,
            async_scheduling=self.async_scheduling is not False,
        )

    def _compile_config(self, device: str) -> CompileConfig:
        folder = self.program_cache_dir
        if folder is None and device == "gpu" and _keeps_programs():
            folder = str(_cache_folder() / "programs")
        return CompileConfig(
            ahead=device == "gpu" or self.strict_compile if self.compile_ahead is None else self.compile_ahead,
            strict=self.strict_compile,
            store_folder=folder,
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )

    def _memory_config(self, device: str) -> MemoryConfig:
        fixed = self.kv_cache_memory_bytes
        return MemoryConfig(
            block_size=self.block_size or BLOCK_SIZES[0],
            enable_prefix_caching=self.enable_prefix_caching is not False,
            num_blocks=self.num_gpu_blocks_override,
            kv_cache_bytes=CPU_KV_CACHE_BYTES if fixed is None and device == "cpu" else fixed,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_dtype=_CACHE_DTYPES[self.kv_cache_dtype],
        )


_REASONING_KEYS = ("reasoning_start_str", "reasoning_end_str")


def _thinking(reasoning_config: dict[str, Any] | None) -> tuple[str, str] | None:
    """The strings around the model's thinking."""
    if not reasoning_config:
        return None
    values = [reasoning_config.get(key) for key in _REASONING_KEYS]
    if set(reasoning_config) != set(_REASONING_KEYS) or not all(isinstance(v, str) and v for v in values):
        raise ValueError(f"reasoning_config={reasoning_config!r} must hold the strings {_words(_REASONING_KEYS)}.")
    return (values[0], values[1])  # type: ignore[return-value]  # checked to be strings


def lowering_environment(package_root: str | None) -> dict[str, str]:
    """The whole environment of a process that lowers programs: it must touch no GPU, nor have threads as it forks."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"} | _import_path(package_root)


def _import_path(package_root: str | None) -> dict[str, str]:
    if package_root is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))}


def _missing_in_environment(wanted: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxvllm"


def _keeps_programs() -> bool:
    """Whether compiled programs are kept for later starts: unless JAXVLLM_DISABLE_COMPILE_CACHE is 1."""
    value = os.environ.get("JAXVLLM_DISABLE_COMPILE_CACHE", "0")
    if value not in ("0", "1"):
        raise ValueError(f"environment variable JAXVLLM_DISABLE_COMPILE_CACHE={value!r} must be 0 or 1.")
    return value == "0"


def log_level() -> str:
    """How much the core's process logs: JAXVLLM_LOG_LEVEL, else INFO."""
    level = os.environ.get("JAXVLLM_LOG_LEVEL", "INFO").upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"environment variable JAXVLLM_LOG_LEVEL={level!r} must be one of {_words(LOG_LEVELS)}.")
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


def default_limits(device: str, gpu: GpuInfo | None, *, is_server: bool = False) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) where the caller gives none; on a GPU vLLM's, offline or for a server."""
    if device == "cpu" or gpu is None:
        return 512, 16
    is_large = gpu.memory_bytes >= LARGE_GPU_BYTES and "A100" not in gpu.name.upper()
    if is_server:
        return (8192, 1024) if is_large else (2048, 256)
    return (16384, 1024) if is_large else (8192, 256)


def _first_gpu_index() -> int:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(first) if first.isdigit() else 0


def _check_types(args: EngineArgs) -> None:
    for f in fields(args):
        value = getattr(args, f.name)
        allowed: Any = tuple(get_origin(kind) or kind for kind in get_args(f.type) or (f.type,))
        if float in allowed:
            allowed += (int,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"{f.name}={value!r} must be of type {getattr(f.type, '__name__', f.type)}.")


def _words(allowed: tuple[Any, ...]) -> str:
    return ", ".join(repr(a) for a in allowed if a is not None)
