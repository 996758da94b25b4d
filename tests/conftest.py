"""Every test runs on the CPU unless it is marked gpu; programs compiled once are shared by the whole session."""

import os

import pytest

if "JAX_PLATFORMS" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax; engine processes inherit it


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A persistent cache for this session: processes that the tests start reuse what others compiled."""
    import jax

    path = str(tmp_path_factory.mktemp("jax_cache"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = path
    jax.config.update("jax_compilation_cache_dir", path)
