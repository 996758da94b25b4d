"""Compiled programs from one start to the next: found when nothing changed, never when anything did."""

import dataclasses
import logging
import os
import re
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxvllm import program_store
from jaxvllm.compile_cache import CompileCache, StoredPrograms
from jaxvllm.program_store import ProgramStore, fingerprint, hash_of_sources
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, explicit
from tests.engine.toy import Loop, make_runner

ROOT = Path(program_store.__file__).parent.parent
LIMITS = BatchLimits(2, 32, 4)
POLICY = explicit(2, 16, [2], [16])
KEYS = [BucketKey("decode", n, n) for n in (3, 5)]


@pytest.fixture(autouse=True)
def no_jax_cache():
    """Every program is compiled, as in a first start."""
    with_cache = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", with_cache)
    compilation_cache.reset_cache()


@pytest.fixture
def store(tmp_path) -> ProgramStore:
    return ProgramStore(tmp_path / "programs")


def lower(key: BucketKey) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * 2 + key.T).lower(jax.ShapeDtypeStruct((key.T,), np.float32))


def start(store: ProgramStore, salt: int = 0, lower=lower, **options) -> CompileCache:
    """A cache that has prepared both programs."""
    stored = StoredPrograms(store, lambda key: fingerprint({"key": key, "salt": salt}), jax.devices()[:1])
    cache = CompileCache(lower, stored=stored, **options)
    assert set(cache.compile_all(KEYS)) == set(KEYS)
    for key in KEYS:
        assert cache.get(key)(np.ones(key.T, np.float32)).tolist() == [2 + key.T] * key.T
    return cache


def counts(cache: CompileCache) -> tuple[int, int]:
    """(compiled, loaded)."""
    return len(cache.compile_seconds), len(cache.load_seconds)


def files(store: ProgramStore):
    return sorted(store._folder.glob("*.program"))


def fail_to_lower(key):
    raise AssertionError(f"{key} was lowered")


def test_a_second_start_loads_every_program_and_lowers_none(store):
    first = start(store)
    second = start(store, lower=fail_to_lower)
    assert (counts(first), counts(second)) == ((2, 0), (0, 2))
    for key in KEYS:
        assert second.workspace_bytes(key) == first.workspace_bytes(key) is not None


def test_the_steps_of_a_runner_come_back_whole_with_donation_and_the_same_tokens(store):
    def tokens(runner) -> list[int]:
        loop = Loop(LIMITS, POLICY, runner)
        loop.add("a", [1, 2, 3], 5)
        return loop.run()["a"]

    first = make_runner(LIMITS, POLICY, 17, store=store)
    assert set(first.warm_up()) >= set(POLICY.keys())
    expected = tokens(first)
    second = make_runner(LIMITS, POLICY, 17, store=store, strict_compile=True)
    pool = second.kv_cache
    assert tokens(second) == expected
    assert pool is not None and pool.is_deleted()
    # Loading at first use is no compile.
    assert counts(second.programs) == (0, 2) and second.programs.num_late_compiles == 0


def test_every_part_of_a_runner_changes_the_names_of_its_programs():
    base = {"limits": LIMITS, "policy": POLICY, "num_blocks": 17, "model": "llama"}

    def name(change=None, **parts) -> str:
        runner = make_runner(**base | parts)
        runner.config = dataclasses.replace(runner.config, **change or {})
        return runner._fingerprint(POLICY.keys()[0])

    kv_cache = make_runner(**base).config.kv_cache
    names = [
        name(),
        name(num_blocks=19),
        name(limits=BatchLimits(2, 36, 4)),
        name(model="qwen"),
        name(backend="mosaic_gpu_interpret"),
        name({"kv_cache": dataclasses.replace(kv_cache, num_layers=9)}),
        name({"num_heads": 9}),
    ]
    assert len(set(names)) == len(names) and name() == names[0]


def test_every_edit_of_the_code_changes_the_fingerprint(tmp_path):
    edited = ("jaxvllm/step.py", "jaxvllm/layers/mlp.py", "pallas_kernels/decode.py", "scheduler/plan.py")
    for path in edited:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("a = 1\n")
    seen = {hash_of_sources(tmp_path)}
    for path in edited:
        (tmp_path / path).write_text("a = 2\n")
        seen.add(hash_of_sources(tmp_path))
    assert len(seen) == 1 + len(edited)


def scheduler_modules_of(path: Path) -> set[Path]:
    """The scheduler's files that a file imports, and those that they import."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for name in re.findall(r"^\s*from scheduler\.(\w+) import", waiting.pop().read_text(), re.MULTILINE):
            module = ROOT / "scheduler" / f"{name}.py"
            if module not in found:
                found.add(module)
                waiting.append(module)
    return found


def test_an_edit_of_what_traced_code_takes_from_the_scheduler_changes_the_fingerprint(tmp_path):
    traced = [ROOT / "jaxvllm" / f"{name}.py" for name in ("step", "device_state", "model_runner")]
    traced += (ROOT / "jaxvllm" / "sampling").glob("*.py")
    modules = set().union(*map(scheduler_modules_of, traced))
    # field_checks.py: by way of another.
    assert {"plan.py", "token_lists.py", "field_checks.py"} <= {module.name for module in modules}
    for package in ("jaxvllm", "pallas_kernels", "scheduler"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    before = hash_of_sources(tmp_path)
    not_hashed = []
    for module in modules:
        copy = tmp_path / module.relative_to(ROOT)
        text = copy.read_text()
        copy.write_text(text + "\nA_CONSTANT = 1\n")
        if hash_of_sources(tmp_path) == before:
            not_hashed.append(module.name)
        copy.write_text(text)
    assert not not_hashed


def test_settings_of_jax_are_part_of_the_fingerprint():
    before = fingerprint({"key": 1})
    assert before == fingerprint({"key": 1}) != fingerprint({"key": 2})
    program_store._surroundings.cache_clear()
    with jax.default_matmul_precision("float32"):
        changed = fingerprint({"key": 1})
    program_store._surroundings.cache_clear()
    assert changed != before == fingerprint({"key": 1})


def damage(path, how: str) -> None:
    data = path.read_bytes()
    if how == "flipped":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        path.write_bytes(b"something else altogether" * 100)
    elif how == "others may write":
        path.chmod(0o666)
    elif how == "link":
        target = path.with_suffix(".target")
        path.rename(target)
        path.symlink_to(target)
    elif how == "folder":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "foreign", "others may write", "link", "folder"])
def test_an_entry_that_cannot_be_trusted_is_ignored_with_a_line_in_the_log(store, caplog, how):
    start(store)
    for path in files(store):
        damage(path, how)
    with caplog.at_level(logging.WARNING):
        assert counts(start(store)) == (2, 0)
    assert sum(record.message.startswith("Ignored ") for record in caplog.records) == 2
    if how != "folder":  # and it is written anew
        assert counts(start(store)) == (0, 2)


def test_an_entry_of_another_user_is_ignored(store, monkeypatch, caplog):
    start(store)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with caplog.at_level(logging.WARNING):
        assert counts(start(store)) == (2, 0)
    assert "belongs to user" in caplog.text


def test_a_folder_that_others_can_write_is_not_used(tmp_path, caplog):
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        store = ProgramStore(folder)
    assert "can be written by others: chmod go-w" in caplog.text
    start(store)
    assert not files(store)


def test_a_folder_that_cannot_be_made_costs_the_cache_and_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        store = ProgramStore(tmp_path / "file" / "programs")
    assert "Compiled programs are not kept" in caplog.text
    assert counts(start(store)) == (2, 0)


def test_an_entry_that_cannot_even_be_looked_for_is_ignored(tmp_path, caplog):
    too_long_a_name = "0" * 300  # a disk that fails and a folder without the right to search it raise the same way
    assert ProgramStore(tmp_path / "programs").load(too_long_a_name, jax.devices()) is None
    assert "Ignored" in caplog.text


def test_files_are_for_this_user_alone_and_nothing_is_left_of_a_write_that_failed(store, monkeypatch, caplog):
    start(store)
    assert store._folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(store))
    before = files(store)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with caplog.at_level(logging.WARNING):
        assert counts(start(store, salt=1)) == (2, 0)
    assert "disk full" in caplog.text and sorted(store._folder.iterdir()) == before


def test_the_least_recently_used_programs_go_when_the_folder_is_full(store):
    for salt in range(3):
        start(store, salt)
    oldest = files(store)
    for path in oldest:
        os.utime(path, (1000, 1000))
    start(store, 1)  # used, so no longer the oldest
    used = {path for path in oldest if path.stat().st_mtime > 1000}
    assert len(used) == 2
    bounded = ProgramStore(store._folder, max_bytes=int(4.5 * max(path.stat().st_size for path in oldest)))
    start(bounded, 3)
    assert used < set(files(bounded)) and len(files(bounded)) == 4


def test_what_a_killed_process_left_half_written_counts_and_goes_first(store):
    start(store)
    left = store._folder / ".abc.tmp"
    left.write_bytes(b"x" * sum(path.stat().st_size for path in files(store)))
    os.utime(left, (1000, 1000))
    before = files(store)
    bounded = ProgramStore(store._folder, max_bytes=int(2.5 * left.stat().st_size))
    start(bounded, 1)
    assert not left.exists() and set(before) < set(files(store))


def test_two_starts_at_once_leave_whole_files(store):
    with ThreadPoolExecutor(2) as pool:
        caches = list(pool.map(partial(start, store), [7, 7]))
    assert all(sum(counts(cache)) == 2 for cache in caches)
    assert counts(start(store, 7)) == (0, 2)


def test_a_program_is_kept_in_the_store_or_in_jaxs_own_cache_and_never_in_both(tmp_path):
    # XLA leaves parts out when it serialises for a CPU what it has itself read: "Function ... not found".
    settings = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in settings}
    marker = uuid.uuid4().hex

    def lower_for_this_test(key: Any) -> jax.stages.Lowered:
        """Of a name that JAX's cache, which tests share, does not know."""

        def program(x: jax.Array) -> jax.Array:
            return x * 2 + key.T

        program.__name__ = f"program_{marker}"
        return jax.jit(program).lower(jax.ShapeDtypeStruct((key.T,), np.float32))

    jax.config.update("jax_enable_compilation_cache", True)
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        stores = [ProgramStore(tmp_path / name) for name in "abc"]
        for store in stores[:2]:  # the second finds nothing in JAX's cache
            start(store, lower=lower_for_this_test)
            jax.clear_caches()
        assert [len(files(store)) for store in stores] == [2, 2, 0]
        assert set(CompileCache(lower_for_this_test).compile_all(KEYS)) == set(KEYS)  # no store: it goes there
        jax.clear_caches()
        start(stores[2], lower=lower_for_this_test)
        assert not files(stores[2])
        assert counts(start(stores[0])) == (0, 2)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_an_error_of_one_compile_ends_the_others():
    def lower_or_fail(key: BucketKey) -> jax.stages.Lowered:
        if key is KEYS[1]:
            raise ValueError("cannot be lowered")
        return lower(key)

    cache = CompileCache(lower_or_fail)
    with pytest.raises(ValueError, match="cannot be lowered"):
        list(cache.compile_all(KEYS))
