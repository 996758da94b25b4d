"""EngineArgs: what the caller says, with vLLM's names; checked, and made into an EngineConfig."""

import os
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin

from jaxvllm.config import (
    DEFAULT_EXECUTOR,
    CompileConfig,
    EngineConfig,
    LoadFormat,
    MemoryConfig,
    ModelLoadConfig,
    default_program_folder,
    find_device,
    first_gpu_index,
    multiprocess_from_environment,
    xla_flags,
)
from jaxvllm.device_probe import GpuInfo, probe_gpu
from jaxvllm.vllm_args import NOT_BUILT, reject_not_built, unknown_argument
from scheduler.config import SchedulerConfig

BLOCK_SIZES = (16, 32, 64, 128)
CPU_KV_CACHE_BYTES = 1 << 30
MAX_SEED = 2**64 - 1
LARGE_GPU_BYTES = 70 << 30
_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
_CACHE_DTYPES = {"auto": "auto", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


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
            object.__setattr__(self, name, _plain(value))
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
        if self.max_model_len == 1:
            raise ValueError("max_model_len=1 must be at least 2: one token of a prompt and one of its answer.")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} must be in [0, {MAX_SEED}], or None.")
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
        return multiprocess_from_environment() if self.multiprocess is None else self.multiprocess

    def create_engine_config(self, max_context: int, *, is_server: bool = False) -> EngineConfig:
        """Fill in what depends on the device and on the model.

        Args:
          max_context: the longest context the model knows.
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
                seed=(self.seed or 0) % 2**32,
            ),
            scheduler=self._scheduler_config(device, max_context, is_server),
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

    def _scheduler_config(self, device: str, max_context: int, is_server: bool) -> SchedulerConfig:
        max_model_len = self.max_model_len or max_context
        if max_model_len > max_context:
            raise ValueError(
                f"max_model_len={max_model_len} must not exceed {max_context}, the context that the model's config "
                "states (max_position_embeddings, or what rope scaling makes of it): lower it or leave it out."
            )
        chunked = self.enable_chunked_prefill is not False
        gpu = probe_gpu(first_gpu_index()) if device == "gpu" else None
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
        if folder is None and device == "gpu":
            folder = default_program_folder()
        return CompileConfig(
            ahead=device == "gpu" or self.strict_compile if self.compile_ahead is None else self.compile_ahead,
            strict=self.strict_compile,
            store_folder=folder,
            xla_flags=xla_flags(),
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


def default_limits(device: str, gpu: GpuInfo | None, *, is_server: bool = False) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) where the caller gives none; on a GPU vLLM's, offline or for a server."""
    if device == "cpu" or gpu is None:
        return 512, 16
    is_large = gpu.memory_bytes >= LARGE_GPU_BYTES and "A100" not in gpu.name.upper()
    if is_server:
        return (8192, 1024) if is_large else (2048, 256)
    return (16384, 1024) if is_large else (8192, 256)


def _plain(value: Any) -> Any:
    """Python's own number for one of NumPy's, a string for a path: what a message to the core can carry."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if getattr(value, "ndim", None) == 0 else value


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
