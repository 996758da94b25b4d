"""Makes the engine's executor. What a start on a GPU waits for longest begins before the executor's slow imports."""

import contextlib
import os
from threading import Thread
from typing import TYPE_CHECKING

from jaxvllm.checkout import checkout_root
from jaxvllm.config import EngineConfig, lowering_environment
from jaxvllm.lowering_processes import LoweringProcesses

if TYPE_CHECKING:
    from jaxvllm.executor import DeviceExecutor

MAX_LOWERING_PROCESSES = 16


def make_executor(config: EngineConfig) -> "DeviceExecutor":
    """The executor that an engine uses unless it is told otherwise."""
    lowering = start_lowering(config) if config.compile.ahead else None
    if config.device == "gpu":
        Thread(target=_start_device, daemon=True).start()
    from jaxvllm.executor import DeviceExecutor

    return DeviceExecutor(config, lowering)


def start_lowering(config: EngineConfig) -> LoweringProcesses | None:
    """Processes that lower the steps of a GPU, as many as compile; None where this process has to.

    They import while the caller does, so that a first start need not wait for them. If all programs turn out to be
    stored, that was a few seconds of one of many CPUs.
    """
    if config.device == "cpu" or config.logits_processors:  # custom processors need not exist in another process
        return None
    limit = min(MAX_LOWERING_PROCESSES, os.cpu_count() or 1)
    return LoweringProcesses(lowering_environment(checkout_root()), limit)


def _start_device() -> None:
    """Have JAX start its device client while the imports go on: on a GPU that takes a second or more."""
    import jax

    with contextlib.suppress(Exception):  # the executor asks again, and tells
        jax.devices()
