"""Products of 16 to 256 rows with weight matrices as Pallas Mosaic GPU kernels (Hopper), one a product.

With so few rows a product takes hardly longer than reading the weights, if nothing else takes time: norm, bias,
activation, gate and residual are part of the kernel, and so is the beginning of the next stage's norm.

Weights are the side of 64 rows of the tensor cores' products, tokens the other one: a unit is 64 weight rows (32 of
each way with a gate), and a thread block (CTA) computes a unit of all tokens. Two of its warps copy weights and x into
a ring in shared memory, a warpgroup computes. A CTA reads K * (64 + T) numbers; where there are too few units to keep
the card busy, K is cut into parts. Each CTA of these then stores its sums, waits until the others have, and ends with
the results of a share of the rows, the parts always added in the same order: the same bits every time.

A norm is no kernel: what the product before ends with, times the norm's weight, is its second result, and the sums of
squares of each unit its third. Products are linear, so the next one divides by the root of their mean at its end.

Letters: T rows (tokens)  K inputs  N outputs
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import reference_matmul
from pallas_kernels.common import PRODUCT_ROWS, Ref, kernel, pl, plgpu, swizzled_smem
from pallas_kernels.layer_slice import as_stack
from pallas_kernels.matmul_arrivals import arrive, wait_for_parts
from pallas_kernels.matmul_sizes import layer_numbers
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.row_matmul_end import Place, Results, write_rstd
from pallas_kernels.row_matmul_sizes import TURNED_STRIDE, RowMatmulRefs, RowMatmulSizes, make_sizes
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
      arrivals: i32[NUM_COUNTERS], zeros; zeros again afterwards.
      config: static.
      interpret: for the CPU interpreter.

    Returns:
      [T, N] of each stage.
    """
    results = []
    x, squares = reference_matmul.norm(x, stages[0]), None
    for stage, after in zip(stages, (*stages[1:], None), strict=True):
        following = None if after is None or after.norm_weight is None else after
        made = _run(x, squares, stage, following, residual, arrivals, config, interpret)
        results.append(made["out"])
        residual = made["out"] if stage.adds_residual else residual
        x, squares = made.get("normed", made["out"]), made.get("next_squares")
    return tuple(results)


def _run(
    x: jax.Array,
    squares: jax.Array | None,
    stage: MatmulStage,
    following: MatmulStage | None,
    residual: jax.Array | None,
    arrivals: jax.Array,
    config: RowMatmulConfig,
    interpret: bool,
) -> dict[str, jax.Array]:
    """What RowMatmulRefs calls out, and normed and next_squares if the next stage norms it."""
    layers, indices = layer_numbers((stage,) if following is None else (stage, following))
    num_squares = 0 if squares is None else len(squares)
    cut = functools.partial(make_sizes, num_squares=num_squares, layer_indices=indices, config=config)
    sizes = cut(len(x), x.dtype, stage, following)
    layer = layers[indices[0]]
    operands = {"layers": jnp.stack(layers), "squares": squares}
    if stage.bias is not None:
        operands["bias"] = as_stack(stage.bias.reshape(-1), layer)
    if stage.adds_residual:
        operands["residual"] = residual
    of_result = jax.ShapeDtypeStruct((sizes.num_rows, sizes.num_outputs), sizes.dtype)
    results = {"out": of_result}
    if following is not None:
        assert following.norm_weight is not None
        operands["next_norm"] = as_stack(following.norm_weight, layers[indices[1]])
        results["normed"] = of_result
        results["next_squares"] = jax.ShapeDtypeStruct((sizes.num_units, sizes.num_rows), jnp.float32)
    operands = {name: operand for name, operand in operands.items() if operand is not None}
    weight = as_stack(stage.weight.reshape(-1, stage.weight.shape[-1]), layer)
    product = {"x": x, "weight": weight, "layers": operands["layers"]}
    shape = (sizes.num_groups, sizes.parts, sizes.tokens, PRODUCT_ROWS)
    partials = {"partials": jax.ShapeDtypeStruct(shape, jnp.float32)}
    call = functools.partial(_call, sizes, interpret=interpret)
    if sizes.parts == 1:
        return call(_multiply, product | operands, results, num_threads=2)
    if config.wait_for_parts:
        return call(_multiply, product | operands | {"arrivals": arrivals}, results | partials, num_threads=2)
    parts = call(_multiply, product, partials, num_threads=2)
    return call(_add_parts, operands | parts, results, num_threads=1)


def _call(
    sizes: RowMatmulSizes,
    body: Callable[[RowMatmulSizes, RowMatmulRefs], None],
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    num_threads: int,
    interpret: bool,
) -> dict[str, jax.Array]:
    """A kernel whose operands and results are fields of RowMatmulRefs."""
    names = (*operands, *results)

    def named(*refs: Ref) -> None:
        by_name = dict(zip(names, refs, strict=True))
        # Read once, long before the first copy asks for one.
        layers = [by_name["layers"][i] for i in range(by_name["layers"].shape[0])]
        body(sizes, RowMatmulRefs(**by_name | {"layers": layers}))

    outs = kernel(
        named,
        name="row_matmul",
        out_type=list(results.values()),
        mesh=plgpu.Mesh(
            grid=(sizes.num_ctas,),
            grid_names=("cta",),
            num_threads=num_threads,
            thread_name="warpgroup",
        ),
        interpret=interpret,
    )(*operands.values())
    return dict(zip(results, outs, strict=True))


def _multiply(sizes: RowMatmulSizes, refs: RowMatmulRefs) -> None:
    """One warpgroup computes, two warps of the other copy. Nobody does anything for a layer -1."""
    place, is_there = Place.of_cta(sizes), refs.layer(sizes) >= 0

    def scoped(weights: Ref, xs: Ref, turned: Ref, rstd: Ref, weights_full: Ref, xs_full: Ref, free: Ref) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(jnp.logical_and(warpgroup == 0, is_there))
        def _():
            multiply = functools.partial(_sums, sizes, weights, xs, weights_full, xs_full, free)
            if refs.out is None:
                _store_part(refs, place, multiply())
                return
            results = Results(sizes, refs, place)
            if sizes.num_squares:
                write_rstd(sizes, refs, place, rstd)
            if sizes.parts == 1:
                turned.at[:, pl.ds(0, PRODUCT_ROWS)].transpose((1, 0))[...] = multiply()
                plgpu.commit_smem()
                results.store(lambda rows, columns: [turned.at[rows, columns]], rstd)
                return
            _store_part(refs, place, multiply())
            arrive(refs.arrivals, place.group)

            @pl.when(place.part < sizes.num_enders)
            def _():
                wait_for_parts(refs.arrivals, place.group, sizes.parts, sizes.num_enders)
                results.store(functools.partial(_parts, sizes, refs, place), rstd)

        @pl.when(jnp.logical_and(warpgroup == 1, is_there))
        def _():
            def warp_body(warp: jax.Array) -> None:
                copy_weights = functools.partial(_copy_weights, sizes, refs, place, weights, weights_full)
                copy_x = functools.partial(_copy_x, sizes, refs, place, xs, xs_full)
                pl.when(warp == 0)(functools.partial(_fill_ring, sizes, free, copy_weights))
                pl.when(warp == 1)(functools.partial(_fill_ring, sizes, free, copy_x))

            plgpu.warp_map(warp_body)

    num_slots = sizes.num_slots
    pl.run_scoped(
        scoped,
        swizzled_smem(num_slots, PRODUCT_ROWS, sizes.slot_inputs, dtype=sizes.dtype),
        swizzled_smem(num_slots, sizes.tokens, sizes.slot_inputs, dtype=sizes.dtype),
        plgpu.SMEM((sizes.tokens, TURNED_STRIDE), jnp.float32) if sizes.parts == 1 else None,
        plgpu.SMEM((sizes.tokens,), jnp.float32) if sizes.num_squares else None,
        plgpu.Barrier(num_arrivals=sizes.ways, num_barriers=num_slots),
        plgpu.Barrier(num_barriers=num_slots),
        plgpu.Barrier(num_barriers=num_slots),
        collective_axes="warpgroup",
    )


def _fill_ring(sizes: RowMatmulSizes, free: Ref, copy: Callable[[jax.Array, jax.Array], None]) -> None:
    """One warp: copy(step, slot) for all steps, as slots become free."""

    def step(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(sizes.num_slots))

        @pl.when(i >= sizes.num_slots)
        def _():
            plgpu.barrier_wait(free.at[slot])

        copy(i, slot)

    lax.fori_loop(0, sizes.steps, step, None)

    # Every completion of a barrier has to be waited for before the CTA ends.
    def drain(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(sizes.num_slots))])

    lax.fori_loop(sizes.steps - sizes.num_slots, sizes.steps, drain, None)


def _inputs(sizes: RowMatmulSizes, place: Place, step: jax.Array) -> Any:
    return pl.ds((place.part * sizes.steps + step) * sizes.slot_inputs, sizes.slot_inputs)


def _copy_weights(
    sizes: RowMatmulSizes, refs: RowMatmulRefs, place: Place, weights: Ref, full: Ref, step: jax.Array, slot: jax.Array
) -> None:
    """The rows of each way one below the other."""
    for way in range(sizes.ways):
        rows = pl.ds(way * sizes.num_outputs + place.unit * sizes.columns, sizes.columns)
        source = refs.weight.at[refs.of_layer(sizes, refs.weight), rows, _inputs(sizes, place, step)]
        target = weights.at[slot, pl.ds(way * sizes.columns, sizes.columns)]
        plgpu.copy_gmem_to_smem(source, target, full.at[slot])


def _copy_x(
    sizes: RowMatmulSizes, refs: RowMatmulRefs, place: Place, xs: Ref, full: Ref, step: jax.Array, slot: jax.Array
) -> None:
    source = refs.x.at[pl.ds(place.first_token, sizes.tokens), _inputs(sizes, place, step)]
    plgpu.copy_gmem_to_smem(source, xs.at[slot], full.at[slot])


def _sums(sizes: RowMatmulSizes, weights: Ref, xs: Ref, weights_full: Ref, xs_full: Ref, free: Ref) -> jax.Array:
    """f32[64, tokens] of a part of K, in registers that hold one number each, so that they can be stored turned."""

    def slot_of(step: jax.Array | int) -> jax.Array:
        return lax.rem(jnp.int32(step), jnp.int32(sizes.num_slots))

    def body(acc: Ref) -> jax.Array:
        def multiply(step: jax.Array | int) -> None:
            slot = slot_of(step)
            plgpu.barrier_wait(weights_full.at[slot])
            plgpu.barrier_wait(xs_full.at[slot])
            plgpu.wgmma(acc, weights.at[slot], xs.at[slot].transpose((1, 0)))

        def next_step(step: jax.Array, _: None) -> None:
            multiply(step)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(free.at[slot_of(step - 1)])

        multiply(0)
        lax.fori_loop(1, sizes.steps, next_step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(free.at[slot_of(sizes.steps - 1)])
        return plgpu.layout_cast(acc[...], plgpu.Layout._WGMMA_ACC_32BIT)

    return pl.run_scoped(body, plgpu.ACC((PRODUCT_ROWS, sizes.tokens), jnp.float32))


def _store_part(refs: RowMatmulRefs, place: Place, sums: jax.Array) -> None:
    refs.partials.at[place.group, place.part].transpose((1, 0))[...] = sums


def _parts(sizes: RowMatmulSizes, refs: RowMatmulRefs, place: Place, rows: Any, columns: Any) -> list[Ref]:
    return [refs.partials.at[place.group, part, rows, columns] for part in range(sizes.parts)]


def _add_parts(sizes: RowMatmulSizes, refs: RowMatmulRefs) -> None:
    """A kernel of its own that ends what _multiply began: for the interpreter, which has no atomics."""
    place = Place.of_cta(sizes)

    def scoped(rstd: Ref) -> None:
        @pl.when(jnp.logical_and(place.part < sizes.num_enders, refs.layer(sizes) >= 0))
        def _():
            if sizes.num_squares:
                write_rstd(sizes, refs, place, rstd)
            Results(sizes, refs, place).store(functools.partial(_parts, sizes, refs, place), rstd)

    rstd = plgpu.SMEM((sizes.tokens,), jnp.float32) if sizes.num_squares else None
    pl.run_scoped(scoped, rstd, collective_axes="warpgroup")
