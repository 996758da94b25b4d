"""The progress bar of a batch, in vLLM's words."""

import time
from collections.abc import Callable
from typing import Any

from jaxvllm.outputs import RequestOutput


class Progress:
    """Counts finished requests and estimates the speed.

    Args:
      use_tqdm: False: no bar; True: tqdm's; else a function called as tqdm is.
    """

    def __init__(self, num_requests: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._num_input_tokens = self._num_output_tokens = 0
        self._start = time.perf_counter()
        self._bar = None
        if use_tqdm:
            if use_tqdm is True:
                from tqdm.auto import tqdm as use_tqdm
            self._bar = use_tqdm(
                total=num_requests, desc="Processed prompts", dynamic_ncols=True, postfix=_speeds(0.0, 0.0)
            )

    def finish(self, output: RequestOutput) -> None:
        """One more request is done."""
        if self._bar is None:
            return
        num_completions = len(output.outputs)
        self._num_input_tokens += len(output.prompt_token_ids) * num_completions
        self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        self._bar.postfix = _speeds(self._num_input_tokens / elapsed, self._num_output_tokens / elapsed)
        self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _speeds(input_speed: float, output_speed: float) -> str:
    return f"est. speed input: {input_speed:.2f} toks/s, output: {output_speed:.2f} toks/s"
