"""Pallas, imported when a kernel is first traced: an engine whose programs are all stored traces none.

Mosaic's part of it takes a fifth of all the imports of an engine's start, Triton's a twentieth.
"""

import importlib
from typing import Any


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


def import_kernels() -> None:
    """Import all of it now, and the kernels: for a process that is going to be forked."""
    importlib.import_module("jax.experimental.pallas.triton")
    for kernels in ("decode", "prefill", "row_matmul", "skinny_matmul"):
        importlib.import_module(f"pallas_kernels.{kernels}")
