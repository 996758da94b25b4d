"""What the scheduler and a step ask of requests' grammars; the grammars themselves are made elsewhere."""

from typing import Protocol

import numpy as np


class RequestGrammar(Protocol):
    """The form that one request's text must have, and how far the text has come in it."""

    @property
    def is_ready(self) -> bool:
        """Whether the next step may hold the request.

        A token in flight need not keep it out: a step's masks are asked for behind its model, when that token is known.
        """
        ...

    @property
    def error(self) -> str | None:
        """Why the request cannot go on, once that is known."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why the form refuses the token sampled last, which it has been told of before the scheduler is; or None."""
        ...

    def close(self) -> None:
        """The request has ended: nothing needs to be known any more."""
        ...


class StepMasks(Protocol):
    """The masks of one step's grammars, which are known when the tokens before the step are."""

    def open(self) -> None:
        """Say that the tokens of all steps before this one have been taken in; more than once is fine."""
        ...

    def fill(self, start: int, masks: np.ndarray) -> list[bool]:
        """Write the masks of some of the grammars. Blocks until open() was called, which another thread does.

        Args:
          start: number of the first one in the step.
          masks: i32[n, words], C-contiguous; written: bit b of word w is set if token 32 * w + b may come next.

        Returns: for each of them, whether it counts; the mask of a request that has ended is arbitrary.
        """
        ...
