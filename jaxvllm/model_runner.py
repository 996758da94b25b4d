"""Owns what lives on the device (weights, KV pool, rows) and runs one compiled program per step."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxvllm.compile_cache import CompileCache, ProgramKey, compiler_options
from jaxvllm.device_state import DeviceState
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.parallel import kv_cache_sharding, make_mesh, replicated
from jaxvllm.step import Model, Params, admit_step, make_step, write_masks_step
from pallas_kernels import Backend
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, BucketPolicy
from scheduler.outputs import ModelRunnerOutput
from scheduler.plan import ADMITS_PER_STEP, MASKS_PER_WRITE, PlanLayout, StepPlan, admit_width

logger = logging.getLogger(__name__)

MAX_COMPILE_THREADS = 16


@dataclass(frozen=True)
class RunnerConfig:
    """What a ModelRunner is told.

    Attributes:
      limits: size of the device state.
      policy: its buckets are the programs.
      kv_cache: layout of the pool.
      num_heads: query heads of the model; the attention kernels' work is cut by them.
      backend: of the attention ops.
      mesh: the devices; None for the first one alone.
      strict_compile: a compile after warm-up is an error.
      num_compile_threads: used by warm_up, at most one a CPU.
    """

    limits: BatchLimits
    policy: BucketPolicy
    kv_cache: KVCacheSpec
    num_heads: int
    backend: Backend = "reference"
    mesh: Mesh | None = None
    strict_compile: bool = False
    num_compile_threads: int = MAX_COMPILE_THREADS


class StepHandle:
    """A step in flight. Its ids are a buffer of their own, so later steps may run before anybody waits."""

    def __init__(self, token_ids: jax.Array, plan: StepPlan) -> None:
        self._token_ids = token_ids
        self._request_ids = plan.request_ids
        self._needs_sample = plan.needs_sample
        token_ids.copy_to_host_async()

    def wait(self) -> ModelRunnerOutput:
        """Block until the step is done and give the token of each request that sampled one.

        Raises:
          jax.errors.JaxRuntimeError: the step failed on the device; the runner's buffers are lost.
        """
        token_ids = np.asarray(self._token_ids)[: len(self._request_ids)].tolist()
        if self._needs_sample.all():
            return ModelRunnerOutput(dict(zip(self._request_ids, token_ids, strict=True)))
        rows = np.flatnonzero(self._needs_sample).tolist()
        return ModelRunnerOutput({self._request_ids[row]: token_ids[row] for row in rows})


class ModelRunner:
    """Runs StepPlans, in order, without waiting for their results.

    The KV pool and the device rows are donated to every step and replaced by its outputs; after an error on the
    device the runner cannot be used again.

    Attributes:
      kv_cache, device_state: the newest ones, possibly still being computed; for inspection.
      programs: the compiled steps.
    """

    def __init__(self, bind: Callable[[Params], Model], params: Params, config: RunnerConfig) -> None:
        """Make a runner without a KV pool; call `initialize_kv_cache` next.

        Args:
          bind: gives the model that uses the (traced) parameters it is called with.
          params: the weights, by parameter name, on the mesh.
          config: see RunnerConfig.
        """
        self.config = config
        self._bind = bind
        self._params = params
        self._num_blocks = 0
        self.kv_cache: jax.Array | None = None
        self.device_state: DeviceState | None = None
        mesh = config.mesh or make_mesh(jax.devices())
        self._replicated = replicated(mesh)
        self._pool_sharding = kv_cache_sharding(mesh, config.kv_cache.num_kv_heads)
        self._compiler_options = compiler_options(mesh.devices.flat[0].platform)
        self.programs = CompileCache(self._lower, self._compiler_options, config.strict_compile)

    def workspace_bytes(self) -> int:
        """Device bytes that the largest program needs beside weights and pool; compiles it for a pool of two blocks.

        Raises: RuntimeError if the compiler does not say.
        """
        lowered = self._lower_step(self.config.policy.keys()[0], num_blocks=2)
        analysis = lowered.compile(compiler_options=self._compiler_options or None).memory_analysis()
        if analysis is None:
            raise RuntimeError("the compiler does not say what memory a step needs: set kv_cache_memory_bytes.")
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the pool and empty rows."""
        self._num_blocks = num_blocks
        self.kv_cache = self.config.kv_cache.allocate(num_blocks, self._pool_sharding)
        self.device_state = DeviceState.zeros(self.config.limits, self._replicated)

    def program_keys(self) -> list[ProgramKey]:
        """All programs that serving can need, in the fixed order of lowering."""
        keys: list[ProgramKey] = list(self.config.policy.keys())
        if self.config.limits.max_num_seqs > ADMITS_PER_STEP:
            keys.append("admit")
        if self.config.limits.vocab_size:
            keys.append("masks")
        return keys

    def warm_up(self) -> Iterator[ProgramKey]:
        """Compile all programs ahead, giving each key when it is ready. Without it they compile at first use."""
        num_threads = min(self.config.num_compile_threads, os.cpu_count() or 1)
        return self.programs.compile_all(self.program_keys(), num_threads)

    def execute(self, plan: StepPlan) -> StepHandle:
        """Dispatch a step and return at once; plans must come in the order in which they were built."""
        assert self.device_state is not None, "initialize_kv_cache comes first"
        for admits in plan.overflow:
            self.device_state = self.programs.get("admit")(self.device_state, admits)
        for writes in plan.mask_writes:
            self.device_state = self.programs.get("masks")(self.device_state, writes)
        program = self.programs.get(plan.key)
        token_ids, self.kv_cache, self.device_state = program(
            self._params, self.kv_cache, self.device_state, plan.buffer
        )
        return StepHandle(token_ids, plan)

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        limits = self.config.limits
        if key == "admit":
            return self._lower_change(admit_step, ADMITS_PER_STEP, admit_width(limits))
        if key == "masks":
            return self._lower_change(write_masks_step, MASKS_PER_WRITE, 1 + limits.mask_words)
        return self._lower_step(key, self._num_blocks)

    def _lower_change(
        self, change: Callable[[DeviceState, jax.Array], DeviceState], num_rows: int, width: int
    ) -> jax.stages.Lowered:
        """A program that changes device rows before a step."""
        jitted = jax.jit(change, donate_argnums=0, out_shardings=self._replicated)
        return jitted.lower(DeviceState.shapes(self.config.limits, self._replicated), self._host_array(num_rows, width))

    def _lower_step(self, key: BucketKey, num_blocks: int) -> jax.stages.Lowered:
        config = self.config
        layout = PlanLayout.make(key, config.limits)
        params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), self._params)
        pool, pool_sharding = config.kv_cache, self._pool_sharding
        kv_cache = jax.ShapeDtypeStruct(pool.shape(num_blocks), pool.dtype, sharding=pool_sharding)
        device_state = DeviceState.shapes(config.limits, self._replicated)
        step = make_step(self._bind, key, layout, config.backend, config.num_heads)
        step.__name__ = f"step_{key.kind}_T{key.T}_R{key.R}"  # the name in profiles and dumps
        out_shardings = (self._replicated, pool_sharding, self._replicated)
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings)
        return jitted.lower(params, kv_cache, device_state, self._host_array(layout.size))

    def _host_array(self, *shape: int) -> jax.ShapeDtypeStruct:
        """An int32 array that comes from the host with every step."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)
