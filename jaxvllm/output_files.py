"""Files that a command writes at its end: whether it can is found out before its work, which may take an hour."""

from pathlib import Path


def check_can_write(option: str, path: str | Path | None) -> None:
    """Open a file for writing, and leave everything as it was. None is no file.

    Args:
      option: that named it, for the message.

    Raises: OSError that names option and path.
    """
    if path is None or (Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir()):
        return  # a pipe's or a terminal's other end would hear of it
    path = Path(path)
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise OSError(f"{option} {path} cannot be written: {error.strerror or error}.") from error
    if is_new:
        path.unlink(missing_ok=True)


def check_can_plot() -> None:
    """Find out whether there is something to plot with.

    Raises: ImportError that says how to get matplotlib.
    """
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise ImportError(
            f"--plot needs matplotlib ({error}): `uv run --extra plot jaxvllm ...` in a clone installs it."
        ) from error
