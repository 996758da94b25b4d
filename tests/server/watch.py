"""What a server is like for everybody else while a test keeps it busy."""

import threading
import time
from typing import Self

from tests.server.process import Server


class Watch(threading.Thread):
    """Runs beside a test until the block ends; keeps the longest time that it had to wait."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.longest_s, self.is_over = server, 0.0, threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc) -> None:
        self.is_over.set()
        self.join()


class HealthWatch(Watch):
    """Asks /health every 50 ms; keeps the longest time that an answer took."""

    def run(self) -> None:
        while not self.is_over.wait(0.05):
            start = time.monotonic()
            assert self.server.get("/health").status == 200
            self.longest_s = max(self.longest_s, time.monotonic() - start)


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
