"""How the front end reaches the engine core: in this process, or in a child process over ZeroMQ."""

import weakref
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol

from jaxvllm.config import EngineConfig
from jaxvllm.core_messages import CoreMetrics, EngineCoreInfo, EngineCoreRequest
from jaxvllm.errors import EngineDeadError
from jaxvllm.interrupt import DeferredInterrupt
from jaxvllm.owner import Owner
from scheduler.outputs import EngineCoreOutputs

if TYPE_CHECKING:
    from jaxvllm.core import EngineCore


class CoreClient(Protocol):
    """The core as the front end sees it. Every method raises EngineDeadError once the core has died."""

    def wait_until_ready(self) -> EngineCoreInfo:
        """Block until the core serves; call once, first. Raises what its start raised (ValueError for a bad model)."""
        ...

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """Queue requests; does not wait."""
        ...

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests early; unknown and finished ids are ignored. Each that was running ends with reason abort."""
        ...

    def get_outputs(self) -> EngineCoreOutputs:
        """What comes next; blocks while requests are running."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests hold blocks."""
        ...

    def metrics(self) -> CoreMetrics:
        """The core's state now, in numbers."""
        ...

    def shutdown(self) -> None:
        """End the core and free the device; may be called again."""
        ...


def make_client(config: EngineConfig, multiprocess: bool, give_up: Event | None = None) -> CoreClient:
    """Start a core: its process loads the model while the caller goes on (see wait_until_ready).

    Args:
      give_up: of a core process, see MPClient.
    """
    if not multiprocess:
        return InprocClient(config)
    from jaxvllm.mp_client import MPClient  # late: msgspec and pyzmq may be missing

    return MPClient(config, give_up)


class InprocClient:
    """The core in this process, stepped by get_outputs(): for debugging, and where msgspec or pyzmq are missing."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EngineCore | None = None
        self._stop: weakref.finalize | None = None
        self._failure: Exception | None = None
        self._owner = Owner()

    def wait_until_ready(self) -> EngineCoreInfo:
        """See CoreClient."""
        with self._config.applied_core_environment():
            from jaxvllm.core import EngineCore, make_executor  # a front end with a core process never imports the core

            self._core = EngineCore(self._config, make_executor(self._config))
        self._stop = weakref.finalize(self, _stop_core, self._core, self._owner)  # also at the interpreter's end
        return self._core.info

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """See CoreClient."""
        for request in requests:
            self._alive().add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """See CoreClient."""
        self._alive().abort_requests(request_ids)

    def get_outputs(self) -> EngineCoreOutputs:
        """See CoreClient."""
        core = self._alive()
        outputs = None
        while outputs is None and core.has_work():
            try:
                with DeferredInterrupt():  # half a step would leave the scheduler and the device with two truths
                    outputs = core.step()
            except Exception as error:
                self._failure = error
                raise EngineDeadError(f"the engine core died: {type(error).__name__}: {error}") from error
        return outputs or EngineCoreOutputs()

    def reset_prefix_cache(self) -> bool:
        """See CoreClient."""
        return self._alive().reset_prefix_cache()

    def metrics(self) -> CoreMetrics:
        """See CoreClient."""
        return self._alive().metrics()

    def shutdown(self) -> None:
        """See CoreClient."""
        self._core = None
        if self._stop is not None:
            self._stop()

    def _alive(self) -> Any:
        self._owner.check()
        if self._failure is not None:
            raise EngineDeadError(f"the engine core died: {self._failure}") from self._failure
        if self._core is None:
            raise EngineDeadError("the engine has been shut down.")
        return self._core


def _stop_core(core: "EngineCore", owner: Owner) -> None:
    if owner.is_here():
        core.shutdown()
