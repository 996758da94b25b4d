"""The Executor of one device: finds and loads the model, sizes the KV pool, plans steps and runs them."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxvllm.attention_backend import choose_backend
from jaxvllm.config import EngineConfig
from jaxvllm.kv_cache import KVCacheSpec, free_device_bytes, num_blocks_that_fit
from jaxvllm.layers.parameter import ParamSpec, bind, param_specs, unstack_small
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_runner import ModelRunner, RunnerConfig, StepHandle
from jaxvllm.model_source import ModelSource, resolve
from jaxvllm.models.registry import MODELS, get_model_class
from jaxvllm.weights.dummy import dummy_params
from jaxvllm.weights.load import load_params
from scheduler.batch import BatchLimits
from scheduler.buckets import powers_of_two
from scheduler.outputs import SchedulerOutput
from scheduler.plan import Planner

logger = logging.getLogger(__name__)

MIN_GPU_DECODE_SIZE = 8  # see powers_of_two


class DeviceExecutor:
    """Runs one model on one device. `initialize` does the slow part."""

    def __init__(self, config: EngineConfig) -> None:
        """Remember the config; nothing is loaded yet."""
        self._config = config
        self._planner: Planner | None = None
        self._runner: ModelRunner | None = None

    def initialize(self) -> int:
        """Load the model, allocate the KV pool, compile the programs of a GPU. Returns num_blocks.

        Raises:
          ValueError: the model cannot be served, or a request of max_model_len does not fit the pool.
          RuntimeError: JAX finds no device of the configured kind.
        """
        config = self._config
        device = _device(config)
        source = resolve(
            config.model.model,
            revision=config.model.revision,
            download_dir=config.model.download_dir,
            supported=MODELS,
        )
        model_config = _with_dtype(source.config, config.model.dtype)
        scheduler = config.scheduler
        limits = BatchLimits(scheduler.max_num_seqs, scheduler.max_model_len, config.memory.block_size)
        policy = powers_of_two(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            min_decode_size=MIN_GPU_DECODE_SIZE if device.platform == "gpu" else 1,
        )
        backend = choose_backend(config.attention_backend, device, model_config, limits)
        spec = KVCacheSpec(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.memory.block_size,
            dtype=jnp.dtype(model_config.dtype),
        )
        model = get_model_class(model_config.architecture)(model_config)
        specs = param_specs(model)
        params = _load(config, source, specs)
        runner = ModelRunner(
            lambda traced: bind(model, traced),  # pyright: ignore[reportArgumentType]
            unstack_small(params, specs) if device.platform == "gpu" else params,
            RunnerConfig(limits, policy, spec, model_config.num_heads, backend),
        )
        num_blocks = _num_blocks(config, runner, device)
        runner.initialize_kv_cache(num_blocks)
        if device.platform == "gpu":
            keys = runner.program_keys()
            list(tqdm(runner.warm_up(), desc="Compiling programs", total=len(keys), unit="program"))
        self._runner, self._planner = runner, Planner(limits, policy, config.seed)
        return num_blocks

    def execute(self, scheduler_output: SchedulerOutput) -> StepHandle | None:
        """Plan and dispatch a step without waiting for it; None if it holds no tokens."""
        assert self._planner is not None and self._runner is not None, "initialize comes first"
        plan = self._planner.build(scheduler_output)
        return None if plan is None else self._runner.execute(plan)

    def metrics(self) -> dict[str, float]:
        """Programs compiled ahead and while serving."""
        assert self._runner is not None, "initialize comes first"
        programs = self._runner.programs
        return {
            "num_programs": float(len(programs.programs())),
            "num_late_compiles": float(programs.num_late_compiles),
            "compile_seconds": sum(programs.compile_seconds.values()),
        }

    def shutdown(self) -> None:
        """Let go of weights, pool and programs."""
        self._runner = self._planner = None


def make_executor(config: EngineConfig) -> DeviceExecutor:
    """The executor that an engine uses unless it is told otherwise."""
    return DeviceExecutor(config)


def _device(config: EngineConfig) -> jax.Device:
    device = jax.devices()[0]
    if device.platform != config.device:
        raise RuntimeError(
            f"device={config.device!r} was asked for, but JAX runs on {device.platform!r}: install the package with "
            "the extra cuda12 or cuda13 for a GPU, or set device='cpu'."
        )
    return device


def _with_dtype(model_config: ModelConfig, dtype: str) -> ModelConfig:
    return model_config if dtype == "auto" else replace(model_config, dtype=dtype)


def _load(config: EngineConfig, source: ModelSource, specs: dict[str, ParamSpec]) -> dict[str, jax.Array]:
    if config.model.load_format == "dummy":
        return dummy_params(specs, seed=config.model.seed)
    return load_params(specs, source.open_checkpoint())


def _num_blocks(config: EngineConfig, runner: ModelRunner, device: jax.Device) -> int:
    """What was asked for, or what fits: into the fixed size, or into what weights and workspace leave."""
    memory = config.memory
    if memory.num_blocks is not None:
        return memory.num_blocks
    spec, limits = runner.config.kv_cache, runner.config.limits
    if memory.kv_cache_bytes is not None:
        return num_blocks_that_fit(spec, limits, memory.kv_cache_bytes)
    free = free_device_bytes(device)
    if free is None:
        raise RuntimeError(f"{device} does not say how much memory is free: set kv_cache_memory_bytes.")
    return num_blocks_that_fit(spec, limits, free, runner.workspace_bytes())
