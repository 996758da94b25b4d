"""Compiled programs, one per bucket: ahead of serving where compiling is slow, at first use where it is not."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any, Literal

import jax
from jax._src.config import persistent_cache_min_compile_time_secs  # the public setting is not one thread's alone

from jaxvllm.program_store import ProgramStore, StoredProgram
from scheduler.buckets import BucketKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingProgram:
    """A program behind a step of R rows, where the most likely tokens are not all that is wanted: see jaxvllm.step.

    num_masks: that a call of `mask` applies.
    """

    kind: Literal["process", "mask", "sample"]
    R: int
    num_masks: int = 0

    def __str__(self) -> str:
        return f"{self.kind}(R={self.R}{f', masks={self.num_masks}' if self.num_masks else ''})"


ProgramKey = (
    BucketKey | SamplingProgram | Literal["admit", "admit_lists", "admit_history", "logprobs", "dense_logprobs"]
)


class CompileAfterWarmupError(RuntimeError):
    """In strict mode, a program was needed that had not been compiled ahead."""


@dataclass(frozen=True)
class StoredPrograms:
    """The programs of one engine in the store.

    Attributes:
      fingerprint: program key -> its name in the store.
      devices: on which they run.
    """

    store: ProgramStore
    fingerprint: Callable[[ProgramKey], str]
    devices: list[jax.Device]  # pyright: ignore[reportInvalidTypeForm]

    def load(self, key: ProgramKey) -> StoredProgram | None:
        """See ProgramStore.load."""
        return self.store.load(self.fingerprint(key), self.devices)

    def save(self, key: ProgramKey, program: jax.stages.Compiled, workspace_bytes: int | None) -> None:
        """See ProgramStore.save."""
        self.store.save(self.fingerprint(key), program, workspace_bytes)


# What may become part of a CUDA graph. XLA's default leaves out CONDITIONAL and WHILE: then the sampler's condition is
# read by the host, and dispatching a step waits for the step (2.1 of 2.1 ms for one request of Qwen3-0.6B on one H200).
_COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"


def compiler_options(platform: str) -> dict[str, bool | str]:
    """Options of every compile."""
    if platform == "gpu":
        return {
            # A Python bool: the string is refused. 2 s instead of 25 s a program, and not slower (one H200).
            "xla_gpu_enable_triton_gemm": False,
            "xla_gpu_enable_command_buffer": _COMMAND_BUFFER,
            # It counts the donated pool several times over, finds that a large one does not fit, and then computes up
            # to 130 small kernels of a step again and again.
            "xla_disable_hlo_passes": "rematerialization",
        }
    return {}


class CompileCache:
    """Program key -> executable. A shape that does not fit an executable raises; nothing recompiles silently.

    Attributes:
      compile_seconds: key -> wall time of lowering and compiling, for each program compiled here.
      load_seconds: key -> wall time of loading, for each program that came from the store.
      num_late_compiles: programs compiled by `get` rather than ahead.
    """

    def __init__(
        self,
        lower: Callable[[ProgramKey], jax.stages.Lowered],
        options: dict[str, bool | str] | None = None,
        strict: bool = False,
        stored: StoredPrograms | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
          lower: traces and lowers one program.
          options: compiler options.
          strict: `get` raises instead of compiling.
          stored: programs of earlier starts; None keeps none.
        """
        self._lower = lower
        self._options = options or {}
        self._strict = strict
        self._stored = stored
        self._programs: dict[ProgramKey, jax.stages.Compiled] = {}
        self._workspace_bytes: dict[ProgramKey, int | None] = {}
        self._lock = Lock()
        self._is_warm = False
        self.compile_seconds: dict[ProgramKey, float] = {}
        self.load_seconds: dict[ProgramKey, float] = {}
        self.num_late_compiles = 0

    def compile_all(
        self, keys: Iterable[ProgramKey], num_threads: int = 8, *, lower_in_threads: bool = False
    ) -> Iterator[ProgramKey]:
        """Load or compile ahead; yields each key when it is ready, for a progress bar.

        What an earlier start has stored is loaded in threads. The others are lowered one after the other in the given
        order, as threads would not speed it up and the keys of JAX's persistent cache depend on the order; compiling
        runs in threads beside it. `lower_in_threads`: lowering is waiting for another process, and runs there too.
        """
        self._is_warm = True
        missing: list[ProgramKey] = [key for key in keys if key not in self._programs]
        with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
            loaded: dict[ProgramKey, bool] = dict(zip(missing, pool.map(self._load, missing), strict=True))
            for key in missing:
                if loaded[key]:
                    yield key
            futures: dict[Future[None], ProgramKey] = {}
            try:
                for key in missing:
                    if not loaded[key]:
                        if lower_in_threads:
                            future = pool.submit(self._lower_and_compile, key)
                        else:
                            start = time.perf_counter()
                            future = pool.submit(self._compile, key, self._lower(key), start)
                        futures[future] = key
                        yield from _finished(futures, wait=False)
                while futures:
                    yield from _finished(futures, wait=True)
            finally:
                for future in futures:  # after an error, or when the caller has had enough
                    future.cancel()

    def get(self, key: ProgramKey) -> jax.stages.Compiled:
        """The executable of a program, compiled now if need be.

        Raises:
          CompileAfterWarmupError: it would have to be compiled and the cache is strict.
        """
        program = self._programs.get(key)
        if program is not None:
            return program
        if self._load(key):
            return self._programs[key]
        if self._strict:
            raise CompileAfterWarmupError(f"{key} was not compiled ahead: compile it in the warm-up.")
        self._lower_and_compile(key)
        self.num_late_compiles += 1
        # Where nothing is compiled ahead (the CPU default) the first use of each shape is meant to compile.
        level = logging.WARNING if self._is_warm else logging.INFO
        logger.log(level, "Compiled %s while serving, in %.1f s", key, self.compile_seconds[key])
        return self._programs[key]

    def workspace_bytes(self, key: ProgramKey) -> int | None:
        """Device bytes that a program needs beside its arguments; None if the compiler did not say.

        Raises: KeyError for a program that is not there.
        """
        return self._workspace_bytes[key]

    def forget(self) -> None:
        """Drop all programs: the pool that they were made for has another size."""
        self._programs.clear()

    def programs(self) -> dict[ProgramKey, jax.stages.Compiled]:
        """All executables, for inspection."""
        return dict(self._programs)

    def _load(self, key: ProgramKey) -> bool:
        start = time.perf_counter()
        found = None if self._stored is None else self._stored.load(key)
        if found is not None:
            self._keep(key, found.program, found.workspace_bytes)
            self.load_seconds[key] = time.perf_counter() - start
        return found is not None

    def _lower_and_compile(self, key: ProgramKey) -> None:
        start = time.perf_counter()
        self._compile(key, self._lower(key), start)

    def _compile(self, key: ProgramKey, lowered: jax.stages.Lowered, start: float) -> None:
        with _hits_of_jax_cache() as hits, self._kept_once():
            program = lowered.compile(compiler_options=self._options or None)
        workspace_bytes = _workspace_bytes(program)
        self._keep(key, program, workspace_bytes)
        self.compile_seconds[key] = time.perf_counter() - start
        # What XLA has not compiled but read cannot be written again: on a CPU parts of it are missing then.
        if self._stored is not None and not hits:
            self._stored.save(key, program, workspace_bytes)

    def _kept_once(self) -> AbstractContextManager[Any]:
        """What the store keeps, JAX's own cache need not: packing it takes 0.2 to 0.5 s of CPU for a step."""
        return nullcontext() if self._stored is None else persistent_cache_min_compile_time_secs(math.inf)

    def _keep(self, key: ProgramKey, program: jax.stages.Compiled, workspace_bytes: int | None) -> None:
        with self._lock:
            self._programs[key] = program
            self._workspace_bytes[key] = workspace_bytes


@contextmanager
def _hits_of_jax_cache() -> Iterator[list[str]]:
    """Collects an event for each program that this thread finds in JAX's own persistent cache."""
    hits, thread = [], get_ident()

    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)


def _finished(futures: dict[Future[None], ProgramKey], wait: bool) -> list[ProgramKey]:
    """Takes out those that are done, after a wait for at least one if asked; raises what one of them raised."""
    if wait:
        futures_wait(futures, return_when=FIRST_COMPLETED)
    done = [future for future in futures if future.done()]
    for future in done:
        future.result()
    return [futures.pop(future) for future in done]


def _workspace_bytes(program: jax.stages.Compiled) -> int | None:
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
