"""The process that made an engine. Its forks have the engine's sockets and locks too, and may not touch them."""

import os
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Owner:
    """Remembers the process in which it was made."""

    pid: int = field(default_factory=os.getpid)

    def is_here(self) -> bool:
        """Whether this is that process, and not a fork of it."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raises: RuntimeError in a fork."""
        if not self.is_here():
            raise RuntimeError(
                f"the engine belongs to process {self.pid}, of which this is a fork: make an engine of its own "
                "here, or make the engine after the fork."
            )
