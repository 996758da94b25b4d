"""The static sizes of a kernel of few-row products, what it serves, and the references that its parts share.

Letters: K inputs  N outputs  S segments
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import DTYPES, Ref, div
from pallas_kernels.layer_slice import LayerSlice, place_in
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.tuning import MatmulConfig

FEW_ROWS = 8
MAX_UNIT = 16
MAX_STAGES = 4
_SEGMENTS = (8, 4, 2, 1)
_ATOM_BYTES = 1024
_MAX_SLOT_ATOMS = 32
_SMEM_BYTES = 227 * 1024
# Beside the ring and x: barriers, sums of squares, the sums across segments.
_OTHER_BYTES = 12 * 1024


@dataclass(frozen=True)
class StageSizes:
    """Sizes and options of one product."""

    num_inputs: int
    num_outputs: int
    unit: int  # outputs that a CTA computes at a time: 16, or 8 where 16 would leave half of the CTAs without any
    segments: int
    tile: int  # atoms of each weight row that one slot of the ring holds: whole runs of segments
    is_gated: bool
    has_norm: bool
    eps: float
    unit_offset: bool
    has_bias: bool
    activation: str | None
    adds_residual: bool
    first_cta: int  # which takes unit 0
    layer_index: int  # of its weights' layer among the kernel's layer numbers
    norm_index: int  # of its norm among the kernel's norms

    @property
    def ways(self) -> int:
        """Weight rows of an output: 2 with a gate."""
        return 2 if self.is_gated else 1

    @property
    def num_units(self) -> int:
        """All units."""
        return self.num_outputs // self.unit

    @property
    def row_tiles(self) -> int:
        """Weight rows of a unit and way in atoms."""
        return self.unit // FEW_ROWS

    @property
    def num_atoms(self) -> int:
        """Of 64 inputs."""
        return self.num_inputs // 64

    @property
    def tiles(self) -> int:
        """Tiles of a weight row."""
        return self.num_atoms // self.tile


@dataclass(frozen=True)
class MatmulSizes:
    """What a kernel is compiled for."""

    stages: tuple[StageSizes, ...]
    num_ctas: int
    slot_atoms: int  # of the ring
    dtype: Any
    max_slots: int
    copy_whole_tiles: bool
    max_in_flight: int

    @property
    def max_atoms(self) -> int:
        """Of the widest input."""
        return max(stage.num_atoms for stage in self.stages)

    @property
    def num_norms(self) -> int:
        """Stages that norm their input."""
        return sum(stage.has_norm for stage in self.stages)

    @property
    def norm_atoms(self) -> int:
        """Of the widest input that is normed."""
        return max((stage.num_atoms for stage in self.stages if stage.has_norm), default=0)

    @property
    def x_rows(self) -> int:
        """Rows of x_smem: every run of segments can be read as 64 rows, whatever lies behind."""
        return FEW_ROWS * max(stage.num_atoms + 8 - stage.segments for stage in self.stages)

    @property
    def num_slots(self) -> int:
        """Tiles of the ring: as many as fit beside x."""
        room = _SMEM_BYTES - _OTHER_BYTES - 128 * (self.x_rows + self.num_norms * self.norm_atoms)
        return min(room // (_ATOM_BYTES * self.slot_atoms), self.max_slots)

    @property
    def in_flight(self) -> int:
        """Tiles asked for and not there, at most; 0: no bound.

        A slot's barrier tells its last tile from the one before by one bit: who waited for a tile that the slot no
        longer has would wait for ever.
        """
        return min(self.max_in_flight, self.num_slots)

    def my_units(self, stage: StageSizes, refs: "StageRefs") -> tuple[jax.Array, jax.Array]:
        """The first unit of this CTA, and how many it has: every num_ctas-th, or none of a stage that is left out."""
        first = lax.axis_index("cta") + (self.num_ctas - stage.first_cta)
        first = jnp.where(first >= self.num_ctas, first - self.num_ctas, first)
        units = jnp.where(refs.is_there, stage.num_units, 0)
        return first, div(jnp.maximum(units - first + (self.num_ctas - 1), 0), self.num_ctas)


def _segments_of(num_inputs: int) -> int:
    """Into how many segments K, a multiple of 64, is cut."""
    return next(s for s in _SEGMENTS if num_inputs % (64 * s) == 0)


def _unit_of(stage: MatmulStage, config: MatmulConfig) -> int:
    narrow = MAX_UNIT // 2
    return narrow if stage.weight.shape[-2] // narrow <= config.num_ctas else MAX_UNIT


def _tile_of(num_inputs: int, most: int) -> int:
    """Atoms of a weight row that are copied together: whole runs of segments, `most` at most."""
    segments = _segments_of(num_inputs)
    return max((n for n in range(segments, most + 1, segments) if num_inputs // 64 % n == 0), default=0)


def _slot_atoms_of(stages: list[MatmulStage], config: MatmulConfig) -> int | None:
    """Of a ring that serves all these stages, or None: a copy of 16 rows fills a slot, one of 8 rows any part of it."""
    inputs = [(stage.weight.shape[-1], _unit_of(stage, config)) for stage in stages]
    filled = {2 * _tile_of(num_inputs, _MAX_SLOT_ATOMS // 2) for num_inputs, unit in inputs if unit == MAX_UNIT}
    if len(filled) > 1:
        return None
    atoms = filled.pop() if filled else max(_tile_of(num_inputs, _MAX_SLOT_ATOMS) for num_inputs, _ in inputs)
    return atoms if all(_tile_of(num_inputs, atoms) for num_inputs, _ in inputs) else None


def stages_by_kernel(stages: tuple[MatmulStage, ...], config: MatmulConfig) -> list[tuple[MatmulStage, ...]]:
    """Which stages are one kernel: those that follow each other and can share a ring."""
    kernels: list[list[MatmulStage]] = []
    for stage in stages:
        if config.one_kernel and kernels and _slot_atoms_of([*kernels[-1], stage], config) is not None:
            kernels[-1].append(stage)
        else:
            kernels.append([stage])
    return [tuple(kernel) for kernel in kernels]


def unsupported_reason(x: jax.Array | jax.ShapeDtypeStruct, stages: tuple[MatmulStage, ...]) -> str | None:
    """Why there is no kernel for these arguments, in words, or None if there is one."""
    if x.shape[0] != FEW_ROWS:
        return f"{x.shape[0]} rows, only {FEW_ROWS} have a kernel"
    if x.dtype.name not in DTYPES:
        return f"dtype {x.dtype.name}, only {' and '.join(DTYPES)} have kernels"
    if len(stages) > MAX_STAGES:
        return f"{len(stages)} stages, at most {MAX_STAGES} have a kernel"
    for stage in stages:
        if stage.activation == "gelu":
            return "activation gelu, only its approximation by tanh has a kernel"
        if stage.norm_weight is not None and stage.norm_weight.dtype != x.dtype:
            return f"norm weights in {stage.norm_weight.dtype.name}, only those in x's {x.dtype.name} have a kernel"
        num_outputs, num_inputs = stage.weight.shape[-2:]
        if num_outputs % MAX_UNIT or num_inputs % 64:
            return f"{num_inputs} inputs and {num_outputs} outputs, only multiples of 64 and {MAX_UNIT} have kernels"
        if 2 * FEW_ROWS * num_inputs > _SMEM_BYTES - _OTHER_BYTES - (3 * _MAX_SLOT_ATOMS + 8) * _ATOM_BYTES:
            return f"{num_inputs} inputs do not fit into shared memory"
    return None


def layer_numbers(stages: tuple[MatmulStage, ...]) -> tuple[list[jax.Array], list[int]]:
    """The layers that the weights are slices of, and which of these each stage's are.

    Each once: to put copies of one number together would be a kernel more. The last one first: the numbers 0, 1 would
    be computed by a kernel, where any others are a constant.
    """
    # Of arrays a number of their own: with that of another stage, -1, they would be left out too.
    no_layer = jnp.int32(0)
    layers = [stage.weight.layer if isinstance(stage.weight, LayerSlice) else no_layer for stage in stages]
    numbers: list[jax.Array] = []
    for layer in layers:
        if not any(layer is number for number in numbers):
            numbers.insert(0, layer)
    ids = [id(number) for number in numbers]
    return numbers, [ids.index(id(layer)) for layer in layers]


def make_sizes(x: jax.Array, stages: tuple[MatmulStage, ...], config: MatmulConfig) -> MatmulSizes:
    """Read the sizes of one kernel off its arguments.

    Each stage begins on the CTA after the last one of the stage before.
    """
    slot_atoms = _slot_atoms_of(list(stages), config)
    assert slot_atoms is not None, "see stages_by_kernel"
    made, first_cta = [], 0
    _, layer_indices = layer_numbers(stages)
    for stage, layer_index in zip(stages, layer_indices, strict=True):
        num_outputs, num_inputs = stage.weight.shape[-2:]
        unit = _unit_of(stage, config)
        made.append(
            StageSizes(
                num_inputs=num_inputs,
                num_outputs=num_outputs,
                unit=unit,
                segments=_segments_of(num_inputs),
                tile=_tile_of(num_inputs, slot_atoms * FEW_ROWS // unit),
                is_gated=stage.is_gated,
                has_norm=stage.norm_weight is not None,
                eps=stage.eps,
                unit_offset=stage.unit_offset,
                has_bias=stage.bias is not None,
                activation=stage.activation,
                adds_residual=stage.adds_residual,
                first_cta=first_cta,
                layer_index=layer_index,
                norm_index=sum(stage.has_norm for stage in made),
            )
        )
        first_cta = (first_cta + made[-1].num_units) % config.num_ctas
    return MatmulSizes(
        tuple(made), config.num_ctas, slot_atoms, x.dtype, config.max_slots, config.copy_whole_tiles, config.in_flight
    )


@dataclass(frozen=True)
class StageRefs:
    """Global memory of one product."""

    x: Ref
    weight: Ref  # [L or 1, ways * N, K]
    norm_weight: Ref | None  # [L or 1, K / 64, 64]
    bias: Ref | None  # [L or 1, ways * N]
    residual: Ref | None
    out: Ref
    layer: jax.Array

    @property
    def is_there(self) -> jax.Array:
        """Whether the stage is computed: the last one is left out where its weights are of layer -1."""
        return self.layer >= 0

    def of_layer(self, stack: Ref) -> jax.Array | int:
        """The first index into the weight, the norm's weight or the bias."""
        return place_in(stack, self.layer)


@dataclass(frozen=True)
class MatmulScratch:
    """Shared memory and barriers of one CTA. The first two are tuples of views where whole tiles are copied."""

    weights: Ref  # the ring
    x: Ref
    norms: Ref  # [norms, K / 64, 64] weights of all norms
    sums: Ref  # f32[ways * 64, 16] a unit before the sum over segments
    squares: Ref  # f32[8] sums of squares of the rows of x
    filled: Ref  # slots of the ring
    free: Ref
    x_full: Ref
    norms_full: Ref


def stage_refs(sizes: MatmulSizes, has_residual: bool, refs: list[Ref]) -> list[StageRefs]:
    """The kernel's operands and results by stage; reads the layer numbers."""
    outs = refs[-len(sizes.stages) :]
    x, residual = refs[0], refs[3] if has_residual else None
    rest = iter(refs[4 if has_residual else 3 :])
    # Read while the barriers are made, long before the first copy asks for one.
    layers = [refs[2][i] for i in range(refs[2].shape[0])]
    made = []
    for stage, out in zip(sizes.stages, outs, strict=True):
        layer = layers[stage.layer_index]
        weight = next(rest)
        norm_weight = next(rest) if stage.has_norm else None
        bias = next(rest) if stage.has_bias else None
        made.append(StageRefs(x, weight, norm_weight, bias, residual if stage.adds_residual else None, out, layer))
        x = out
        residual = out if stage.adds_residual else residual
    return made
