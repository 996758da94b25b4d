"""What the core says, on its way from a thread that waits for it to an event loop that must not wait."""

import asyncio
import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxvllm.core_messages import UtilityResult
from jaxvllm.errors import EngineDeadError
from jaxvllm.mp_client import MPClient
from scheduler.outputs import EngineCoreOutputs

Message = EngineCoreOutputs | UtilityResult | EngineDeadError


class Inbox:
    """Messages on their way to a loop; those that come while there is no loop wait for one.

    Args:
      handle: called in the loop with each message; held weakly.
    """

    def __init__(self, handle: "weakref.WeakMethod[Callable[[Message], None]]") -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._handle = handle
        self._messages: deque[Message] = deque()

    def use(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver to this loop from now on; for the loop's thread."""
        self.loop = loop
        self._deliver()

    def put(self, message: Message) -> None:
        """Take a message; for the reader thread."""
        self._messages.append(message)
        loop = self.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the next one gets it
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        handle = self._handle()
        while handle is not None and self._messages:
            handle(self._messages.popleft())


def read_core(client: MPClient, inbox: Inbox) -> None:
    """The reader thread: its last message is what the core died of."""
    while True:
        try:
            message = client.receive()
        except EngineDeadError as error:
            inbox.put(error)
            return
        inbox.put(message)


def split_outputs(outputs: EngineCoreOutputs, size: int) -> list[EngineCoreOutputs]:
    """Cut outputs into parts with at most `size` tokens each, in order.

    Columns (lists parallel to request_ids) are sliced; what is kept by request id goes with the request's token, or
    into the last part; what is of the step is in every part.
    """
    num_tokens = len(outputs.request_ids)
    if num_tokens <= size:
        return [outputs]
    values = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    shared = {name: value for name, value in values.items() if not isinstance(value, dict | list)}
    rest = {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
    parts = []
    for start in range(0, num_tokens, size):
        ids = outputs.request_ids[start : start + size]
        is_last = start + size >= num_tokens
        part: dict[str, Any] = shared | {
            n: v[start : start + size] for n, v in values.items() if isinstance(v, list) and v
        }
        for name, by_id in rest.items():
            part[name] = by_id if is_last else {i: by_id.pop(i) for i in ids if i in by_id}
        parts.append(EngineCoreOutputs(**part))
    return parts
