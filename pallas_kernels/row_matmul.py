"""Products of 16 to 256 rows with weight matrices after each other as one Pallas Mosaic GPU kernel (Hopper).

With so few rows a product takes hardly longer than reading the weights, if nothing else takes time: norm, bias,
activation, gate and residual are part of the kernel, and so is the beginning of the next stage's norm.

Weights are the side of 64 rows of the tensor cores' products, tokens the other one: a unit is 64 weight rows (32 of
each way with a gate), and a thread block (CTA) computes a unit of all tokens, then another one if there are more units
than SMs. Two of its warps copy weights and x into a ring in shared memory, a warpgroup computes. A unit takes K * (64 +
T) numbers; where there are too few units to keep the card busy, K is cut into parts. Each CTA of these then stores its
sums, waits until the others have, and ends with the results of a share of the rows, the parts always added in the same
order: the same bits every time.

A norm is no kernel: what the product before ends with, times the norm's weight, is its second result, and the sums of
squares of each unit its third. Products are linear, so the next one divides by the root of their mean at its end.

CTAs take x of the next product as soon as all have stored it (they are all resident: one an SM). Weights wait for
nobody: the warp that copies them runs ahead, across products. For the interpreter it is a kernel a product.

Letters: T rows (tokens)  K inputs  N outputs
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import reference_matmul
from pallas_kernels.common import PRODUCT_ROWS, Ref, div, kernel, pl, plgpu, swizzled_smem
from pallas_kernels.layer_slice import as_stack
from pallas_kernels.matmul_arrivals import arrive, reset_arrivals, wait_for_arrivals, wait_for_parts
from pallas_kernels.matmul_sizes import layer_numbers
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.row_matmul_end import Place, Results, my_places, write_rstd
from pallas_kernels.row_matmul_sizes import (
    MAX_STAGES,
    TURNED_STRIDE,
    RowMatmulRefs,
    RowMatmulSizes,
    make_sizes,
    stages_by_kernel,
)
from pallas_kernels.tuning import RowMatmulConfig


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    *,
    config: RowMatmulConfig,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See ops.matmul_stages.

    Args:
      x: bf16 or fp16 [T, K]; see row_matmul_sizes.unsupported_reason. If the first stage norms it, XLA does.
      residual: [T, N] or None.
      arrivals: i32[MAX_ARRIVALS], zeros; zeros again afterwards.
      config: static.
      interpret: for the CPU interpreter.

    Returns:
      [T, N] of each stage.
    """
    results: list[jax.Array] = []
    x, squares = reference_matmul.norm(x, stages[0]), None
    for chain in stages_by_kernel(stages, config):
        after = stages[len(results) + len(chain) :]
        following = after[0] if after and after[0].norm_weight is not None else None
        made = _run(x, squares, chain, following, residual, arrivals, config, interpret)
        for i, stage in enumerate(chain):
            results.append(made[f"out{i}"])
            residual = results[-1] if stage.adds_residual else residual
        last = len(chain) - 1
        x, squares = made.get(f"normed{last}", results[-1]), made.get(f"next_squares{last}")
    return tuple(results)


def _run(
    x: jax.Array,
    squares: jax.Array | None,
    stages: tuple[MatmulStage, ...],
    following: MatmulStage | None,
    residual: jax.Array | None,
    arrivals: jax.Array,
    config: RowMatmulConfig,
    interpret: bool,
) -> dict[str, jax.Array]:
    """The results of stages that are one kernel: what RowMatmulRefs calls out, normed and next_squares, by number."""
    layers, indices = layer_numbers(stages if following is None else (*stages, following))
    num_squares = 0 if squares is None else len(squares)
    chain = make_sizes(
        len(x), x.dtype, stages, following, num_squares=num_squares, layer_indices=indices, config=config
    )
    product = {"x": x, "layers": jnp.stack(layers)}
    operands = {"squares": squares, "residual": residual if any(stage.adds_residual for stage in stages) else None}
    results, partials = {}, {}
    for i, (stage, after, sizes) in enumerate(zip(stages, (*stages[1:], following), chain, strict=True)):
        layer = layers[indices[i]]
        # Layers and ways are one dimension: a copy has no more than five, of which tiles take four.
        weight = as_stack(stage.weight, layer)
        product[f"weight{i}"] = weight.reshape(-1, sizes.num_outputs, sizes.num_inputs)
        if stage.bias is not None:
            operands[f"bias{i}"] = as_stack(stage.bias.reshape(-1), layer)
        of_result = jax.ShapeDtypeStruct((sizes.num_rows, sizes.num_outputs), sizes.dtype)
        results[f"out{i}"] = of_result
        if after is not None and after.norm_weight is not None:
            operands[f"next_norm{i}"] = as_stack(after.norm_weight, layers[indices[i + 1]])
            results[f"normed{i}"] = of_result
            results[f"next_squares{i}"] = jax.ShapeDtypeStruct((sizes.num_units, sizes.num_rows), jnp.float32)
        if sizes.parts > 1:
            shape = (sizes.num_groups, sizes.parts, sizes.tokens, PRODUCT_ROWS)
            partials[f"partials{i}"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    operands = {name: operand for name, operand in operands.items() if operand is not None}
    call = functools.partial(_call, chain, interpret=interpret)
    if not partials and len(chain) == 1:
        return call(_multiply, product | operands, results, num_threads=2)
    if config.one_kernel:
        return call(_multiply, product | operands | {"arrivals": arrivals}, results | partials, num_threads=2)
    parts = call(_multiply, product, partials, num_threads=2)
    return call(_add_parts, operands | {"layers": product["layers"]} | parts, results, num_threads=1)


def _call(
    chain: tuple[RowMatmulSizes, ...],
    body: Callable[[list["_Stage"]], None],
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    num_threads: int,
    interpret: bool,
) -> dict[str, jax.Array]:
    """A kernel whose operands and results are fields of RowMatmulRefs, of the stages' by number."""
    names = (*operands, *results)

    def named(*refs: Ref) -> None:
        body(_stages_of(chain, dict(zip(names, refs, strict=True))))

    outs = kernel(
        named,
        name="row_matmul",
        out_type=list(results.values()),
        mesh=plgpu.Mesh(
            grid=(chain[0].grid,),
            grid_names=("cta",),
            num_threads=num_threads,
            thread_name="warpgroup",
        ),
        interpret=interpret,
    )(*operands.values())
    return dict(zip(results, outs, strict=True))


class _Stage(NamedTuple):
    """A product of the kernel, and what this CTA computes of it: see my_places."""

    sizes: RowMatmulSizes
    refs: RowMatmulRefs
    first: jax.Array
    count: jax.Array

    def place(self, number: jax.Array | int) -> Place:
        """One of this CTA's."""
        return Place.of(self.sizes, self.first + number * self.sizes.grid)


def _stages_of(chain: tuple[RowMatmulSizes, ...], by_name: dict[str, Ref]) -> list[_Stage]:
    """Each stage takes what the one before gives; the last sum is the residual."""
    # Read once, long before the first copy asks for one.
    layers = [by_name["layers"][i] for i in range(by_name["layers"].shape[0])]
    x, squares, residual = by_name.get("x"), by_name.get("squares"), by_name.get("residual")
    stages = []
    for i, sizes in enumerate(chain):
        names = ("weight", "bias", "next_norm", "partials", "out", "normed", "next_squares")
        own = {name: by_name.get(f"{name}{i}") for name in names}
        refs = RowMatmulRefs(
            layers=layers, x=x, squares=squares, residual=residual, arrivals=by_name.get("arrivals"), **own
        )
        stages.append(_Stage(sizes, refs, *my_places(sizes, refs)))
        x = refs.out if refs.normed is None else refs.normed
        squares, residual = refs.next_squares, refs.out if sizes.adds_residual else residual
    return stages


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    weights: Ref  # the ring
    gated: Ref  # the same bytes as [slots, 2, 32, inputs], if whole tiles are copied
    xs: Ref
    turned: Ref  # a unit's results, turned around
    rstd: Ref
    weights_full: Ref
    xs_full: Ref
    free: Ref


def _multiply(stages: list[_Stage]) -> None:
    """One warpgroup computes, warps of the other copy."""
    sizes = stages[0].sizes
    num_slots = sizes.num_slots
    has_views = sizes.copies == 1 and any(stage.sizes.is_gated for stage in stages)

    def scoped(ring: Ref, *rest: Ref) -> None:
        scratch = _Scratch(*(tuple(ring) if has_views else (ring, None)), *rest)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            used = jnp.int32(0)
            for index, stage in enumerate(stages):
                followed_by = stages[index + 1] if index + 1 < len(stages) else None
                pl.when(stage.count > 0)(functools.partial(_compute, stage, scratch, used, followed_by, index))
                used = used + stage.count * stage.sizes.steps

        @pl.when(warpgroup == 1)
        def _():
            def warp_body(warp: jax.Array) -> None:
                fill = functools.partial(_fill_ring, stages, scratch)
                pl.when(warp == 0)(functools.partial(fill, _copy_weights, waits=False))
                pl.when(warp == 1)(functools.partial(fill, _copy_x, waits=True))

            plgpu.warp_map(warp_body)

    ring = swizzled_smem(num_slots, PRODUCT_ROWS, sizes.slot_inputs, dtype=sizes.dtype)
    if has_views:
        gated = swizzled_smem(num_slots, 2, PRODUCT_ROWS // 2, sizes.slot_inputs, dtype=sizes.dtype)
        ring = plgpu.RefUnion(ring, gated)
    has_turned = any(stage.sizes.parts == 1 for stage in stages)
    has_rstd = any(stage.sizes.num_squares for stage in stages)
    pl.run_scoped(
        scoped,
        ring,
        swizzled_smem(num_slots, sizes.tokens, sizes.slot_inputs, dtype=sizes.dtype),
        plgpu.SMEM((sizes.tokens, TURNED_STRIDE), jnp.float32) if has_turned else None,
        plgpu.SMEM((sizes.tokens,), jnp.float32) if has_rstd else None,
        plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=num_slots),
        plgpu.Barrier(num_barriers=num_slots),
        plgpu.Barrier(num_barriers=num_slots),
        collective_axes="warpgroup",
    )


def _compute(stage: _Stage, scratch: _Scratch, used: jax.Array, followed_by: _Stage | None, index: int) -> None:
    """A stage of one CTA, and the news of it; `used`: slots of the ring that the stages before have used."""
    sizes, refs, _, count = stage
    if sizes.parts == 1:
        compute = functools.partial(_compute_unit, stage, scratch, used, index > 0)
        if sizes.has_one_place_each:
            compute(0)
        else:
            lax.fori_loop(0, count, lambda i, _: compute(i), None)
        _tell(stage, followed_by, index)
        return
    place = stage.place(0)
    if refs.out is None:
        _store_part(refs, place, _sums(sizes, scratch, used))
        return
    results, sums = _begin(stage, scratch, used, index > 0, 0)
    _store_part(refs, place, sums)
    arrive(refs.arrivals, MAX_STAGES + place.group)

    @pl.when(place.part < sizes.num_enders)
    def _():
        wait_for_parts(refs.arrivals, MAX_STAGES + place.group, sizes.parts, sizes.num_enders)
        results.store(functools.partial(_parts, sizes, refs, place), scratch.rstd)
        _tell(stage, followed_by, index)


def _compute_unit(stage: _Stage, scratch: _Scratch, used: jax.Array, is_behind: bool, number: jax.Array | int) -> None:
    """A unit from all of K; see _begin."""
    if not isinstance(number, int):
        plgpu.commit_smem()  # all have read the unit before
    results, sums = _begin(stage, scratch, used, is_behind, number)
    scratch.turned.at[:, pl.ds(0, PRODUCT_ROWS)].transpose((1, 0))[...] = sums
    plgpu.commit_smem()
    results.store(lambda rows, columns: [scratch.turned.at[rows, columns]], scratch.rstd)


def _begin(
    stage: _Stage, scratch: _Scratch, used: jax.Array, is_behind: bool, number: jax.Array | int
) -> tuple[Results, jax.Array]:
    """The results to be stored of one of this CTA's places, and their sums (see _sums); writes what their norm wants.

    `is_behind`: another stage in the same kernel, which is complete when x is there: only then all else is read.
    """
    sizes, place = stage.sizes, stage.place(number)
    used = used + number * sizes.steps
    if is_behind:
        plgpu.barrier_wait(scratch.xs_full.at[lax.rem(used, jnp.int32(sizes.num_slots))])
    results = Results(sizes, stage.refs, place)

    def write() -> None:
        if not sizes.num_squares:
            return
        write_now = functools.partial(write_rstd, sizes, stage.refs, place, scratch.rstd)
        if isinstance(number, int) or sizes.tokens < sizes.num_rows:
            write_now()
        else:  # several units of the same tokens
            pl.when(number == 0)(write_now)

    if is_behind:  # the rest of x is still on its way
        return results, _sums(sizes, scratch, used, has_first_x=True, meanwhile=write)
    write()  # the weights are
    return results, _sums(sizes, scratch, used)


def _tell(stage: _Stage, followed_by: _Stage | None, index: int) -> None:
    """Tell the CTAs of the next stage, if there is one, that results are stored."""
    if followed_by is not None:
        is_next = followed_by.refs.layer(followed_by.sizes) >= 0
        pl.when(is_next)(lambda: arrive(stage.refs.arrivals, index))


def _fill_ring(
    stages: list[_Stage],
    scratch: _Scratch,
    copy: Callable[[_Stage, Place, _Scratch, jax.Array, jax.Array], None],
    *,
    waits: bool,
) -> None:
    """One warp: copy(stage, place, scratch, step, slot) for all steps, as slots become free.

    `waits`: each stage's copies wait until the stage before is complete.
    """
    num_slots, free = stages[0].sizes.num_slots, scratch.free
    used = jnp.int32(0)
    for index, stage in enumerate(stages):
        if waits and index:
            num_arrivals = stages[index - 1].sizes.num_enders_in_all
            pl.when(stage.count > 0)(functools.partial(wait_for_arrivals, stage.refs.arrivals, index - 1, num_arrivals))

        def fill(i: jax.Array, _: None, stage: _Stage = stage, used: jax.Array = used) -> None:
            slot = lax.rem(i, jnp.int32(num_slots))

            @pl.when(i >= num_slots)
            def _():
                plgpu.barrier_wait(free.at[slot])

            number, step = 0, i - used
            if not stage.sizes.has_one_place_each:
                number = div(step, stage.sizes.steps)
                step = step - number * stage.sizes.steps
            copy(stage, stage.place(number), scratch, step, slot)

        end = used + stage.count * stage.sizes.steps
        lax.fori_loop(used, end, fill, None)
        used = end

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(num_slots))])

    lax.fori_loop(jnp.maximum(used - num_slots, 0), used, drain, None)
    if waits and len(stages) > 1:
        reset_arrivals(stages[0].refs.arrivals, len(stages) - 1, stages[0].sizes.grid)


def _inputs(sizes: RowMatmulSizes, place: Place, step: jax.Array) -> Any:
    return pl.ds((place.part * sizes.steps + step) * sizes.slot_inputs, sizes.slot_inputs)


def _copy_weights(stage: _Stage, place: Place, scratch: _Scratch, step: jax.Array, slot: jax.Array) -> None:
    """64 rows; those of a gate and those of what it gates one below the other."""
    sizes, refs = stage.sizes, stage.refs
    full, inputs, first = scratch.weights_full.at[slot], _inputs(sizes, place, step), refs.first_way(sizes)
    if sizes.is_gated and scratch.gated is not None:
        rows = pl.ds(place.unit * sizes.columns, sizes.columns)
        plgpu.copy_gmem_to_smem(refs.weight.at[pl.ds(first, 2), rows, inputs], scratch.gated.at[slot], full)
        return
    num_rows = PRODUCT_ROWS // sizes.copies
    for i in range(sizes.copies):
        way, first_row = (i, 0) if sizes.is_gated else (0, i * num_rows)
        rows = pl.ds(place.unit * sizes.columns + first_row, num_rows)
        target = scratch.weights.at[slot, pl.ds(i * num_rows, num_rows)]
        plgpu.copy_gmem_to_smem(refs.weight.at[first + way, rows, inputs], target, full)


def _copy_x(stage: _Stage, place: Place, scratch: _Scratch, step: jax.Array, slot: jax.Array) -> None:
    sizes = stage.sizes
    source = stage.refs.x.at[pl.ds(place.first_token, sizes.tokens), _inputs(sizes, place, step)]
    plgpu.copy_gmem_to_smem(source, scratch.xs.at[slot], scratch.xs_full.at[slot])


def _sums(
    sizes: RowMatmulSizes,
    scratch: _Scratch,
    used: jax.Array,
    *,
    has_first_x: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> jax.Array:
    """f32[64, tokens] of a part of K, in registers that hold one number each, so that they can be stored turned.

    `has_first_x`: that x is in the first slot has been waited for. `meanwhile` is called beside the first product.
    """

    def slot_of(step: jax.Array | int) -> jax.Array:
        return lax.rem(used + step, jnp.int32(sizes.num_slots))

    def body(acc: Ref) -> jax.Array:
        def multiply(step: jax.Array | int) -> None:
            slot = slot_of(step)
            plgpu.barrier_wait(scratch.weights_full.at[slot])
            if not (has_first_x and isinstance(step, int)):
                plgpu.barrier_wait(scratch.xs_full.at[slot])
            plgpu.wgmma(acc, scratch.weights.at[slot], scratch.xs.at[slot].transpose((1, 0)))

        def next_step(step: jax.Array, _: None) -> None:
            multiply(step)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(scratch.free.at[slot_of(step - 1)])

        multiply(0)
        meanwhile()
        lax.fori_loop(1, sizes.steps, next_step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.free.at[slot_of(sizes.steps - 1)])
        return plgpu.layout_cast(acc[...], plgpu.Layout._WGMMA_ACC_32BIT)

    return pl.run_scoped(body, plgpu.ACC((PRODUCT_ROWS, sizes.tokens), jnp.float32))


def _store_part(refs: RowMatmulRefs, place: Place, sums: jax.Array) -> None:
    refs.partials.at[place.group, place.part].transpose((1, 0))[...] = sums


def _parts(sizes: RowMatmulSizes, refs: RowMatmulRefs, place: Place, rows: Any, columns: Any) -> list[Ref]:
    return [refs.partials.at[place.group, part, rows, columns] for part in range(sizes.parts)]


def _add_parts(stages: list[_Stage]) -> None:
    """A kernel of its own that ends what _multiply began: for the interpreter, which has no atomics."""
    (stage,) = stages
    sizes, refs, place = stage.sizes, stage.refs, stage.place(0)

    def scoped(rstd: Ref) -> None:
        @pl.when(jnp.logical_and(place.part < sizes.num_enders, stage.count > 0))
        def _():
            if sizes.num_squares:
                write_rstd(sizes, refs, place, rstd)
            Results(sizes, refs, place).store(functools.partial(_parts, sizes, refs, place), rstd)

    rstd = plgpu.SMEM((sizes.tokens,), jnp.float32) if sizes.num_squares else None
    pl.run_scoped(scoped, rstd, collective_axes="warpgroup")
