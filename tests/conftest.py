"""Every test runs on the CPU unless it is marked gpu; programs compiled once are shared by the whole session."""

import os

import pytest

if "JAX_PLATFORMS" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax; engine processes inherit it


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite; none besides this one for a part of it, which they would start too slowly for,
    or on a GPU, whose memory goes to one."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return 2 if is_whole and "not gpu" in config.option.markexpr else 0


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A persistent cache for this session: what one of its processes compiled, workers and engine cores reuse."""
    import jax

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    # A limit, which is not reached, has JAX lock the folder: else one process might read what another has half written.
    for name, value in {"dir": str(folder / "jax_cache"), "max_size": 1 << 34}.items():
        os.environ[f"JAX_COMPILATION_CACHE_{name.upper()}"] = str(value)
        jax.config.update(f"jax_compilation_cache_{name}", value)
