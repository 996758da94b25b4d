"""Drives a model and its paged cache directly, step by step, as the engine would: for comparing logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.layers.parameter import bind
from jaxvllm.model_config import ModelConfig

MAX_BLOCKS = 32


@dataclass
class PagedSequence:
    """One request: its tokens, its blocks, and how many tokens are in the cache."""

    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedDriver:
    """A model, its weights, and a cache that starts as NaN, so that a read of what was not written shows."""

    def __init__(
        self,
        model: nnx.Module,
        config: ModelConfig,
        params: dict[str, jax.Array],
        *,
        block_size: int = 4,
        num_blocks: int = 97,
        num_tokens: int = 64,
        num_rows: int = 3,
        put_cache=jnp.asarray,
    ):
        """`num_tokens`, `num_rows`: the padded sizes of a mixed step; decode steps have num_rows of each."""
        self.block_size, self.num_tokens, self.num_rows = block_size, num_tokens, num_rows
        shape = (config.num_layers, num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        self.kv_cache = put_cache(np.full(shape, np.nan, jnp.dtype(config.dtype)))
        self.params = params
        self.free = list(range(num_blocks - 1, 0, -1))
        self._step = jax.jit(partial(_step, model), donate_argnums=1)

    def add(self, token_ids: Sequence[int], *, shared_blocks: Sequence[int] = ()) -> PagedSequence:
        """A new request; `shared_blocks` already hold its first tokens (a prefix-cache hit)."""
        return PagedSequence(list(map(int, token_ids)), list(shared_blocks), len(shared_blocks) * self.block_size)

    @property
    def compiled_text(self) -> str:
        """The optimised HLO of the last step's program."""
        return self._step.lower(*self._last_arguments).compile().as_text()

    def preempt(self, sequence: PagedSequence) -> None:
        """Take the blocks away; the next owner finds them poisoned."""
        blocks = np.array(sequence.block_ids)
        self.kv_cache = self.kv_cache.at[:, blocks].set(jnp.nan)
        self.free += sequence.block_ids
        sequence.block_ids, sequence.num_computed = [], 0

    def step(self, scheduled: list[tuple[PagedSequence, int]]) -> list[np.ndarray]:
        """Run one step of (request, number of tokens); decode rows must come first. Logits f32[n, V] a request."""
        kind = "decode" if all(n == 1 for _, n in scheduled) else "mixed"
        padded = self.num_rows if kind == "decode" else self.num_tokens
        ids, positions, slots = np.zeros((3, padded), np.int32)
        tables = np.zeros((self.num_rows, MAX_BLOCKS), np.int32)
        seq_lens = np.zeros(self.num_rows, np.int32)
        starts = np.zeros(self.num_rows + 1, np.int32)
        start = 0
        for row, (sequence, count) in enumerate(scheduled):
            end = sequence.num_computed + count
            while len(sequence.block_ids) * self.block_size < end:
                sequence.block_ids.append(self.free.pop())
            new = np.arange(sequence.num_computed, end)
            tables[row, : len(sequence.block_ids)] = sequence.block_ids
            here = slice(start, start + count)
            ids[here], positions[here] = sequence.token_ids[sequence.num_computed : end], new
            slots[here] = tables[row, new // self.block_size] * self.block_size + new % self.block_size
            seq_lens[row] = sequence.num_computed = end
            start += count
            starts[row + 1 :] = start
        num_decodes = next((i for i, (_, n) in enumerate(scheduled) if n > 1), len(scheduled))
        scalars = (np.int32(x) for x in (num_decodes, len(scheduled), start))
        metadata = AttentionMetadata(slots, tables, seq_lens, starts, *scalars, kind=kind, backend="reference")
        arguments = (self.params, self.kv_cache, ids, positions, metadata)
        self._last_arguments = jax.tree.map(_shape_of, arguments)
        logits, self.kv_cache = self._step(*arguments)
        logits = np.asarray(logits)
        return [logits[starts[row] : starts[row + 1]] for row in range(len(scheduled))]

    def prefill(self, sequence: PagedSequence, *, chunk: int | None = None) -> np.ndarray:
        """Run all tokens that are not computed, `chunk` at a time; their logits."""
        parts = []
        while (left := len(sequence.token_ids) - sequence.num_computed) > 0:
            parts += self.step([(sequence, min(left, chunk or left))])
        return np.concatenate(parts)


def _step(model, params, kv_cache, input_ids, positions, metadata):
    bound = bind(model, params)
    attended, kv_cache = bound(input_ids, positions, kv_cache, metadata)
    return bound.compute_logits(attended), kv_cache


def _shape_of(array: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=getattr(array, "sharding", None))
