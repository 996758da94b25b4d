"""Where child processes find the code that runs here."""

import site
from pathlib import Path


def checkout_root() -> str | None:
    """The folder that a child's import path needs; None if the packages are installed."""
    root = str(Path(__file__).resolve().parent.parent)
    return None if root in site.getsitepackages() else root
