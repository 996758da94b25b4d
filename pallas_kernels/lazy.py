"""Pallas, imported when a kernel is first traced: an engine whose programs are all stored traces none.

Mosaic's part of it takes a fifth of all the imports of an engine's start, Triton's a twentieth.
"""

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

from jax._src import lib


class LazyModule:
    """A module that is imported when something of it is first needed; for any number of threads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


# Typed Any: the annotations of these modules reject how jax's own kernels call them.
pl: Any = LazyModule("jax.experimental.pallas")
plgpu: Any = LazyModule("jax.experimental.pallas.mosaic_gpu")
triton: Any = LazyModule("jax.experimental.pallas.triton")


def find_mosaic_runtime() -> None:
    """Tell XLA where the library lies that its Mosaic kernels call, as `jax.experimental.mosaic.gpu` does on import.

    For a process that compiles or loads what another one traced; without it no such program can be compiled. Without
    JAX's CUDA plugin it does nothing.
    """
    with contextlib.suppress(ImportError):
        extension = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
        library = Path(extension.__file__).with_name("libmosaic_gpu_runtime.so")
        os.environ["MOSAIC_GPU_CUDA_ROOT"] = lib.cuda_path or "/usr/local/cuda"
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(library)


def import_kernels() -> None:
    """Import all of it now, and the kernels: for a process that is going to be forked."""
    importlib.import_module("jax.experimental.pallas.triton")
    for kernels in ("decode", "prefill", "row_matmul", "skinny_matmul"):
        importlib.import_module(f"pallas_kernels.{kernels}")
