"""What the sampler's GPU kernels share: one program a row, whose scalars and loops are the row's own.

They are Pallas kernels lowered through Triton, unlike the attention kernels: a row wants sums over a thread block,
gathers and scalars, and neither copies nor tensor cores. Where they cannot run, draw.py and logprobs.py do the same.
JAX means to remove this lowering from some later version, in favour of Mosaic GPU.

Letters: R rows  V vocab  G groups of GROUP_SIZE tokens
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxvllm.sampling.groups import GROUP_SIZE, token_weights
from jaxvllm.sampling.thresholds import ordered_bits
from pallas_kernels.lazy import pl, triton

TRITON_CALL = "__gpu$xla.gpu.triton"
CHUNK = 4096  # tokens of a row at a time: sums of 9 digits of each stay in registers
_GROUPS_PER_PROGRAM = 128
_NUM_WARPS = 16

Ref = Any  # of a Pallas kernel


def call_kernel(
    name: str,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    outputs: Any,
    *args: jax.Array,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> Any:
    """Run a kernel on whole arrays; `outputs` are ShapeDtypeStructs, `aliases` say which argument becomes which."""
    call = pl.pallas_call(
        kernel,
        name=name,
        out_shape=outputs,
        grid=grid,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=_NUM_WARPS),
    )
    with nullcontext() if interpret else _some_gpu():
        return call(*args)


def _some_gpu() -> AbstractContextManager[Any]:
    # Lowering asks for a GPU's name, and a process that lowers for another one has none. These kernels are for any.
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu")))


def num_groups(vocab_size: int) -> int:
    """G, the last group may be short."""
    return pl.cdiv(vocab_size, GROUP_SIZE)


@dataclass(frozen=True)
class GroupStats:
    """What a pass over logits found of each group of each row that was asked for; undefined elsewhere."""

    maxima: Any  # f32[R, G] largest logits
    weights: Any  # u32[R, G] sums of groups.token_weights, of scaled logits


def group_stats(*asked: tuple[jax.Array, jax.Array], interpret: bool = False) -> list[GroupStats]:
    """Look at all logits once.

    Args:
      asked: pairs of logits f32[R, V] and scales f32[R], which the logits are multiplied with for the weights; rows
        with 0 are left out. If two pairs have the same logits, these are read from memory once.
      interpret: run where there is no GPU.
    """
    num_rows, vocab_size = asked[0][0].shape
    count, num_asked = num_groups(vocab_size), len(asked)

    def kernel(*refs: Ref) -> None:
        row, part = pl.program_id(0), pl.program_id(1)
        groups = part * _GROUPS_PER_PROGRAM + jnp.arange(_GROUPS_PER_PROGRAM)
        ids = groups[:, None] * GROUP_SIZE + jnp.arange(GROUP_SIZE)[None, :]

        def look(logits: Ref, scale: jax.Array, maxima: Ref, weights: Ref) -> None:
            values = triton.load(logits.at[row, ids], mask=ids < vocab_size, other=-jnp.inf)
            largest = values.max(axis=1)
            found = token_weights(values * scale, (largest * scale)[:, None])
            triton.store(maxima.at[row, groups], largest, mask=groups < count)
            triton.store(weights.at[row, groups], jnp.sum(found, axis=1, dtype=jnp.uint32), mask=groups < count)

        for i in range(num_asked):
            logits, scales = refs[2 * i : 2 * i + 2]
            outputs = refs[2 * (num_asked + i) : 2 * (num_asked + i) + 2]
            scale = scales[row]
            pl.when(scale != 0)(partial(look, logits, scale, *outputs))

    grid = (num_rows, pl.cdiv(count, _GROUPS_PER_PROGRAM))
    outputs = [jax.ShapeDtypeStruct((num_rows, count), dtype) for dtype in (jnp.float32, jnp.uint32)] * num_asked
    args = [array for pair in asked for array in pair]
    found = call_kernel("group_stats", kernel, grid, outputs, *args, interpret=interpret)
    return [GroupStats(*found[2 * i : 2 * i + 2]) for i in range(num_asked)]


@dataclass(frozen=True)
class ScaledRow:
    """A row of logits, with its temperature applied."""

    number: jax.Array  # of the row
    logits: Ref  # f32[R, V]
    factor: jax.Array
    vocab_size: int

    def scale(self, logits: jax.Array) -> jax.Array:
        """Apply the temperature. A product keeps the order of the logits."""
        return logits * self.factor

    def load(self, ids: jax.Array, is_there: Any = True) -> jax.Array:
        """Scaled logits at ids; -inf behind the vocabulary, and where is_there is not."""
        mask = is_there & (ids < self.vocab_size)
        return self.scale(triton.load(self.logits.at[self.number, ids], mask=mask, other=-jnp.inf))

    def fold(self, visit: Callable[[jax.Array, jax.Array, Any], Any], state: Any) -> Any:
        """state = visit(scaled logits f32[CHUNK], which of them are tokens, state) for all tokens, in turn."""

        def step(i: jax.Array, state: Any) -> Any:
            ids = i * CHUNK + jnp.arange(CHUNK)
            return visit(self.load(ids), ids < self.vocab_size, state)

        return lax.fori_loop(0, pl.cdiv(self.vocab_size, CHUNK), step, state)


def load_groups(of_groups: Ref, row: jax.Array, missing: float) -> jax.Array:
    """What was found of the row's groups, of a length that is a power of two; `missing` behind the last."""
    count = of_groups.shape[1]
    groups = jnp.arange(pl.next_power_of_2(count))
    return triton.load(of_groups.at[row, groups], mask=groups < count, other=missing)


def first_group(values: jax.Array, largest: jax.Array) -> jax.Array:
    """The first index of the largest of f32[n] values."""
    return jnp.min(jnp.where(values == largest, jnp.arange(values.shape[0]), values.shape[0] - 1))


def select_best(
    logits: Ref, maxima: jax.Array, scratch: Ref, row: jax.Array, count: int, vocab_size: int, *, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens of the `count` groups with the largest maxima, the first of equals, in order of their ids.

    Args:
      logits: f32[R, V].
      maxima: from load_groups, -inf where missing.
      scratch: i32[R, count + 1], written.
      row: which one.
      count: a power of two.
      vocab_size: V.

    Returns: values f32[count * GROUP_SIZE], -inf in the place of missing ones; ids, i32; bound f32[], -inf if no
      group is missing: every token above it is there.
    """
    available = num_groups(vocab_size)
    wanted = min(count, available)
    is_real = jnp.arange(maxima.shape[0]) < available
    rank = jnp.where(is_real, ordered_bits(maxima), jnp.uint32(0))
    last = largest_threshold(lambda t: jnp.sum((rank >= t).astype(jnp.int32)) >= wanted)
    is_above, is_last = rank > last, (rank == last) & is_real
    num_above = jnp.sum(is_above.astype(jnp.int32))
    is_taken = is_above | (is_last & (jnp.cumsum(is_last.astype(jnp.int32)) <= wanted - num_above))
    place = jnp.where(is_taken, jnp.cumsum(is_taken.astype(jnp.int32)) - 1, count)
    triton.store(scratch.at[row, place], jnp.arange(maxima.shape[0]))
    if not interpret:  # which runs one thing after the other
        triton.debug_barrier()
    lanes = jnp.arange(count * GROUP_SIZE)
    is_there = lanes // GROUP_SIZE < wanted
    groups = triton.load(scratch.at[row, lanes // GROUP_SIZE], mask=is_there, other=0)
    ids = groups * GROUP_SIZE + lanes % GROUP_SIZE
    values = triton.load(logits.at[row, ids], mask=is_there & (ids < vocab_size), other=-jnp.inf)
    bound = -jnp.inf if wanted == available else jnp.max(jnp.where(is_last, maxima, -jnp.inf))
    return values, ids, jnp.asarray(bound, jnp.float32)


def largest_threshold(is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest t, u32[], for which is_enough(t) holds, if it holds for 0 and never again once it fails."""

    def find_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        tried = threshold | jnp.uint32(1) << (31 - i).astype(jnp.uint32)
        return jnp.where(is_enough(tried), tried, threshold)

    return lax.fori_loop(0, 32, find_bit, jnp.uint32(0))
