"""Custom logits processors: a pure JAX function on logits, compiled into every step of an engine that names it."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

MAX_PROCESSORS = 31  # one bit each in a record


@dataclass(frozen=True)
class LogitsProcessor:
    """One custom processor; a request uses it with SamplingParams(extra_args={name: value}).

    Attributes:
      name: the key in extra_args.
      apply: (logits f32[R, V], params f32[R, num_params]) -> f32[R, V]. Pure, each row by itself, of any R; rows of
        requests that do not use it are put back. It sees the logits as penalties, bias and masks have left them and
        runs only in steps in which some request uses it.
      num_params: numbers that a request brings.
      parse: makes them from extra_args[name]; raises ValueError for what it does not take. Runs in the front end.
    """

    name: str
    apply: Callable[[jax.Array, jax.Array], jax.Array]
    num_params: int
    parse: Callable[[Any], Sequence[float]]

    def params_of(self, value: Any) -> list[float]:
        """The numbers for extra_args[name].

        Raises: ValueError naming the processor.
        """
        try:
            params = [float(number) for number in self.parse(value)]
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"extra_args[{self.name!r}]={value!r} is refused by its logits processor: {reason}"
            ) from error
        if len(params) != self.num_params:
            raise ValueError(f"logits processor {self.name!r} made {len(params)} numbers, not {self.num_params}.")
        return params


def load_logits_processors(specs: Sequence[str]) -> tuple[LogitsProcessor, ...]:
    """The processors that "module:attribute" names: a LogitsProcessor, or a function without arguments that makes one.

    Raises: ValueError for a name that leads nowhere or to something else, for two of the same name, for too many.
    """
    processors = tuple(_load(spec) for spec in specs)
    names = [processor.name for processor in processors]
    if len(set(names)) < len(names):
        raise ValueError(f"logits_processors={list(specs)} gives one name twice: {names}.")
    if len(names) > MAX_PROCESSORS:
        raise ValueError(f"logits_processors holds {len(names)} processors; at most {MAX_PROCESSORS} are allowed.")
    return processors


def _load(spec: str) -> LogitsProcessor:
    module, _, attribute = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"logits_processors: {spec!r} must be 'module:attribute', and be found: {error}") from error
    if not isinstance(found, LogitsProcessor) and callable(found):
        found = found()
    if not isinstance(found, LogitsProcessor):
        raise ValueError(f"logits_processors: {spec!r} is a {type(found).__name__}, not a LogitsProcessor.")
    return found
