"""What the sampler's GPU kernels share: one program a row, whose scalars and loops are the row's own.

They are Pallas kernels lowered through Triton, unlike the attention kernels: a row wants sums over a thread block,
gathers and scalars, and neither copies nor tensor cores. Where they cannot run, draw.py and logprobs.py do the same.
JAX means to remove this lowering from some later version, in favour of Mosaic GPU.

Letters: R rows  V vocab  G groups of GROUP_SIZE tokens
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxvllm.sampling.groups import GROUP_SIZE
from jaxvllm.sampling.thresholds import ordered_bits

TRITON_CALL = "__gpu$xla.gpu.triton"
_GROUPS_PER_PROGRAM = 128
_NUM_WARPS = 16

Ref = Any  # of a Pallas kernel


def call_kernel(
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


def group_maxima(logits: jax.Array, is_wanted: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The largest logit of each group.

    Args:
      logits: f32[R, V].
      is_wanted: i32[R] rows with 0 are left undefined.

    Returns: f32[R, G].
    """
    num_rows, vocab_size = logits.shape
    count = num_groups(vocab_size)

    def kernel(logits: Ref, is_wanted: Ref, maxima: Ref) -> None:
        row, part = pl.program_id(0), pl.program_id(1)

        @pl.when(is_wanted[row] != 0)
        def _() -> None:
            groups = part * _GROUPS_PER_PROGRAM + jnp.arange(_GROUPS_PER_PROGRAM)
            ids = groups[:, None] * GROUP_SIZE + jnp.arange(GROUP_SIZE)[None, :]
            values = triton.load(logits.at[row, ids], mask=ids < vocab_size, other=-jnp.inf)
            triton.store(maxima.at[row, groups], values.max(axis=1), mask=groups < count)

    grid = (num_rows, pl.cdiv(count, _GROUPS_PER_PROGRAM))
    return call_kernel(
        kernel, grid, jax.ShapeDtypeStruct((num_rows, count), jnp.float32), logits, is_wanted, interpret=interpret
    )


def load_maxima(maxima: Ref, row: jax.Array) -> jax.Array:
    """The row's group maxima, f32[a power of two], -inf behind the last."""
    count = maxima.shape[1]
    groups = jnp.arange(pl.next_power_of_2(count))
    return triton.load(maxima.at[row, groups], mask=groups < count, other=-jnp.inf)


def first_group(values: jax.Array, largest: jax.Array) -> jax.Array:
    """The first index of the largest of f32[n] values."""
    return jnp.min(jnp.where(values == largest, jnp.arange(values.shape[0]), values.shape[0] - 1))


def select_best(
    logits: Ref, maxima: jax.Array, scratch: Ref, row: jax.Array, count: int, vocab_size: int, *, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens of the `count` groups with the largest maxima, the first of equals, in order of their ids.

    Args:
      logits: f32[R, V].
      maxima: from load_maxima.
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
