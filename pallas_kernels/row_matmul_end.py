"""What follows a product of 16 to 256 rows: norm, bias, activation, gate, residual, and the next norm's beginning.

Letters: T rows (tokens)  N outputs
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import LANES, WARPS, Ref, div, full, pl, plgpu, spread, tiled_layout
from pallas_kernels.matmul_unit import activate
from pallas_kernels.row_matmul_sizes import RowMatmulRefs, RowMatmulSizes

_SQUARES_AT_ONCE = 16  # for loads to overlap


@dataclass(frozen=True)
class Place:
    """What a CTA computes at a time: a unit of outputs of some tokens, from a part of K."""

    part: jax.Array
    group: jax.Array
    unit: jax.Array
    first_token: jax.Array

    @classmethod
    def of(cls, sizes: RowMatmulSizes, index: jax.Array) -> "Place":
        """Of all places in order; those that share a unit follow each other."""
        group = div(index, sizes.parts)
        token_tile = div(group, sizes.num_units)
        unit = group - token_tile * sizes.num_units
        return cls(index - group * sizes.parts, group, unit, token_tile * sizes.tokens)


def my_places(sizes: RowMatmulSizes, refs: RowMatmulRefs) -> tuple[jax.Array, jax.Array]:
    """The first place of this CTA, and how many it has: each grid-th from there on, none for a layer -1."""
    first = lax.axis_index("cta")
    if sizes.first_cta:
        first = first + (sizes.grid - sizes.first_cta)
        first = jnp.where(first >= sizes.grid, first - sizes.grid, first)
    end = jnp.where(refs.layer(sizes) >= 0, sizes.num_places, 0)
    if sizes.has_one_place_each:
        return first, jnp.where(first < end, 1, 0)
    return first, div(jnp.maximum(end - first + (sizes.grid - 1), 0), sizes.grid)


@functools.cache
def _row_layout(rows: int, columns: int) -> Any:
    """[rows, columns] by whole rows: a warp has one or more, a thread up to 4 numbers next to each other."""
    vector = next(n for n in (4, 2, 1) if rows % (WARPS * LANES * n // columns) == 0)
    of_warp = LANES * vector // columns
    tiles = (WARPS * of_warp, columns), (of_warp, columns), (1, vector)
    return tiled_layout(*tiles, warp_dims=(-6,), lane_dims=(-4, -3))


@functools.cache
def _token_layout(tokens: int) -> Any:
    """[tokens], each warp all of them."""
    lanes = next(n for n in (32, 16, 8) if tokens % n == 0)
    lane_dims = (-2,) if lanes == LANES else (plgpu.Replicated(LANES // lanes), -2)
    return tiled_layout((lanes,), (1,), warp_dims=(plgpu.Replicated(WARPS),), lane_dims=lane_dims)


def _load(ref: Ref, layout: Any) -> jax.Array:
    """As float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def write_rstd(sizes: RowMatmulSizes, refs: RowMatmulRefs, place: Place, rstd_smem: Ref) -> None:
    """f32[tokens] 1 / rms of what x was, from the sums of squares of its units, in their order."""
    tokens = pl.ds(place.first_token, sizes.tokens)
    layout = _token_layout(sizes.tokens)
    at_once = next(n for n in range(_SQUARES_AT_ONCE, 0, -1) if sizes.num_squares % n == 0)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        parts = [_load(refs.squares.at[i * at_once + j, tokens], layout) for j in range(at_once)]
        return functools.reduce(operator.add, parts, total)

    total = lax.fori_loop(0, sizes.num_squares // at_once, add, full((sizes.tokens,), 0.0, layout))
    rstd_smem[...] = lax.rsqrt(total * (1.0 / sizes.num_inputs) + sizes.eps)
    plgpu.commit_smem()


class Results:
    """A CTA's share of the results: some rows of a unit, [end_rows, columns] in registers at a time."""

    def __init__(self, sizes: RowMatmulSizes, refs: RowMatmulRefs, place: Place):
        """Load what does not depend on the product, long before it is there."""
        self._sizes, self._refs, self._place = sizes, refs, place
        # Clamped for CTAs that have no results, which load for nothing then.
        self._first_row = jnp.minimum(place.part, sizes.num_enders - 1) * sizes.rows_each
        self._shape = (sizes.end_rows, sizes.columns)
        self._layout = _row_layout(*self._shape)
        self._outputs = pl.ds(place.unit * sizes.columns, sizes.columns)
        self._is_at_once = sizes.end_rows == sizes.rows_each
        self._residual = self._load_residual(self._first_row) if sizes.adds_residual and self._is_at_once else None
        of_columns = functools.partial(_load, layout=self._layout.reduce(0))
        self._biases = []
        if refs.bias is not None:
            for way in range(sizes.ways):
                outputs = pl.ds(way * sizes.num_outputs + place.unit * sizes.columns, sizes.columns)
                self._biases.append(of_columns(refs.bias.at[refs.of_layer(sizes, refs.bias), outputs]))
        if refs.next_norm is not None:
            weight = of_columns(refs.next_norm.at[refs.of_next_layer(sizes), self._outputs])
            self._next_weight = 1.0 + weight if sizes.next_unit_offset else weight

    def store(self, sums: Callable[[Any, Any], list[Ref]], rstd_smem: Ref) -> None:
        """Store the results; `sums(rows, columns)`: f32 references that add up to the product, columns of all ways."""
        sizes = self._sizes
        if self._is_at_once:
            self._store_rows(self._first_row, self._residual, sums, rstd_smem)
            return

        def step(i: jax.Array, _: None) -> None:
            first_row = self._first_row + i * sizes.end_rows
            residual = self._load_residual(first_row) if sizes.adds_residual else None
            self._store_rows(first_row, residual, sums, rstd_smem)

        lax.fori_loop(0, sizes.rows_each // sizes.end_rows, step, None)

    def _tokens(self, first_row: jax.Array) -> Any:
        return pl.ds(self._place.first_token + first_row, self._sizes.end_rows)

    def _load_residual(self, first_row: jax.Array) -> jax.Array:
        return _load(self._refs.residual.at[self._tokens(first_row), self._outputs], self._layout)

    def _store_rows(
        self,
        first_row: jax.Array,
        residual: jax.Array | None,
        sums: Callable[[Any, Any], list[Ref]],
        rstd_smem: Ref,
    ) -> None:
        sizes, refs = self._sizes, self._refs
        rows, tokens = pl.ds(first_row, sizes.end_rows), self._tokens(first_row)
        values = []
        for way in range(sizes.ways):
            parts = [_load(part, self._layout) for part in sums(rows, pl.ds(way * sizes.columns, sizes.columns))]
            values.append(functools.reduce(operator.add, parts))
        if sizes.num_squares:
            rstd = self._broadcast(_load(rstd_smem.at[rows], self._layout.reduce(1)), 0)
            values = [value * rstd for value in values]
        if self._biases:
            values = [value + self._broadcast(bias, 1) for value, bias in zip(values, self._biases, strict=True)]
        out = activate(sizes.activation, values[0])
        if sizes.is_gated:
            out = out * values[1]
        if residual is not None:
            out = out + residual
        out = out.astype(sizes.dtype)
        refs.out.at[tokens, self._outputs][...] = out
        if refs.normed is not None:
            # The norm is that of what was stored.
            out = out.astype(jnp.float32)
            refs.normed.at[tokens, self._outputs][...] = (out * self._broadcast(self._next_weight, 1)).astype(
                sizes.dtype
            )
            refs.next_squares.at[self._place.unit, tokens][...] = (out * out).sum(axis=1)

    def _broadcast(self, values: jax.Array, dim: int) -> jax.Array:
        return spread(values, self._shape, (dim,), self._layout)
