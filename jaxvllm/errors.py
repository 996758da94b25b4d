"""Errors that callers may want to catch by name."""


class EngineDeadError(RuntimeError):
    """The engine core has died; the message says of what. Every running request is lost: build a new engine."""
