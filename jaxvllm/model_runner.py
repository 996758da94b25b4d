"""Owns what lives on the device (weights, KV pool, rows) and runs one compiled program per step."""

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxvllm.compile_cache import CompileCache, ProgramKey, StoredPrograms, compiler_options
from jaxvllm.device_state import DeviceState
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.parallel import kv_cache_sharding, make_mesh, replicated
from jaxvllm.program_store import ProgramStore, describe_devices, fingerprint
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
      strict_compile: a compile while serving is an error.
      num_compile_threads: used by warm_up, at most one a CPU.
      store: keeps programs from one start to the next; None keeps none.
      model: whatever else the traced step depends on, by its repr; needed with a store.
    """

    limits: BatchLimits
    policy: BucketPolicy
    kv_cache: KVCacheSpec
    num_heads: int
    backend: Backend = "reference"
    mesh: Mesh | None = None
    strict_compile: bool = False
    num_compile_threads: int = MAX_COMPILE_THREADS
    store: ProgramStore | None = None
    model: Any = None


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
          params: the weights, by parameter name, on the mesh; or their shapes, until `set_params` brings them.
          config: see RunnerConfig.
        """
        self.config = config
        self._bind = bind
        self._params = params
        self._param_shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params)
        self._num_blocks = 0
        self.kv_cache: jax.Array | None = None
        self.device_state: DeviceState | None = None
        mesh = config.mesh or make_mesh(jax.devices())
        self._replicated = replicated(mesh)
        self._pool_sharding = kv_cache_sharding(mesh, config.kv_cache.num_kv_heads)
        self._compiler_options = compiler_options(mesh.devices.flat[0].platform)
        self._devices = list(mesh.devices.flat)
        stored = config.store and StoredPrograms(config.store, self._fingerprint, self._devices)
        self.programs = CompileCache(self._lower, self._compiler_options, config.strict_compile, stored)

    def param_bytes(self) -> int:
        """Bytes that the weights take on each device."""
        shapes = jax.tree.leaves(self._param_shapes)
        return sum(math.prod(p.sharding.shard_shape(p.shape)) * p.dtype.itemsize for p in shapes)

    def set_params(self, params: Params) -> None:
        """Bring the weights, of the shapes that were announced."""
        self._params = params

    def set_num_blocks(self, num_blocks: int) -> None:
        """Say how large the pool will be, before it is there: it is part of every program."""
        if num_blocks != self._num_blocks:
            self.programs.forget()
        self._num_blocks = num_blocks

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the pool and empty rows."""
        self.set_num_blocks(num_blocks)
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

    def _fingerprint(self, key: ProgramKey) -> str:
        return fingerprint(self._fixed_parts | {"key": key, "num_blocks": self._num_blocks})

    @cached_property
    def _fixed_parts(self) -> dict[str, str]:
        """What all programs of this runner depend on, besides code and libraries."""
        names = ("limits", "kv_cache", "num_heads", "backend", "model")
        parts = {name: getattr(self.config, name) for name in names} | describe_devices(self._devices)
        parts |= {"params": self._param_shapes, "options": self._compiler_options}
        return {name: repr(part) for name, part in parts.items()}

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        limits = self.config.limits
        if key == "admit":
            return self._lower_change(admit_step, ADMITS_PER_STEP, admit_width(limits))
        if key == "masks":
            return self._lower_change(write_masks_step, MASKS_PER_WRITE, 1 + limits.mask_words)
        return self._lower_step(key)

    def _lower_change(
        self, change: Callable[[DeviceState, jax.Array], DeviceState], num_rows: int, width: int
    ) -> jax.stages.Lowered:
        """A program that changes device rows before a step."""
        jitted = jax.jit(change, donate_argnums=0, out_shardings=self._replicated)
        return jitted.lower(DeviceState.shapes(self.config.limits, self._replicated), self._host_array(num_rows, width))

    def _lower_step(self, key: BucketKey) -> jax.stages.Lowered:
        config = self.config
        layout = PlanLayout.make(key, config.limits)
        pool, pool_sharding = config.kv_cache, self._pool_sharding
        kv_cache = jax.ShapeDtypeStruct(pool.shape(self._num_blocks), pool.dtype, sharding=pool_sharding)
        device_state = DeviceState.shapes(config.limits, self._replicated)
        step = make_step(self._bind, key, layout, config.backend, config.num_heads)
        # The name in profiles and dumps. JAX's persistent cache knows less than our own of what makes a program another
        # one; by the name, the two agree.
        step.__name__ = f"step_{key.kind}_T{key.T}_R{key.R}"
        if config.store is not None:
            step.__name__ += f"_{self._fingerprint(key)[:8]}"
        out_shardings = (self._replicated, pool_sharding, self._replicated)
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings)
        return jitted.lower(self._param_shapes, kv_cache, device_state, self._host_array(layout.size))

    def _host_array(self, *shape: int) -> jax.ShapeDtypeStruct:
        """An int32 array that comes from the host with every step."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)
