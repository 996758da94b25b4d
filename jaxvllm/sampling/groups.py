"""Groups of neighbours in the vocabulary: what a pass over a row's logits learns of each.

A token among the k largest lies in one of the k groups with the largest maxima, so these give a few thousand
candidates, which are all that a draw or a list of logprobs usually needs to look at. The weight of a group is what
draws it.

Letters: R rows  V vocab  N candidates
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

GROUP_SIZE = 64
WEIGHT_SCALE = 2.0**24  # a group's weight, 64 tokens at most, fits 31 bits


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Candidates:
    """The tokens of the best groups, in no order."""

    values: jax.Array  # f32[R, N]
    ids: jax.Array  # i32[R, N]; ids of V and above are pads with the value -inf
    bound: jax.Array  # f32[R] every token above it is a candidate, and no other token is above it
    largest: jax.Array  # f32[R] largest value of the row


def has_groups(vocab_size: int, num_groups: int) -> bool:
    """Whether the candidates of so many groups would be fewer than the vocabulary."""
    return num_groups * GROUP_SIZE < vocab_size


def in_groups(logits: jax.Array) -> jax.Array:
    """f32[R, V] as f32[R, groups, GROUP_SIZE], the last group filled up with -inf."""
    padding = -logits.shape[1] % GROUP_SIZE
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits.reshape(logits.shape[0], -1, GROUP_SIZE)


def best_groups(logits: jax.Array, num_groups: int) -> Candidates:
    """The num_groups groups with the largest maxima (the first of equals); f32[R, V] logits without NaN."""
    num_rows = logits.shape[0]
    grouped = in_groups(logits)
    maxima, index = lax.top_k(grouped.max(axis=2), num_groups)
    values = jax.vmap(lambda row, groups: row[groups])(grouped, index)
    ids = index[:, :, None] * GROUP_SIZE + jnp.arange(GROUP_SIZE)
    return Candidates(values.reshape(num_rows, -1), ids.reshape(num_rows, -1), maxima[:, -1], maxima[:, 0])


def token_weights(values: jax.Array, largest: jax.Array) -> jax.Array:
    """exp(values) as a share of the largest of their group's, in units of 1 / WEIGHT_SCALE; u32.

    Integers, so that no order of adding changes a group's weight. All -inf: 0.
    """
    shares = jnp.exp(values - jnp.where(largest > -jnp.inf, largest, 0.0))
    return jnp.floor(shares * WEIGHT_SCALE + 0.5).astype(jnp.uint32)


def first_largest(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest score, and the lowest id that has it: as argmax gives it where ids ascend. f32 and i32 [R]."""
    largest = scores.max(axis=1)
    return largest, jnp.where(scores == largest[:, None], ids, jnp.iinfo(jnp.int32).max).min(axis=1)
