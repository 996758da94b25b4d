"""What a measurement is of: every JSON of the scripts says it."""

import json
import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any


def write(path: Path, measured: dict[str, Any]) -> None:
    """Write a measurement with its provenance, and the folders on its way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(provenance() | measured, indent=1) + "\n")


@cache
def provenance() -> dict[str, Any]:
    """The commit, the versions that matter and the GPU, which need not be free: the driver is asked, not JAX.

    A copy of the tree without git's own files takes the commit from the environment variable COMMIT.
    """
    versions = {name: version(name) for name in ("jax", "jaxlib", "flax")} | {"python": platform.python_version()}
    here = str(Path(__file__).parent)
    commit = os.environ.get("COMMIT") or _output("git", "-C", here, "describe", "--always", "--dirty")
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {"commit": commit or "unknown", "versions": versions, "gpu": gpu or "none"}


def _output(*command: str) -> str:
    """What a command says; nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
