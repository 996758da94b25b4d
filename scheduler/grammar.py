"""What the scheduler asks of a request's grammar; the grammars themselves are made elsewhere, in their own threads."""

from typing import Protocol

import numpy as np


class RequestGrammar(Protocol):
    """The form that one request's text must have, and how far the text has come in it."""

    @property
    def mask(self) -> np.ndarray | None:
        """i32[words]: bit b of word w is set if token 32 * w + b may come next. None: not known yet."""
        ...

    @property
    def error(self) -> str | None:
        """Why the request cannot go on, once that is known."""
        ...

    def accept(self, token_id: int) -> str | None:
        """Take in one sampled token; the mask is unknown afterwards. Returns why the form refuses it, or None."""
        ...

    def close(self) -> None:
        """The request has ended: nothing needs to be known any more."""
        ...
