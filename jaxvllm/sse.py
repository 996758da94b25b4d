"""Server-sent events as OpenAI-compatible servers send them, out of pieces of any size."""

import json
from typing import Any

DONE = "[DONE]"


class EventReader:
    """Collects bytes and gives complete events: each JSON value behind `data:`, or DONE.

    Pieces may be cut anywhere, within a character too.
    """

    def __init__(self) -> None:
        self._unread = b""

    def push(self, piece: bytes) -> list[Any]:
        """The events that are complete with this piece.

        Raises: ValueError for data that is no JSON.
        """
        *lines, self._unread = (self._unread + piece).split(b"\n")
        events = []
        for line in lines:
            name, _, value = line.partition(b":")
            if name != b"data":
                continue  # comments, and the empty lines between events
            value = value.strip()
            events.append(DONE if value == DONE.encode() else json.loads(value))
        return events
