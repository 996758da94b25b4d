"""Owns what lives on the device (weights, KV pool, rows) and runs one compiled program per step."""

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxvllm.compile_cache import CompileCache, ProgramKey, SamplingProgram, StoredPrograms, compiler_options
from jaxvllm.device_memory import small_places
from jaxvllm.device_state import DeviceState
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.layer_context import Attended
from jaxvllm.lowering import import_step
from jaxvllm.lowering_processes import LoweringProcesses
from jaxvllm.parallel import heads_sharding, kv_cache_sharding, make_mesh, replicated
from jaxvllm.program_store import ProgramStore, describe_devices, fingerprint
from jaxvllm.sampling import LogitsProcessor
from jaxvllm.step import (
    Model,
    Params,
    StepOutput,
    admit_history_step,
    admit_lists_step,
    admit_step,
    make_logprobs,
    make_mask,
    make_process,
    make_sample,
    make_step,
)
from jaxvllm.step_handle import StepHandle
from pallas_kernels import FEW_ROWS, Backend
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, BucketPolicy
from scheduler.logprob_plan import POSITION_FIELDS, LogprobPlan
from scheduler.mask_plan import mask_buffer_size, masks_per_call
from scheduler.plan import ADMITS_PER_STEP, PlanLayout, StepPlan, admit_width
from scheduler.side_buffers import HISTORY_HEADER, HISTORY_PIECE, HISTORY_PIECES_PER_CALL, LISTS_PER_CALL
from scheduler.token_lists import list_width

logger = logging.getLogger(__name__)

MAX_COMPILE_THREADS = 16
# Positions whose logits one call of a logprobs program computes; dense: and sends to the host.
LOGPROB_POSITIONS = 128
DENSE_POSITIONS = 16


@dataclass(frozen=True)
class RunnerConfig:
    """What a ModelRunner is told.

    Attributes:
      limits: size of the device state.
      policy: its buckets are the programs.
      kv_cache: layout of the pool.
      num_heads: query heads of the model; the attention kernels' work is cut by them.
      vocab_size: of its logits.
      backend: of the attention ops.
      mesh: the devices; None for the first one alone.
      attended: one token's share, as shapes, of what mixed steps keep for prompt logprobs; None: nothing is kept, and
        none can be asked for.
      has_dense_logprobs: whether a request may ask for more than MAX_STEP_LOGPROBS logprobs a position.
      processors: custom logits processors, those of `limits`.
      strict_compile: a compile while serving is an error.
      num_compile_threads: used by warm_up, at most one a CPU.
      store: keeps programs from one start to the next; None keeps none.
      model: whatever else the traced step depends on, by its repr; needed with a store.
    """

    limits: BatchLimits
    policy: BucketPolicy
    kv_cache: KVCacheSpec
    num_heads: int
    vocab_size: int
    backend: Backend = "reference"
    mesh: Mesh | None = None
    attended: Attended | None = None
    has_dense_logprobs: bool = False
    processors: tuple[LogitsProcessor, ...] = ()
    strict_compile: bool = False
    num_compile_threads: int = MAX_COMPILE_THREADS
    store: ProgramStore | None = None
    model: Any = None


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
        self._lowering: LoweringProcesses | None = None
        self.kv_cache: jax.Array | None = None
        self.device_state: DeviceState | None = None
        self._small_places: list[jax.Array] = []
        mesh = config.mesh or make_mesh(jax.devices())
        self._replicated = replicated(mesh)
        self._attended = _attended_shapes(config, mesh)
        self._pool_sharding = kv_cache_sharding(mesh, config.kv_cache.num_kv_heads)
        self._compiler_options = compiler_options(mesh.devices.flat[0].platform)
        self._devices = list(mesh.devices.flat)
        stored = config.store and StoredPrograms(config.store, self._fingerprint, self._devices)
        self.programs = CompileCache(self._lower, self._compiler_options, config.strict_compile, stored)

    @property
    def device_kind(self) -> str:
        """What runs the steps, for tables."""
        return self._devices[0].device_kind

    def param_bytes(self) -> int:
        """Bytes that the weights take on each device."""
        return _bytes_on_each_device(self._param_shapes)

    def set_params(self, params: Params) -> None:
        """Bring the weights, of the shapes that were announced."""
        self._params = params

    def set_num_blocks(self, num_blocks: int) -> None:
        """Say how large the pool will be, before it is there: it is part of every program."""
        if num_blocks != self._num_blocks:
            self.programs.forget()
        self._num_blocks = num_blocks

    def workspace_bytes(self, key: ProgramKey) -> int | None:
        """Device bytes that a program needs beside its arguments; None if the compiler did not say.

        For a bucket, with those that the sampler's programs may need behind it: processed logits, and a word a token.
        """
        found = self.programs.workspace_bytes(key)
        if found is None or not isinstance(key, BucketKey):
            return found
        return found + 2 * key.R * self.config.vocab_size * 4

    def state_bytes(self) -> int:
        """Device bytes of the persistent rows, and of what is kept of a mixed step's tokens."""
        return _bytes_on_each_device(self._state_shapes())

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the pool and empty rows."""
        self.set_num_blocks(num_blocks)
        self._release_pool()  # there is no room for two
        self.kv_cache = self.config.kv_cache.allocate(num_blocks, self._pool_sharding)
        self.device_state = DeviceState.zeros(self.config.limits, self._replicated, self._attended)
        if self._devices[0].platform == "gpu":  # behind all that stays
            self._small_places = small_places(self._replicated)

    def release(self) -> None:
        """Free weights, pool and rows now: the runner and its programs hold each other, which Python finds late."""
        self._params = self._param_shapes
        self._release_pool()

    def _release_pool(self) -> None:
        """Free the pool, the rows and what lies behind them."""
        self.kv_cache = self.device_state = None
        self._small_places = []

    def program_keys(self) -> list[ProgramKey]:
        """All programs that serving can need, in the fixed order of lowering: what compiles longest comes first."""
        # Few rows have kernels of their own for most of a layer: 7.8 s of CPU where the largest step takes 7.4.
        buckets = sorted(self.config.policy.keys(), key=lambda key: key.T > FEW_ROWS)
        keys: list[ProgramKey] = list(buckets)
        for num_rows in sorted({bucket.R for bucket in buckets}):
            keys += [SamplingProgram("process", num_rows), SamplingProgram("sample", num_rows)]
            if self.config.limits.vocab_size:
                keys += [SamplingProgram("mask", num_rows, size) for size in masks_per_call(num_rows)]
        if self.config.limits.max_num_seqs > ADMITS_PER_STEP:
            keys.append("admit")
        keys.append("admit_lists")
        keys.append("admit_history")
        if self.config.attended is not None:
            keys.append("logprobs")
            if self.config.has_dense_logprobs:
                keys.append("dense_logprobs")
        return keys

    def warm_up(
        self, lowering: LoweringProcesses | None = None, keys: Iterable[ProgramKey] | None = None
    ) -> Iterator[ProgramKey]:
        """Compile all programs ahead, giving each key when it is ready. Without it they compile at first use.

        Args:
          lowering: lowers the steps; None: this process does.
          keys: which programs; None: all that serving can need.
        """
        num_threads = min(self.config.num_compile_threads, os.cpu_count() or 1)
        self._lowering = lowering
        try:
            yield from self.programs.compile_all(
                self.program_keys() if keys is None else keys, num_threads, lower_in_threads=lowering is not None
            )
        finally:
            self._lowering = None

    def execute(self, plan: StepPlan) -> StepHandle:
        """Dispatch a step and return at once; plans must come in the order in which they were built."""
        state = self.device_state
        assert state is not None, "initialize_kv_cache comes first"
        changes: dict[ProgramKey, list[np.ndarray]] = {
            "admit": plan.overflow,
            "admit_lists": plan.token_lists,
            "admit_history": plan.history,
        }
        for key, buffers in changes.items():
            for buffer in buffers:
                state = self.programs.get(key)(state, buffer)
        part = state.of_step(plan.key.kind)
        output, self.kv_cache, part = self.programs.get(plan.key)(self._params, self.kv_cache, part, plan.buffer)
        self.device_state = state.after_step(part)
        token_ids, logprobs = (output.token_ids, None) if plan.is_plain else self._sample(output, plan)
        return StepHandle(token_ids, logprobs, plan, *self._compute_logprobs(plan.logprobs))

    def _sample(self, output: StepOutput, plan: StepPlan) -> tuple[jax.Array, jax.Array]:
        """Dispatch what chooses the tokens of the step just dispatched; ids and logprobs."""
        state, logits, get, num_rows = self.device_state, output.logits, self.programs.get, plan.key.R
        assert state is not None
        rows = (output.rows, state.records, state.token_lists, state.token_ids)
        # In place: logprobs, too, are of what a grammar leaves, as in vLLM. The model runs while masks are computed.
        for num_masks, buffer in plan.masks.buffers() if plan.masks else ():
            logits = get(SamplingProgram("mask", num_rows, num_masks))(logits, buffer)
        processed = get(SamplingProgram("process", num_rows))(logits, *rows) if plan.has_processing else logits
        token_ids, logprobs, token_store = get(SamplingProgram("sample", num_rows))(logits, processed, *rows)
        self.device_state = replace(state, token_ids=token_store)
        return token_ids, logprobs

    def _compute_logprobs(self, plan: LogprobPlan | None) -> tuple[list[jax.Array], list[jax.Array]]:
        """Dispatch the logprobs programs for the step just dispatched, before the next one takes what it left."""
        if plan is None or not plan.ranges:
            return [], []
        assert self.config.attended is not None, "what they take is kept"
        return (
            self._call_logprobs("logprobs", plan.chunks(LOGPROB_POSITIONS, is_dense=False)),
            self._call_logprobs("dense_logprobs", plan.chunks(DENSE_POSITIONS, is_dense=True)),
        )

    def _call_logprobs(self, key: ProgramKey, chunks: Iterator[np.ndarray]) -> list[jax.Array]:
        assert self.device_state is not None
        attended = self.device_state.attended
        return [self.programs.get(key)(self._params, attended, positions) for positions in chunks]

    def _fingerprint(self, key: ProgramKey) -> str:
        return fingerprint(self._fixed_parts | {"key": key, "num_blocks": self._num_blocks})

    @cached_property
    def _fixed_parts(self) -> dict[str, str]:
        """What all programs of this runner depend on, besides code and libraries."""
        names = ("limits", "kv_cache", "num_heads", "vocab_size", "backend", "model")
        parts = {name: getattr(self.config, name) for name in names} | describe_devices(self._devices)
        parts |= {"params": self._param_shapes, "options": self._compiler_options, "attended": self._attended}
        return {name: repr(part) for name, part in parts.items()}

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        if isinstance(key, BucketKey | SamplingProgram):
            return self._lower_step(key)
        if key in ("logprobs", "dense_logprobs"):
            return self._lower_logprobs(is_dense=key == "dense_logprobs")
        limits = self.config.limits
        change, *shape = {
            "admit": (admit_step, ADMITS_PER_STEP, admit_width(limits)),
            "admit_lists": (admit_lists_step, LISTS_PER_CALL, 1 + list_width(limits.num_processor_params)),
            "admit_history": (admit_history_step, HISTORY_PIECES_PER_CALL, len(HISTORY_HEADER) + HISTORY_PIECE),
        }[key]
        # A program that changes device rows before a step.
        state = self._state_shapes()
        jitted = jax.jit(change, donate_argnums=0, out_shardings=_shardings(state))
        return jitted.lower(state, self._host_array(*shape))

    def _lower_logprobs(self, is_dense: bool) -> jax.stages.Lowered:
        num_positions = DENSE_POSITIONS if is_dense else LOGPROB_POSITIONS
        jitted = jax.jit(make_logprobs(self._bind, is_dense, self.config.backend), out_shardings=self._replicated)
        return jitted.lower(self._param_shapes, self._attended, self._host_array(num_positions, len(POSITION_FIELDS)))

    def _state_shapes(self) -> DeviceState:
        return DeviceState.shapes(self.config.limits, self._replicated, self._attended)

    def step_and_args(self, key: BucketKey | SamplingProgram) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of a step, or of what may follow it, and the shapes of its arguments."""
        config, state = self.config, self._state_shapes()
        if isinstance(key, SamplingProgram):
            shape = (key.R, config.vocab_size)
            logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._replicated)
            rows = (self._host_array(3, key.R), state.records, state.token_lists, state.token_ids)
            if key.kind == "process":
                return make_process(config.processors, config.backend), (logits, *rows)
            if key.kind == "mask":
                size = mask_buffer_size(key.num_masks, config.limits.mask_words)
                return make_mask(key.num_masks), (logits, self._host_array(size))
            return make_sample(config.backend), (logits, logits, *rows)
        layout = PlanLayout.make(key, config.limits)
        pool = config.kv_cache
        kv_cache = jax.ShapeDtypeStruct(pool.shape(self._num_blocks), pool.dtype, sharding=self._pool_sharding)
        step = make_step(self._bind, key, layout, config.backend, config.num_heads)
        return step, (self._param_shapes, kv_cache, state.of_step(key.kind), self._host_array(layout.size))

    def _lower_step(self, key: BucketKey | SamplingProgram) -> jax.stages.Lowered:
        step, args = self.step_and_args(key)
        if self._lowering is not None:
            step = import_step(self._lowering.export(key, self._num_blocks))
        # The name in profiles and dumps. JAX's persistent cache knows less than our own of what makes a program another
        # one; by the name, the two agree.
        step.__name__ = re.sub(r"\W+", "_", f"step_{key}").strip("_")
        if self.config.store is not None:
            step.__name__ += f"_{self._fingerprint(key)[:8]}"
        if isinstance(key, SamplingProgram):
            # sample: token_ids, which the tokens are entered into.
            donated = {"process": (), "mask": (0,), "sample": (len(args) - 1,)}[key.kind]
            return jax.jit(step, donate_argnums=donated, out_shardings=self._replicated).lower(*args)
        out_shardings = (self._replicated, self._pool_sharding, _shardings(args[2]))
        return jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings).lower(*args)

    def _host_array(self, *shape: int) -> jax.ShapeDtypeStruct:
        """An int32 array that comes from the host with every step."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)


def _attended_shapes(config: RunnerConfig, mesh: Mesh) -> Attended | None:
    """What is kept of a mixed step's tokens, for as many as the largest bucket has, and where it lies."""
    if config.attended is None:
        return None
    num_tokens = max(key.T for key in config.policy.keys())  # noqa: SIM118

    def shape(one: Any, sharding: NamedSharding) -> Any:
        return None if one is None else jax.ShapeDtypeStruct((num_tokens, *one.shape), one.dtype, sharding=sharding)

    split = heads_sharding(mesh, config.kv_cache.num_kv_heads)
    return Attended(shape(config.attended.heads, split), shape(config.attended.residual, replicated(mesh)))


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def _bytes_on_each_device(shapes: Any) -> int:
    leaves = jax.tree.leaves(shapes)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
