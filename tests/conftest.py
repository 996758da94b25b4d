"""Every test runs on the CPU unless it is marked gpu; programs compiled once are shared by the whole session."""

import os

import pytest

if "JAX_PLATFORMS" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax; engine processes inherit it
# Mosaic GPU's interpreter runs a kernel's warpgroups in XLA's pool of threads, where they wait for each other. As many
# threads as CI has cores, 2, come to wait for good once in a few thousand tests (1 thread does so in the first).
os.environ.setdefault("NPROC", "16")
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in two processes (of pytest-xdist), a file in one of them, neighbours after each other.

    A part of it would be done before they have started, and the memory of a GPU goes to one process.
    """
    if IS_WORKER:  # which starts like the first process
        return
    options = config.option
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not options.keyword
    is_plain = is_whole and "not gpu" in options.markexpr and not (options.collectonly or options.usepdb)
    if is_plain and config.pluginmanager.hasplugin("xdist") and options.numprocesses is None:
        # A process that ends early has met a test that hangs, and that test would be run again.
        vars(options).update(numprocesses=2, dist="loadfile", loadscopereorder=False, maxworkerrestart="0")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A persistent cache for this session: what one of its processes compiled, workers and engine cores reuse."""
    import jax

    folder = tmp_path_factory.getbasetemp()
    if IS_WORKER:
        folder = folder.parent
    # A limit, which is not reached, has JAX lock the folder: else one process might read what another has half written.
    for name, value in {"dir": str(folder / "jax_cache"), "max_size": 1 << 34}.items():
        os.environ[f"JAX_COMPILATION_CACHE_{name.upper()}"] = str(value)
        jax.config.update(f"jax_compilation_cache_{name}", value)
