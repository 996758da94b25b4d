"""The Executor: finds and loads the model, sizes the KV pool, plans steps and runs them."""

import logging
from dataclasses import replace

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from jaxvllm.attention_backend import choose_backend
from jaxvllm.bucket_stats import BucketStats
from jaxvllm.config import EngineConfig
from jaxvllm.kv_cache import GIB, KVCacheSpec, free_device_bytes, num_blocks_that_fit
from jaxvllm.layers.parameter import ParamSpec, Weight, bind, param_specs, unstack_small
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_runner import ModelRunner, RunnerConfig, StepHandle
from jaxvllm.model_source import ModelSource, resolve
from jaxvllm.models.registry import MODELS, get_model_class
from jaxvllm.parallel import make_mesh
from jaxvllm.weights.dummy import dummy_params
from jaxvllm.weights.load import load_params
from scheduler.batch import BatchLimits
from scheduler.buckets import powers_of_two
from scheduler.outputs import SchedulerOutput
from scheduler.plan import Planner

logger = logging.getLogger(__name__)

# See powers_of_two.
GPU_MIN_SIZES = {"min_decode_size": 8, "min_mixed_size": 256}
ALLOCATOR_SLACK_BYTES = 512 << 20  # what fragmentation and small buffers may take of the device's memory pool


class DeviceExecutor:
    """Runs one model on one device, or split over some. `initialize` does the slow part."""

    def __init__(self, config: EngineConfig) -> None:
        """Remember the config; nothing is loaded yet."""
        self._config = config
        self._planner: Planner | None = None
        self._runner: ModelRunner | None = None
        self._buckets = BucketStats()

    def initialize(self) -> int:
        """Load the model, allocate the KV pool, compile the programs of a GPU. Returns num_blocks.

        Raises:
          ValueError: the model cannot be served, or a request of max_model_len does not fit the pool.
          RuntimeError: JAX finds no device of the configured kind.
        """
        config = self._config
        mesh = _mesh(config)
        device = mesh.devices.flat[0]
        source = resolve(
            config.model.model,
            revision=config.model.revision,
            download_dir=config.model.download_dir,
            supported=MODELS,
        )
        model_config = with_dtype(source.config, config.model.dtype, device.platform)
        scheduler = config.scheduler
        limits = BatchLimits(
            scheduler.max_num_seqs, scheduler.max_model_len, config.memory.block_size, model_config.vocab_size
        )
        sizes = GPU_MIN_SIZES if device.platform == "gpu" else {}
        policy = powers_of_two(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, **sizes)
        backend = choose_backend(config.attention_backend, device, model_config, limits)
        model = get_model_class(model_config.architecture)(model_config)
        runner = ModelRunner(
            lambda traced: bind(model, traced),  # pyright: ignore[reportArgumentType]
            _load(config, source, param_specs(model), mesh),
            RunnerConfig(
                limits,
                policy,
                KVCacheSpec.of_model(model_config, limits.block_size),
                model_config.num_heads,
                backend,
                mesh,
            ),
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
        if plan is None:
            return None
        self._buckets.count(plan.key, plan.num_tokens, plan.num_reqs)
        return self._runner.execute(plan)

    def metrics(self) -> dict[str, float]:
        """Programs compiled ahead and while serving; steps, tokens and pads by bucket."""
        assert self._runner is not None, "initialize comes first"
        programs = self._runner.programs
        return {
            "num_programs": float(len(programs.programs())),
            "late_compiles_total": float(programs.num_late_compiles),
            "compile_seconds_total": sum(programs.compile_seconds.values()),
            **self._buckets.metrics(),
        }

    def shutdown(self) -> None:
        """Let go of weights, pool and programs."""
        self._runner = self._planner = None


def make_executor(config: EngineConfig) -> DeviceExecutor:
    """The executor that an engine uses unless it is told otherwise."""
    return DeviceExecutor(config)


def with_dtype(model_config: ModelConfig, dtype: str, platform: str) -> ModelConfig:
    """The config with the dtype that is served.

    "auto" is the checkpoint's own, but as in vLLM a GPU computes in bfloat16 where that is float32 or not said.
    """
    if dtype == "auto":
        dtype = "bfloat16" if platform == "gpu" and model_config.dtype == "float32" else model_config.dtype
    if dtype != model_config.dtype:
        logger.info("Serving in %s (the checkpoint's dtype is %s)", dtype, model_config.dtype)
    return replace(model_config, dtype=dtype)


def _mesh(config: EngineConfig) -> Mesh:
    devices = jax.devices()
    if devices[0].platform != config.device:
        raise RuntimeError(
            f"device={config.device!r} was asked for, but JAX runs on {devices[0].platform!r}: install the package "
            "with the extra cuda12 or cuda13 for a GPU, or set device='cpu'."
        )
    return make_mesh(devices, config.tensor_parallel_size)


def _load(config: EngineConfig, source: ModelSource, specs: dict[str, ParamSpec], mesh: Mesh) -> dict[str, Weight]:
    """All weights, each where its declaration wants it, in the form that the layers of this device take."""
    if config.model.load_format == "dummy":
        params = dummy_params(specs, seed=config.model.seed, sharding=lambda spec: spec.sharding(mesh))
    else:
        params = load_params(
            specs, source.open_checkpoint(), put=lambda array, spec: jax.device_put(array, spec.sharding(mesh))
        )
    return unstack_small(params, specs) if config.device == "gpu" else {**params}


def _num_blocks(config: EngineConfig, runner: ModelRunner, device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """What was asked for, or what fits: into the fixed size, or into what weights and workspace leave."""
    memory = config.memory
    if memory.num_blocks is not None:
        return memory.num_blocks
    spec, limits = runner.config.kv_cache, runner.config.limits
    if memory.kv_cache_bytes is not None:
        return num_blocks_that_fit(spec, limits, memory.kv_cache_bytes)
    # With async scheduling the workspace of a second step can be taken while the first one runs.
    workspace = 2 * runner.workspace_bytes() + ALLOCATOR_SLACK_BYTES
    # Read last: what loading and compiling left behind on the device is not free.
    free = free_device_bytes(device)
    if free is None:
        raise RuntimeError(f"{device} does not say how much memory is free: set kv_cache_memory_bytes.")
    logger.info("Free memory %.2f GiB, of which %.2f GiB for two steps' workspace", free / GIB, workspace / GIB)
    return num_blocks_that_fit(spec, limits, free, workspace)
