"""Thread blocks that wait for each other, in the interpreter: all run at once, and the counters are played.

The interpreter runs a grid's thread blocks one after the other, but those of a cluster at once, and it knows no inline
PTX: what matmul_arrivals says in it is read from it here.
"""

import functools
import inspect
import re
import threading
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

from pallas_kernels.common import plgpu

TIMEOUT_S = 300  # for a machine that is busy


class PlayedCounters:
    """The counters by index, and which functions were called: by kernels of `module`, until monkeypatch is undone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.values: dict[int, int] = {}
        self.calls: list[str] = []
        self._changed = threading.Condition()
        interpret = functools.partialmethod(_interpret, counters=self)
        monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_inline_mgpu_p", interpret)
        monkeypatch.setattr(module, "plgpu", _ClusterForGrid())

    def call(self, name: str, ptx: str, token: np.ndarray, index: np.ndarray) -> np.ndarray:
        """One of the functions of matmul_arrivals."""
        numbers = [int(number) for number in re.findall(r"(?:seen|before), (\d+);", ptx)]
        at = int(index)
        with self._changed:
            self.calls.append(name)
            if name.startswith("wait"):
                there = self._changed.wait_for(lambda: self.values.get(at, 0) >= numbers[0], TIMEOUT_S)
                assert there, f"{name}({at}) waits for {numbers[0]}: {self.values}"
            before = self.values.get(at, 0)
            if name != "wait_for_arrivals":
                self.values[at] = before + 1
            if name == "wait_for_parts" and before == numbers[1]:
                self.values[at] = 0
            if name == "reset_arrivals" and before == numbers[0]:
                self.values |= dict.fromkeys(range(at + 1), 0)
            self._changed.notify_all()
        return np.asarray(token)


def _interpret(self: Any, eqn: Any, token: Any, get_values: Any, *, counters: PlayedCounters) -> tuple[Any, list]:
    of_call = inspect.getclosurevars(eqn.params["mgpu_fn"]).nonlocals
    run, known = of_call["run"], of_call["known"]
    name = run.__qualname__.partition(".")[0]
    ptx = " ".join(text for text in inspect.getclosurevars(run).nonlocals.values() if isinstance(text, str))
    index = known[0] if known else get_values()[eqn.params["pytree_args"].num_leaves - 1]
    play = functools.partial(counters.call, name, ptx)
    return callback.io_callback(play, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, jnp.int32(index)), []


class _ClusterForGrid:
    """plgpu, with a grid of one cluster."""

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)

    @staticmethod
    def Mesh(*, grid: tuple[int, ...], grid_names: tuple[str, ...], **others: Any) -> Any:  # noqa: N802
        return plgpu.Mesh(grid=(1,), grid_names=("one",), cluster=grid, cluster_names=grid_names, **others)
