"""The static sizes of products of 16 to 256 rows with weight matrices, and what their kernels serve.

Letters: T rows (tokens)  K inputs  N outputs
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import ATOM, DTYPES, PRODUCT_ROWS, Ref
from pallas_kernels.layer_slice import place_in
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.tuning import RowMatmulConfig

# Counters, MAX_ARRIVALS at most: of the stages of a kernel, and of groups of thread blocks that share a product.
MAX_STAGES = 4
MAX_GROUPS = 128
MAX_ROWS = 256
_ATOM_INPUTS = 64  # 128 bytes, which copies and tensor cores take as one
# Numbers of a row of the tile that turns results around: 4 more than 64, so that neither side meets itself in a bank.
TURNED_STRIDE = PRODUCT_ROWS + 4
# Rows of results a warpgroup has in registers at a time: of one part, and of several that it adds.
_MAX_END_ROWS = {False: 64, True: 32}


@dataclass(frozen=True)
class RowMatmulSizes:
    """Sizes and options of one product."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    tokens: int  # rows of x that a CTA takes
    parts: int  # of K
    grid: int  # thread blocks of the kernel
    first_cta: int  # which has the first place
    tile: int  # atoms of K that a slot of the ring holds
    num_slots: int
    copies: int  # of weights that fill a slot
    is_gated: bool
    activation: str | None
    adds_residual: bool
    eps: float  # of the norm of x, whose sums of squares come as so many units; 0 without a norm
    num_squares: int
    next_unit_offset: bool  # of the next stage's norm
    dtype: Any
    layer_index: int  # of the weights' layer among the kernel's layer numbers
    next_layer_index: int  # of the next norm's

    @property
    def ways(self) -> int:
        """Weight rows of an output: 2 with a gate."""
        return 2 if self.is_gated else 1

    @property
    def columns(self) -> int:
        """Outputs of a unit."""
        return PRODUCT_ROWS // self.ways

    @property
    def num_units(self) -> int:
        """Of all outputs."""
        return self.num_outputs // self.columns

    @property
    def num_groups(self) -> int:
        """Places that do not share their results."""
        return self.num_units * (self.num_rows // self.tokens)

    @property
    def num_places(self) -> int:
        """What there is to compute: each place is a thread block's, which may have several of one product."""
        return self.num_groups * self.parts

    @property
    def has_one_place_each(self) -> bool:
        """Whether no thread block has two."""
        return self.num_places <= self.grid

    @property
    def num_enders_in_all(self) -> int:
        """Thread blocks that end with results."""
        return self.num_groups * self.num_enders if self.parts > 1 else min(self.num_groups, self.grid)

    @property
    def steps(self) -> int:
        """Slots that a place fills."""
        return self.num_inputs // (_ATOM_INPUTS * self.tile * self.parts)

    @property
    def slot_inputs(self) -> int:
        """Inputs of a slot."""
        return _ATOM_INPUTS * self.tile

    @property
    def rows_each(self) -> int:
        """Rows whose results a CTA ends with: of those that share `tokens`, as few as a warpgroup can take."""
        at_least = -(-self.tokens // self.parts)
        least = 4 if self.parts > 1 else self.tokens
        return next(n for n in range(max(at_least, least), self.tokens + 1) if n % 4 == 0 and self.tokens % n == 0)

    @property
    def num_enders(self) -> int:
        """CTAs of a group that end with results."""
        return self.tokens // self.rows_each

    @property
    def end_rows(self) -> int:
        """Rows of results that a warpgroup has in registers at a time."""
        most = _MAX_END_ROWS[self.parts > 1]
        return next(n for n in range(min(most, self.rows_each), 0, -1) if n % 4 == 0 and self.rows_each % n == 0)


@dataclass(frozen=True)
class RowMatmulRefs:
    """Global memory of one product. None: there is none of it."""

    layers: list[jax.Array]  # i32[] each
    x: Ref = None  # [T, K]; already multiplied by the weights of its norm
    weight: Ref = None  # [L * ways or ways, N, K]
    arrivals: Ref = None  # i32[...]
    squares: Ref = None  # f32[units of the stage before, T] sums of squares of what x was
    bias: Ref = None  # [L or 1, ways * N]
    residual: Ref = None  # [T, N]
    next_norm: Ref = None  # [L or 1, N]
    partials: Ref = None  # f32[groups, parts, tokens, 64]
    out: Ref = None  # [T, N]
    normed: Ref = None  # [T, N] times next_norm
    next_squares: Ref = None  # f32[units, T]

    def layer(self, sizes: RowMatmulSizes) -> jax.Array:
        """Of the weights; -1: there is nothing to do."""
        return self.layers[sizes.layer_index]

    def first_way(self, sizes: RowMatmulSizes) -> jax.Array | int:
        """The first index into the weight, of the layer's first way."""
        return self.layer(sizes) * sizes.ways if self.weight.shape[0] > sizes.ways else 0

    def of_layer(self, sizes: RowMatmulSizes, stack: Ref) -> jax.Array | int:
        """The first index into the bias."""
        return place_in(stack, self.layer(sizes))

    def of_next_layer(self, sizes: RowMatmulSizes) -> jax.Array | int:
        """The first index into next_norm, whatever it is if there is no next layer."""
        return place_in(self.next_norm, jnp.maximum(self.layers[sizes.next_layer_index], 0))


def unsupported_reason(x: jax.Array | jax.ShapeDtypeStruct, stages: tuple[MatmulStage, ...]) -> str | None:
    """Why there is no kernel for these arguments, in words, or None if there is one."""
    num_rows = x.shape[0]
    if num_rows % ATOM or not 2 * ATOM <= num_rows <= MAX_ROWS:
        return f"{num_rows} rows, only multiples of {ATOM} from {2 * ATOM} to {MAX_ROWS} have kernels"
    if x.dtype.name not in DTYPES:
        return f"dtype {x.dtype.name}, only bfloat16 and float16 have kernels"
    for stage in stages:
        if stage.activation == "gelu":
            return "activation gelu, only its approximation by tanh has a kernel"
        num_outputs, num_inputs = stage.weight.shape[-2:]
        columns = PRODUCT_ROWS // stage.ways
        if num_outputs % columns or num_inputs % _ATOM_INPUTS:
            shape = f"{num_inputs} inputs and {num_outputs} outputs"
            return f"{shape}, only multiples of {_ATOM_INPUTS} and {columns} have kernels"
    return None


def stages_by_kernel(stages: tuple[MatmulStage, ...], config: RowMatmulConfig) -> list[tuple[MatmulStage, ...]]:
    """Which stages are one kernel: as many as there are counters for, or each by itself."""
    count = MAX_STAGES if config.one_kernel else 1
    return list(itertools.batched(stages, count))


def make_sizes(
    num_rows: int,
    dtype: Any,
    stages: tuple[MatmulStage, ...],
    following: MatmulStage | None,
    *,
    num_squares: int,
    layer_indices: list[int],
    config: RowMatmulConfig,
) -> tuple[RowMatmulSizes, ...]:
    """Cut the products of a kernel. Each begins on the thread block behind the last one of the product before.

    Args:
      following: the stage after them, if it norms what the last one gives.
      num_squares: units whose sums of squares belong to x; 0 where x needs no norm.
      layer_indices: of `stages` and of `following`.
    """
    cuts = [_cut(num_rows, stage, config) for stage in stages]
    tokens = cuts[0].tokens
    turned_bytes = 4 * TURNED_STRIDE * tokens if any(cut.parts == 1 for cut in cuts) else 0
    room = config.smem_bytes - turned_bytes
    tile, num_slots = _ring_of([cut.atoms for cut in cuts], 2 * _ATOM_INPUTS * (PRODUCT_ROWS + tokens), room, config)
    made: list[RowMatmulSizes] = []
    first_cta = 0
    grid = min(config.num_ctas, sum(cut.num_groups * cut.parts for cut in cuts))
    for i, (stage, after, cut) in enumerate(zip(stages, (*stages[1:], following), cuts, strict=True)):
        num_outputs, num_inputs = stage.weight.shape[-2:]
        has_squares = made and stage.norm_weight is not None
        made.append(
            RowMatmulSizes(
                num_rows=num_rows,
                num_inputs=num_inputs,
                num_outputs=num_outputs,
                tokens=tokens,
                parts=cut.parts,
                grid=grid,
                first_cta=first_cta,
                tile=tile,
                num_slots=num_slots,
                copies=1 if config.copy_whole_tiles else max(stage.ways for stage in stages),
                is_gated=stage.is_gated,
                activation=stage.activation,
                adds_residual=stage.adds_residual,
                eps=stage.eps,
                num_squares=made[-1].num_units if has_squares else 0 if made else num_squares,
                next_unit_offset=after is not None and after.unit_offset,
                dtype=dtype,
                layer_index=layer_indices[i],
                next_layer_index=layer_indices[min(i + 1, len(layer_indices) - 1)],
            )
        )
        first_cta = (first_cta + made[-1].num_places) % grid
    return tuple(made)


class _Cut(NamedTuple):
    """How a product is shared by thread blocks."""

    tokens: int  # rows of x that one takes
    num_groups: int
    parts: int
    atoms: int  # of K, in a part


def _cut(num_rows: int, stage: MatmulStage, config: RowMatmulConfig) -> _Cut:
    """The parts of K are those with which a CTA reads least, counting what an exchange costs as bytes.

    All CTAs that wait for each other have to be resident.
    """
    num_outputs, num_inputs = stage.weight.shape[-2:]
    tokens = max(n for n in range(ATOM, min(num_rows, config.max_tokens) + 1, ATOM) if num_rows % n == 0)
    num_units = num_outputs * stage.ways // PRODUCT_ROWS
    num_groups = num_units * (num_rows // tokens)
    atoms = num_inputs // _ATOM_INPUTS

    def num_bytes(parts: int) -> int:
        exchanged = config.exchange_bytes + 2 * 4 * PRODUCT_ROWS * tokens if parts > 1 else 0
        return atoms * 2 * _ATOM_INPUTS * (PRODUCT_ROWS + tokens) // parts + exchanged

    most = min(config.max_parts, config.num_ctas // num_groups) if num_groups <= MAX_GROUPS else 1
    parts = min((n for n in range(1, max(most, 1) + 1) if atoms % n == 0), key=num_bytes)
    return _Cut(tokens, num_groups, parts, atoms // parts)


def _ring_of(atoms: list[int], atom_bytes: int, room: int, config: RowMatmulConfig) -> tuple[int, int]:
    """Atoms of K a slot, the same for all products, and slots: large copies, but for three slots, or all, to fit."""
    common = math.gcd(*atoms)

    def fits(tile: int) -> bool:
        return tile * atom_bytes <= config.slot_bytes and min(3, max(atoms) // tile) * tile * atom_bytes <= room

    tile = max((n for n in range(1, common + 1) if common % n == 0 and fits(n)), default=1)
    # A slot is given back when the next one's products are on their way: with one alone nobody would get further.
    num_slots = max(min(room // (tile * atom_bytes), config.max_slots), 2)
    num_slots = min(num_slots, sum(atoms) // tile)
    return tile, num_slots
