"""What follows a product of 16 to 256 rows: norm, bias, activation, gate, residual, and the next norm's beginning.

Letters: T rows (tokens)  N outputs
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

from pallas_kernels.common import Ref, div, full, pl, plgpu
from pallas_kernels.matmul_unit import activate
from pallas_kernels.row_matmul_sizes import RowMatmulRefs, RowMatmulSizes

_WARPS, _LANES = 4, 32
_SQUARES_AT_ONCE = 8  # for loads to overlap


@dataclass(frozen=True)
class Place:
    """What a CTA computes: a unit of outputs of some tokens, from a part of K."""

    part: jax.Array
    group: jax.Array
    unit: jax.Array
    first_token: jax.Array

    @classmethod
    def of_cta(cls, sizes: RowMatmulSizes) -> "Place":
        """CTAs that share a unit follow each other."""
        cta = lax.axis_index("cta")
        group = div(cta, sizes.parts)
        token_tile = div(group, sizes.num_units)
        return cls(cta - group * sizes.parts, group, group - token_tile * sizes.num_units, token_tile * sizes.tokens)


@functools.cache
def _tiled(tiling: tuple[tuple[int, ...], ...], warps: tuple[Any, ...], lanes: tuple[Any, ...]) -> Any:
    layout = TiledLayout(plgpu.Tiling(tiling), warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _row_layout(rows: int, columns: int) -> Any:
    """[rows, columns] by whole rows: a warp has one or more, a thread up to 4 numbers next to each other."""
    vector = next(n for n in (4, 2, 1) if rows % (_WARPS * _LANES * n // columns) == 0)
    of_warp = _LANES * vector // columns
    return _tiled(((_WARPS * of_warp, columns), (of_warp, columns), (1, vector)), (-6,), (-4, -3))


def _token_layout(tokens: int) -> Any:
    """[tokens], each warp all of them."""
    lanes = next(n for n in (32, 16, 8) if tokens % n == 0)
    lane_dims = (-2,) if lanes == _LANES else (plgpu.Replicated(_LANES // lanes), -2)
    return _tiled(((lanes,), (1,)), (plgpu.Replicated(_WARPS),), lane_dims)


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
        return functools.reduce(lambda a, b: a + b, parts, total)

    total = lax.fori_loop(0, sizes.num_squares // at_once, add, full((sizes.tokens,), 0.0, layout))
    rstd_smem[...] = lax.rsqrt(total * (1.0 / sizes.num_inputs) + sizes.eps)
    plgpu.commit_smem()


class ResultRows:
    """Some rows of a unit's results, [rows, columns] in registers."""

    def __init__(self, sizes: RowMatmulSizes, refs: RowMatmulRefs, place: Place, first_row: jax.Array):
        """`first_row`: of sizes.end_rows, among the tokens of the CTA. Loads what does not depend on the product."""
        self._sizes, self._refs, self._place = sizes, refs, place
        self._first_row = first_row
        self._shape = (sizes.end_rows, sizes.columns)
        self._layout = _row_layout(*self._shape)
        self._tokens = pl.ds(place.first_token + first_row, sizes.end_rows)
        self._outputs = pl.ds(place.unit * sizes.columns, sizes.columns)
        self._residual = None
        if sizes.adds_residual:
            self._residual = _load(refs.residual.at[self._tokens, self._outputs], self._layout)

    def store(self, sums: Callable[[Any, Any], Ref], rstd_smem: Ref) -> None:
        """Store the results; `sums(rows, columns)`: f32 references that add up to the product, columns of all ways."""
        sizes, refs, columns = self._sizes, self._refs, self._sizes.columns
        rows = pl.ds(self._first_row, sizes.end_rows)
        values = []
        for way in range(sizes.ways):
            parts = [_load(part, self._layout) for part in sums(rows, pl.ds(way * columns, columns))]
            values.append(functools.reduce(lambda a, b: a + b, parts))
        if sizes.num_squares:
            rstd = _load(rstd_smem.at[rows], self._layout.reduce(1))
            values = [value * self._broadcast(rstd, 0) for value in values]
        if refs.bias is not None:
            for way in range(sizes.ways):
                of_way = pl.ds(way * sizes.num_outputs + self._place.unit * columns, columns)
                bias = _load(refs.bias.at[refs.of_layer(sizes, refs.bias), of_way], self._layout.reduce(0))
                values[way] = values[way] + self._broadcast(bias, 1)
        out = activate(sizes.activation, values[0])
        if sizes.is_gated:
            out = out * values[1]
        if self._residual is not None:
            out = out + self._residual
        out = out.astype(sizes.dtype)
        refs.out.at[self._tokens, self._outputs][...] = out
        if refs.normed is not None:
            self._begin_norm(out.astype(jnp.float32))

    def _begin_norm(self, x: jax.Array) -> None:
        """The product with the next norm's weight, and this unit's share of the sums of squares."""
        sizes, refs = self._sizes, self._refs
        weight = _load(refs.next_norm.at[refs.of_next_layer(sizes), self._outputs], self._layout.reduce(0))
        weight = 1.0 + weight if sizes.next_unit_offset else weight
        refs.normed.at[self._tokens, self._outputs][...] = (x * self._broadcast(weight, 1)).astype(sizes.dtype)
        refs.next_squares.at[self._place.unit, self._tokens][...] = (x * x).sum(axis=1)

    def _broadcast(self, values: jax.Array, dim: int) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(values, self._shape, [dim]), self._layout)


def for_result_rows(sizes: RowMatmulSizes, first: Any, body: Callable[[jax.Array], None]) -> None:
    """Call body(first row) for each of the rows [first, first + rows_each) that are taken at a time."""

    def step(i: jax.Array, _: None) -> None:
        body(first + i * sizes.end_rows)

    lax.fori_loop(0, sizes.rows_each // sizes.end_rows, step, None)
