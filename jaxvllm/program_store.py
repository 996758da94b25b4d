"""Compiled programs on disk: a later start neither traces, nor lowers, nor compiles, it loads.

A file holds one executable and is named after everything that it depends on (`fingerprint`). Reading one runs what it
says, so only files that this user alone can write are read. What cannot be read is no error: the program is compiled.
"""

import hashlib
import json
import logging
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
SUFFIX = ".program"
TEMPORARY = ".tmp"  # of a file that is being written, or that a killed process left
_MAGIC = b"jaxvllm program 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# What becomes part of a program; of the scheduler, layouts of buffers and their sizes, from a dozen files.
_PACKAGES = ("jaxvllm", "pallas_kernels", "scheduler")
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
# JAX's settings that change what is traced or lowered.
_JAX_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_softmax_custom_jvp", "jax_debug_nans", "jax_debug_infs", "jax_enable_checks",
    "jax_use_shardy_partitioner", "jax_exec_time_optimization_effort", "jax_memory_fitting_effort",
    "jax_pgle_profiling_runs", "jax_disable_most_optimizations",
)  # fmt: skip


@dataclass(frozen=True)
class StoredProgram:
    """An executable and what the compiler said about it. workspace_bytes: None if it said nothing."""

    program: jax.stages.Compiled
    workspace_bytes: int | None


class ProgramStore:
    """A folder of executables, the least recently used of which go when it grows too large."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        """Make the folder, for this user alone; where that fails the store stays empty and a line of the log says why.

        Args:
          folder: shared by all models and versions.
          max_bytes: of all files together.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_usable = self._prepare()

    def load(self, digest: str, devices: list[jax.Device]) -> StoredProgram | None:  # pyright: ignore[reportInvalidTypeForm]
        """The program of a fingerprint, ready to run on `devices`; None if there is none that can be used."""
        if not self._is_usable:
            return None
        path = self._folder / (digest + SUFFIX)
        try:
            workspace_bytes, payload = _read(path)
            arguments = pickle.loads(payload)
            program = serialize_executable.deserialize_and_load(
                *arguments, backend=devices[0].client, execution_devices=devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a file of another origin, or a broken disk leads to
            logger.warning("Ignored %s: %s: %s", path, type(error).__name__, error)
            return None
        _touch(path)
        return StoredProgram(program, workspace_bytes)

    def save(self, digest: str, program: jax.stages.Compiled, workspace_bytes: int | None) -> None:
        """Write a program; a failure is logged and no error."""
        if not self._is_usable:
            return
        try:
            payload = pickle.dumps(serialize_executable.serialize(program))
            header = json.dumps({"workspace_bytes": workspace_bytes}).encode() + b"\n"
            body = header + payload
            _write(self._folder / (digest + SUFFIX), _MAGIC + hashlib.sha256(body).digest() + body)
            self._evict()
        except Exception as error:  # a full disk, a backend that cannot serialise
            logger.warning("Could not keep a compiled program in %s: %s: %s", self._folder, type(error).__name__, error)

    def _prepare(self) -> bool:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_is_ours(self._folder.stat(), self._folder)
        except (OSError, PermissionError) as error:
            logger.warning("Compiled programs are not kept: %s", error)
            return False
        return True

    def _evict(self) -> None:
        files = []
        for path in (*self._folder.glob("*" + SUFFIX), *self._folder.glob("*" + TEMPORARY)):
            try:
                files.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another engine evicted it
                continue
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def fingerprint(parts: Mapping[str, Any]) -> str:
    """A name for everything that a program depends on: `parts`, and code, libraries and settings of this process.

    Args:
      parts: name -> anything whose repr says all of it (dataclasses, numbers, strings).
    """
    everything = {name: repr(value) for name, value in parts.items()} | _surroundings()
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def describe_devices(devices: list[jax.Device]) -> dict[str, Any]:  # pyright: ignore[reportInvalidTypeForm]
    """What of the devices a program depends on: kind, driver and runtime."""
    first = devices[0]
    described = {
        "devices": [device.id for device in devices],
        "device_kind": first.device_kind,
        "platform": first.client.platform,
        "platform_version": first.client.platform_version,
        "compute_capability": getattr(first, "compute_capability", None),
    }
    # An executable for a CPU uses the instructions of the CPU that it was compiled on.
    return described | ({"cpu": _cpu_flags()} if first.platform == "cpu" else {})


@cache
def _surroundings() -> dict[str, str]:
    libraries = {name: version(name) for name in _LIBRARIES}
    settings = {name: repr(getattr(jax.config, name, None)) for name in _JAX_SETTINGS}
    sources = hash_of_sources(Path(__file__).resolve().parent.parent)
    return {"python": sys.version, "sources": sources} | libraries | settings


def hash_of_sources(root: Path) -> str:
    """A hash of all code under `root` that makes programs; changes with every edit."""
    paths = [path for package in _PACKAGES for path in (root / package).rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)


def _check_is_ours(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to {os.getuid()}")
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise PermissionError(f"{path} can be written by others: chmod go-w {path}")


def _read(path: Path) -> tuple[int | None, bytes]:
    """(workspace_bytes, payload) of a file that is ours and whole; raises for any other."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        _check_is_ours(status, path)
        data = file.read()
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ValueError("damaged, or not a program")
    header, _, payload = body.partition(b"\n")
    return json.loads(header)["workspace_bytes"], payload


def _write(path: Path, data: bytes) -> None:
    """Write a file that is there in whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=TEMPORARY)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:  # read-only, or evicted meanwhile
        return
