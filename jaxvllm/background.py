"""One piece of work in a thread beside the caller's own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self


class Background[T]:
    """Runs a function in a thread from the start of the with block on.

    A block that ends with an exception does not wait for the function.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._future = self._pool.submit(function)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=error is None)

    def check(self) -> None:
        """Raise what the function raised, if it has ended with an exception; never waits."""
        if self._future.done():
            self._future.result()

    def result(self) -> T:
        """Wait for the function and give what it returns; raises what it raised."""
        return self._future.result()
