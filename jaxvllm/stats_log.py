"""The line of statistics that an engine writes to its log every 10 seconds, in vLLM's words."""

import logging
import time

from jaxvllm.core_messages import CoreMetrics
from jaxvllm.metrics import FrontEndStats

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


class StatsLog:
    """Writes the line for one engine; who drives the engine asks is_due() and then the core for its state."""

    def __init__(self, stats: FrontEndStats, interval_s: float = LOG_INTERVAL_S) -> None:
        self._stats = stats
        self._interval_s = interval_s
        self._since = time.monotonic()
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._was_idle = False

    def is_due(self) -> bool:
        """Whether it is time for the next line."""
        return time.monotonic() - self._since >= self._interval_s

    def write(self, core: CoreMetrics) -> None:
        """Write the line, unless nothing has happened for two of them; `core` is the core's state now."""
        now = time.monotonic()
        elapsed = now - self._since
        stats, state = self._stats, core.scheduler
        stats.core = core
        num_prompt = stats.num_prompt_tokens - self._num_prompt_tokens
        num_generated = stats.num_generation_tokens - self._num_generation_tokens
        is_idle = not (num_prompt or num_generated or state.num_running_reqs or state.num_waiting_reqs)
        logger.log(
            logging.DEBUG if is_idle and self._was_idle else logging.INFO,
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            num_prompt / elapsed,
            num_generated / elapsed,
            state.num_running_reqs,
            state.num_waiting_reqs,
            100 * state.kv_cache_usage,
            100 * state.prefix_cache_hits / max(1, state.prefix_cache_queries),
        )
        self._since, self._was_idle = now, is_idle
        self._num_prompt_tokens, self._num_generation_tokens = stats.num_prompt_tokens, stats.num_generation_tokens
