"""The Executor: finds and loads the model, sizes the KV pool, plans steps and runs them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from jaxvllm.attention_backend import choose_backend
from jaxvllm.background import Background
from jaxvllm.bucket_choice import choose_policy
from jaxvllm.bucket_stats import BucketStats
from jaxvllm.compile_cache import ProgramKey
from jaxvllm.config import EngineConfig
from jaxvllm.device_memory import free_device_bytes, with_room
from jaxvllm.dispatcher import DispatchedStep, Dispatcher
from jaxvllm.executor_start import start_lowering
from jaxvllm.kv_cache import KVCacheSpec, cache_dtype_of
from jaxvllm.layers.layer_context import Attended
from jaxvllm.layers.parameter import ParamSpec, Weight, bind, param_shapes, param_specs
from jaxvllm.lowering import LoweringTask
from jaxvllm.lowering_processes import LoweringProcesses
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_runner import ModelRunner, RunnerConfig
from jaxvllm.model_source import ModelSource, resolve
from jaxvllm.models.registry import MODELS, get_model_class
from jaxvllm.parallel import make_mesh
from jaxvllm.pool_size import PoolSizer, log_pool
from jaxvllm.program_store import ProgramStore
from jaxvllm.sampling import load_logits_processors
from jaxvllm.weights.dummy import dummy_params
from jaxvllm.weights.load import load_params
from pallas_kernels.lazy import find_mosaic_runtime
from pallas_kernels.tuning import NUM_SMS
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketPolicy
from scheduler.outputs import SchedulerOutput
from scheduler.plan import Planner
from scheduler.records import needs_dense_logprobs

logger = logging.getLogger(__name__)


class DeviceExecutor:
    """Runs one model on one device, or split over some. `initialize` does the slow part.

    Steps are planned in the caller's thread and dispatched in one of their own (see Dispatcher).

    Attributes:
      config: as given.
      model_config: of the model, once it is initialized.
    """

    def __init__(self, config: EngineConfig, lowering: LoweringProcesses | None = None) -> None:
        """Remember the config; nothing is loaded yet.

        Args:
          config: of the engine.
          lowering: processes for its steps that were started ahead; `initialize` closes them.
        """
        self.config = config
        self._lowering = lowering
        self.model_config: ModelConfig | None = None
        self._planner: Planner | None = None
        self._runner: ModelRunner | None = None
        self._dispatcher: Dispatcher | None = None
        self._buckets = BucketStats()

    def initialize(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Load the model, allocate the KV pool, compile the programs of a GPU. Returns num_blocks.

        Args:
          meanwhile: see Executor.

        Raises:
          ValueError: the model cannot be served, a request of max_model_len does not fit the pool, or JAX finds no
            device of the configured kind.
        """
        try:
            return self._initialize(meanwhile)
        finally:
            if self._lowering is not None:
                self._lowering.close()
                self._lowering = None

    def _initialize(self, meanwhile: Callable[[], None]) -> int:
        config = self.config
        if config.device == "gpu":
            find_mosaic_runtime()
        mesh = _mesh(config)
        source = resolve(
            config.model.model,
            revision=config.model.revision,
            download_dir=config.model.download_dir,
            supported=MODELS,
        )
        model_config = with_dtype(source.config, config.model.dtype, config.device)
        model_config, cache_dtype = with_cache_dtype(model_config, config.memory.kv_cache_dtype)
        model_config = replace(model_config, rope=model_config.rope.within(config.scheduler.max_model_len))
        model = get_model_class(model_config.architecture)(model_config)
        policy = choose_policy(config.bucket_policy, config.device, config.scheduler)
        runner = _make_runner(config, model_config, cache_dtype, model, policy, mesh)
        free_bytes = free_device_bytes(mesh.devices.flat[0])  # before loading begins
        sizer = PoolSizer(
            config.memory, runner.config.kv_cache, runner.config.limits, model_config, policy, free_bytes,
            runner.param_bytes() + runner.state_bytes(),
        )  # fmt: skip
        num_blocks, workspace_bytes = sizer.guess(), 0
        with Background(lambda: _load(config, source, param_specs(model), mesh)) as weights, Background(meanwhile):
            if config.compile.ahead:
                with self._lowering_of(model_config, runner.config) as lowering:
                    num_blocks, workspace_bytes = compile_ahead(runner, sizer, num_blocks, weights.check, lowering)
            room = sizer.bytes_at_work(num_blocks, workspace_bytes)
            runner.set_params(with_room(weights.result(), list(mesh.devices.flat), room))
        log_pool(runner.config.kv_cache, runner.config.limits, num_blocks)
        runner.initialize_kv_cache(num_blocks)
        self._runner, self._planner = runner, Planner(runner.config.limits, policy, config.seed)
        self._dispatcher = Dispatcher()
        self.model_config = model_config
        return num_blocks

    @property
    def runner(self) -> ModelRunner:
        """What runs the steps, for measurements: not while steps of execute() are in flight."""
        assert self._runner is not None, "initialize comes first"
        return self._runner

    @property
    def bucket_policy(self) -> BucketPolicy:
        """What steps are padded to."""
        return self.runner.config.policy

    def prepare(self, keys: Iterable[ProgramKey]) -> None:
        """Load or compile programs, of buckets that the config's policy need not have: for measurements."""
        assert self.model_config is not None, "initialize comes first"
        keys = list(keys)
        with (
            self._lowering_of(self.model_config, self.runner.config) as lowering,
            tqdm(desc="Preparing programs", total=len(keys), unit="program") as progress,
        ):
            for _ in self.runner.warm_up(lowering, keys):
                progress.update()

    def execute(self, scheduler_output: SchedulerOutput) -> DispatchedStep | None:
        """Plan a step and have it dispatched, without waiting for that; None if it holds no tokens."""
        assert self._planner is not None and self._dispatcher is not None, "initialize comes first"
        plan = self._planner.build(scheduler_output)
        if plan is None:
            return None
        self._buckets.count(plan.key, plan.num_tokens, plan.num_reqs)
        return self._dispatcher.submit(partial(self.runner.execute, plan))

    def metrics(self) -> dict[str, float]:
        """Programs compiled ahead and while serving; steps, tokens and pads by bucket; time of dispatching.

        In a step with grammars the dispatching thread waits for its masks, and the time counts.
        """
        assert self._runner is not None and self._dispatcher is not None, "initialize comes first"
        programs = self._runner.programs
        return {
            "num_programs": float(len(programs.programs())),
            "num_loaded_programs": float(len(programs.load_seconds)),
            "late_compiles_total": float(programs.num_late_compiles),
            "compile_seconds_total": sum(programs.compile_seconds.values()),
            "dispatch_seconds_total": self._dispatcher.busy_s,
            **self._buckets.metrics(),
        }

    @contextmanager
    def _lowering_of(self, model: ModelConfig, runner: RunnerConfig) -> Iterator[LoweringProcesses | None]:
        """Processes that lower the steps of a runner; None where this process has to."""
        # Kernels are cut for the device of the process that lowers them, and without one for an H200.
        if getattr(jax.devices()[0], "core_count", None) != NUM_SMS:
            yield None
            return
        processes, self._lowering = self._lowering or start_lowering(self.config), None
        if processes is None:
            yield None
            return
        with closing(processes):
            # Neither a mesh nor a store can travel.
            runner = replace(runner, mesh=None, store=None)
            processes.lower_for(LoweringTask(model, runner, platform="cuda", unroll_layers=True))
            yield processes

    def shutdown(self) -> None:
        """Let go of weights, pool and programs. Steps submitted before are dispatched first."""
        if self._dispatcher is not None:
            self._dispatcher.shutdown()
        if self._runner is not None:
            self._runner.release()
        self._runner = self._planner = self._dispatcher = None


def with_dtype(model_config: ModelConfig, dtype: str, platform: str) -> ModelConfig:
    """The config with the dtype that is served.

    "auto" is the checkpoint's own, but as in vLLM a GPU computes in bfloat16 where that is float32 or not said.
    """
    if dtype == "auto":
        dtype = "bfloat16" if platform == "gpu" and model_config.dtype == "float32" else model_config.dtype
    if dtype != model_config.dtype:
        logger.info("Serving in %s (the checkpoint's dtype is %s)", dtype, model_config.dtype)
    return replace(model_config, dtype=dtype)


def with_cache_dtype(model_config: ModelConfig, kv_cache_dtype: str) -> tuple[ModelConfig, str]:
    """The config of a model that knows whether its cache has scales, and what that is kept in ("auto": its dtype)."""
    is_chosen = kv_cache_dtype != "auto" or model_config.kv_cache_dtype is None
    cache_dtype = kv_cache_dtype if is_chosen else str(model_config.kv_cache_dtype)
    has_kv_scales = cache_dtype_of(model_config.dtype, cache_dtype).itemsize == 1
    return replace(model_config, has_kv_scales=has_kv_scales), cache_dtype


def _mesh(config: EngineConfig) -> Mesh:
    devices = jax.devices()
    if devices[0].platform != config.device:
        raise ValueError(
            f"device={config.device!r} was asked for, but JAX runs on {devices[0].platform!r}: install the package "
            "with the extra cuda12 or cuda13 for a GPU, or set device='cpu'."
        )
    return make_mesh(devices, config.tensor_parallel_size)


def _make_runner(
    config: EngineConfig, model_config: ModelConfig, cache_dtype: str, model: Any, policy: BucketPolicy, mesh: Mesh
) -> ModelRunner:
    """A runner that knows the weights' shapes alone."""
    scheduler, compiling = config.scheduler, config.compile
    processors = load_logits_processors(config.logits_processors)
    limits = BatchLimits(
        scheduler.max_num_seqs,
        scheduler.max_model_len,
        config.memory.block_size,
        model_config.vocab_size,
        tuple((processor.name, processor.num_params) for processor in processors),
    )
    # The store would not notice another version of a custom processor.
    has_store = compiling.store_folder is not None and not processors
    backend = choose_backend(
        config.attention_backend, mesh.devices.flat[0], model_config, limits, cache_dtype=cache_dtype
    )
    return ModelRunner(
        lambda traced: bind(model, traced),
        param_shapes(param_specs(model), mesh),
        RunnerConfig(
            limits,
            policy,
            KVCacheSpec.of_model(model_config, limits.block_size, cache_dtype=cache_dtype, backend=backend),
            model_config.num_heads,
            model_config.vocab_size,
            backend,
            mesh,
            attended=Attended.of_one_token(model_config, is_finished=not model.unroll_layers),
            has_dense_logprobs=needs_dense_logprobs(config.max_logprobs),
            processors=processors,
            strict_compile=compiling.strict,
            store=ProgramStore(Path(compiling.store_folder or "")) if has_store else None,
            model=(model_config, compiling.xla_flags),
        ),
    )


def _load(config: EngineConfig, source: ModelSource, specs: dict[str, ParamSpec], mesh: Mesh) -> dict[str, Weight]:
    """All weights, each where its declaration wants it."""
    if config.model.load_format == "dummy":
        return dummy_params(specs, seed=config.model.seed, sharding=lambda spec: spec.sharding(mesh))
    return load_params(
        specs, source.open_checkpoint(), put=lambda array, spec: jax.device_put(array, spec.sharding(mesh))
    )


def compile_ahead(
    runner: ModelRunner,
    sizer: PoolSizer,
    num_blocks: int,
    check: Callable[[], None],
    lowering: LoweringProcesses | None,
) -> tuple[int, int]:
    """Load or compile all programs, anew while their workspace asks for a pool of another size.

    Args:
      num_blocks: the sizer's guess.
      check: called again and again; raises what makes going on useless.
      lowering: lowers the steps; None: this process does.

    Returns:
      The number of blocks they are made for, and the most workspace of one in bytes; 0 if the compiler did not say.
    """
    start = time.perf_counter()
    workspace_bytes = 0
    while True:
        runner.set_num_blocks(num_blocks)
        keys = runner.program_keys()
        with tqdm(desc="Preparing programs", total=len(keys), unit="program") as progress:
            for key in runner.warm_up(lowering):
                check()
                progress.update()
                # The most of all so far, of an earlier pool too: what has made it smaller keeps it so.
                workspace_bytes = max(runner.workspace_bytes(key) or 0, workspace_bytes)
                checked = sizer.checked(num_blocks, workspace_bytes)
                # Of all programs but the largest only those count that need even more than that one.
                if checked < num_blocks or (checked > num_blocks and key == sizer.largest):
                    logger.info("The steps' workspace asks for %d blocks in the place of %d", checked, num_blocks)
                    num_blocks = checked
                    break
            else:
                programs = runner.programs
                logger.info(
                    "%d programs ready in %.1f s: %d compiled, %d loaded",
                    len(keys),
                    time.perf_counter() - start,
                    len(programs.compile_seconds),
                    len(programs.load_seconds),
                )
                return num_blocks, workspace_bytes
