"""Compiled programs, one per bucket: ahead of serving where compiling is slow, at first use where it is not."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Literal

import jax

from scheduler.buckets import BucketKey

logger = logging.getLogger(__name__)

ProgramKey = BucketKey | Literal["admit", "masks"]


class CompileAfterWarmupError(RuntimeError):
    """In strict mode, a program was needed that had not been compiled ahead."""


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
      num_late_compiles: programs compiled by `get` rather than by `compile_all`.
    """

    def __init__(
        self,
        lower: Callable[[ProgramKey], jax.stages.Lowered],
        options: dict[str, bool | str] | None = None,
        strict: bool = False,
    ) -> None:
        """Make an empty cache.

        Args:
          lower: traces and lowers one program.
          options: compiler options.
          strict: `get` raises instead of compiling.
        """
        self._lower = lower
        self._options = options or {}
        self._strict = strict
        self._programs: dict[ProgramKey, jax.stages.Compiled] = {}
        self._lock = Lock()
        self._is_warm = False
        self.compile_seconds: dict[ProgramKey, float] = {}
        self.num_late_compiles = 0

    def compile_all(self, keys: Iterable[ProgramKey], num_threads: int = 8) -> Iterator[ProgramKey]:
        """Compile ahead; yields each key when it is ready, for a progress bar.

        Lowering runs one after the other in the given order: threads would not speed it up, and the persistent cache's
        keys depend on the order. Compiling runs in threads beside it.
        """
        self._is_warm = True
        missing: list[ProgramKey] = [key for key in keys if key not in self._programs]
        with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
            futures = []
            for key in missing:
                start = time.perf_counter()
                futures.append((key, pool.submit(self._compile, key, self._lower(key), start)))
            for key, future in futures:
                future.result()
                yield key

    def get(self, key: ProgramKey) -> jax.stages.Compiled:
        """The executable of a program, compiled now if need be.

        Raises:
          CompileAfterWarmupError: it would have to be compiled and the cache is strict.
        """
        program = self._programs.get(key)
        if program is not None:
            return program
        if self._strict:
            raise CompileAfterWarmupError(f"{key} was not compiled ahead: compile it in the warm-up.")
        start = time.perf_counter()
        self._compile(key, self._lower(key), start)
        self.num_late_compiles += 1
        # Where nothing is compiled ahead (the CPU default) the first use of each shape is meant to compile.
        level = logging.WARNING if self._is_warm else logging.INFO
        logger.log(level, "Compiled %s while serving, in %.1f s", key, self.compile_seconds[key])
        return self._programs[key]

    def programs(self) -> dict[ProgramKey, jax.stages.Compiled]:
        """All executables, for inspection."""
        return dict(self._programs)

    def _compile(self, key: ProgramKey, lowered: jax.stages.Lowered, start: float) -> None:
        program = lowered.compile(compiler_options=self._options or None)
        with self._lock:
            self._programs[key] = program
            self.compile_seconds[key] = time.perf_counter() - start
