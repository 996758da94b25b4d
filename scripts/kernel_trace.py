"""Device kernels of a profiler trace: how often each ran, how long, in what shape."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData

# What the profiler tells of a kernel beside its name: the operation of the program, and the launch.
_DETAILS = ("hlo_op", "name", "tf_op", "kernel_details")


@dataclass
class Kernel:
    """One kernel, by step.

    Attributes:
      calls: how often it ran.
      us: microseconds of all calls together.
      details: of one of its calls, as the profiler has them.
    """

    calls: float
    us: float
    details: dict[str, str]


def trace_kernels(step: Callable[[], object], num_steps: int) -> dict[str, Kernel]:
    """Kernels by name over some steps; `step` must end only when the device has done its work.

    Tracing turns CUDA graphs off, so the sum is the device's work and not the step's time. A device without kernels
    (the CPU) gives none.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(num_steps):
                step()
        return _read(Path(folder), num_steps)


def added_kernels(kernels: dict[str, Kernel], base: dict[str, Kernel]) -> list[tuple[str, Kernel]]:
    """What runs in addition to `base`, the longest first; kernels that differ by less than 1 us are left out."""
    nothing = Kernel(0, 0, {})
    added = []
    for name in kernels.keys() | base.keys():
        mine, other = kernels.get(name, nothing), base.get(name, nothing)
        details = mine.details or other.details
        added.append((name, Kernel(mine.calls - other.calls, mine.us - other.us, details)))
    return sorted((pair for pair in added if abs(pair[1].us) >= 1), key=lambda pair: -pair[1].us)


def _read(folder: Path, num_steps: int) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for file in folder.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(file)).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    kernel = found.setdefault(event.name, Kernel(0, 0, _details(event)))
                    kernel.calls += 1 / num_steps
                    kernel.us += event.duration_ns / 1e3 / num_steps
    return found


def _details(event) -> dict[str, str]:
    return {name: str(value) for name, value in event.stats if name in _DETAILS}
