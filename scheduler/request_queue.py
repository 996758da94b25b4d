"""Requests that wait for admission: first come first served, or by priority."""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from scheduler.request import Request


class RequestQueue(ABC):
    """An ordered set of waiting requests with removal by id in constant time."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Put a new request in its place."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """Return a pre-empted request."""

    @abstractmethod
    def peek(self) -> Request:
        """The request to admit next; it stays."""

    @abstractmethod
    def pop(self) -> Request:
        """Take the request to admit next."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""

    @abstractmethod
    def __contains__(self, request: Request) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In the order of admission."""


class FCFSQueue(RequestQueue):
    """First come first served; a pre-empted request returns to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Append to the end."""
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Put to the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The request that waits longest."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Take the request that waits longest."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._requests[request.request_id]

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue(RequestQueue):
    """Smallest (priority, arrival time, id) first; a pre-empted request gets no better place than its key gives.

    A removed request stays in the heap as a dead entry until it surfaces: an entry lives only while it is the one that
    `_entries` holds for its id.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], int, Request]] = []
        self._entries: dict[str, tuple[tuple[int, float, str], int, Request]] = {}
        self._num_added = 0  # makes entries of one request distinct and never compares requests

    def add(self, request: Request) -> None:
        """Put a request where its key belongs."""
        entry = (request.sort_key, self._num_added, request)
        self._num_added += 1
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def put_back(self, request: Request) -> None:
        """Put a request where its key belongs."""
        self.add(request)

    def peek(self) -> Request:
        """The most urgent request."""
        self._drop_dead()
        return self._heap[0][2]

    def pop(self) -> Request:
        """Take the most urgent request."""
        self._drop_dead()
        request = heapq.heappop(self._heap)[2]
        del self._entries[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + 16:  # mostly dead: bound the memory
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in sorted(self._entries.values()))

    def _drop_dead(self) -> None:
        while self._entries.get(self._heap[0][2].request_id) is not self._heap[0]:
            heapq.heappop(self._heap)


def make_request_queue(policy: Literal["fcfs", "priority"]) -> RequestQueue:
    """The queue of a scheduling policy."""
    return FCFSQueue() if policy == "fcfs" else PriorityQueue()
