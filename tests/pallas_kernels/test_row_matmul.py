"""Products of 16 to 256 rows with what surrounds them, on every backend, against a float64 oracle."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LayerSlice, MatmulStage, make_arrivals, matmul_stages, row_matmul
from pallas_kernels.arg_specs import LAYER_SHAPES, LayerShape, layer_stages
from pallas_kernels.common import zero_arrivals
from pallas_kernels.row_matmul_sizes import MAX_GROUPS, make_sizes, stages_by_kernel
from pallas_kernels.tuning import H200_ROW_MATMUL, INTERPRET_ROW_MATMUL
from tests.pallas_kernels.played_counters import PlayedCounters
from tests.pallas_kernels.test_matmul_stages import Case, Draw, assert_matches, layer_tail
from tests.pallas_kernels.test_mosaic_lowering import KERNEL

KERNELS = ("mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu))
DECODE_ROWS = (16, 32, 64, 96, 128, 192, 256)
LAYER = ("o", "gate_up", "down", "qkv")


def cut(rows: int, stage: MatmulStage, config=H200_ROW_MATMUL):
    return make_sizes(rows, jnp.bfloat16, (stage,), None, num_squares=0, layer_indices=[0], config=config)[0]


BF16, F16 = Draw("bfloat16"), Draw("float16")


def case_of(draw: Draw, rows: int, *stages: MatmulStage) -> Case:
    """All rows but for 5 are real, so that each share of them has some."""
    return draw.case(*stages, rows=rows, real_rows=rows - 5)


# The interpreter's configuration cuts K of 2 or 4 atoms of 64 into as many parts, and leaves K of 1 or 5 whole.
CASES = {
    "bias, activation, the ring goes round": case_of(BF16, 24, BF16.stage(192, 320, has_bias=True, activation="relu")),
    "parts, with more rows than a warpgroup takes at a time": case_of(
        BF16, 256, BF16.stage(64, 128, has_bias=True, adds_residual=True)
    ),
    "norm of Gemma, gate, bias": case_of(
        BF16,
        64,
        BF16.stage(2, 96, 320, has_norm=True, has_bias=True, unit_offset=True, activation="gelu_pytorch_tanh"),
    ),
    "all after each other, every product of parts": case_of(BF16, 16, *layer_tail(BF16, 128, 256, 128, has_bias=True)),
    "a norm behind a gate, float16": case_of(
        F16, 256, F16.stage(2, 64, 64, activation="silu"), F16.stage(64, 64, has_norm=True, unit_offset=True)
    ),
}
# The end of a layer and the beginning of the next one.
DOWN_AND_QKV = case_of(BF16, 64, BF16.stage(64, 128, adds_residual=True), BF16.stage(128, 64, has_norm=True))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_products_match_float64_and_pads_of_nan_reach_no_other_row(name, backend):
    assert_matches(CASES[name], backend)


@pytest.mark.parametrize(("rows", "following_layer"), [(16, 0), pytest.param(8, -1, marks=pytest.mark.slow)])
def test_products_in_one_kernel_have_the_bits_of_a_kernel_each(rows, following_layer, monkeypatch):
    """Thread blocks wait for each other; some have nothing of a stage, or two units; K is cut; the ring goes round."""
    case = case_of(F16, rows, *layer_tail(F16, 64, 256, 192, has_bias=True), F16.stage(64, 64, has_norm=True))
    x, stages, residual = jax.tree.map(partial(jnp.asarray, dtype=case.dtype), (case.x, case.stages, case.residual))
    layer, following = jnp.int32(1), jnp.int32(following_layer)
    layers = [layer, layer, layer, following]
    stages = tuple(
        jax.tree.map(lambda w, number=number: LayerSlice(jnp.stack([w, w]), number), stage)
        for stage, number in zip(stages, layers, strict=True)
    )

    def run(config):
        arrivals = zero_arrivals()
        outs = row_matmul.matmul_stages(x, stages, residual, arrivals, config=config, interpret=True)
        return [np.asarray(out, np.float64)[: case.real_rows] for out in outs[: 4 + min(following_layer, 0)]]

    expected = run(INTERPRET_ROW_MATMUL)
    counters = PlayedCounters(monkeypatch, row_matmul)
    config = replace(INTERPRET_ROW_MATMUL, one_kernel=True, num_ctas=5)
    found = run(config)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert counters.calls.count("reset_arrivals") == 5 and not any(counters.values.values())
    assert "wait_for_parts" in counters.calls


@pytest.mark.gpu
@pytest.mark.parametrize("rows", DECODE_ROWS)
def test_thread_blocks_that_wait_for_each_other_add_all_parts(rows):
    case = case_of(BF16, rows, *layer_tail(BF16, 1024, 2048, 3072), BF16.stage(4096, 1024, has_norm=True))
    assert_matches(case, "mosaic_gpu")
    np.testing.assert_array_equal(case.run("mosaic_gpu"), case.run("mosaic_gpu"))


@pytest.mark.parametrize("backend", KERNELS)
def test_weights_of_two_layers_are_found_in_stacks_and_bits_do_not_depend_on_pads_or_calls(backend):
    case = DOWN_AND_QKV
    x, (down, qkv), residual = jax.tree.map(
        partial(jnp.asarray, dtype=case.dtype), (case.x, case.stages, case.residual)
    )
    down = jax.tree.map(lambda w: jnp.stack([jnp.nan * w, w]), down)
    qkv = jax.tree.map(lambda w: jnp.stack([w, jnp.nan * w]), qkv)

    @jax.jit
    def run(layer, following):
        pairs = ((down, layer), (qkv, following))
        stages = tuple(jax.tree.map(partial(LayerSlice, layer=number), stage) for stage, number in pairs)
        return matmul_stages(x, stages, residual, make_arrivals(backend), backend=backend)

    first = [np.asarray(out, np.float64)[: case.real_rows] for out in run(jnp.int32(1), jnp.int32(0))]
    np.testing.assert_array_equal(first[1], case.run(backend)[: case.real_rows])
    last = run(jnp.int32(1), jnp.int32(-1))
    np.testing.assert_array_equal(np.asarray(last[0], np.float64)[: case.real_rows], first[0])
    other = replace(case, x=np.nan_to_num(case.x, nan=7.0), residual=np.nan_to_num(case.residual, nan=-3.0))
    np.testing.assert_array_equal(other.run(backend)[: case.real_rows], first[1], "whatever lies in pads")


@pytest.mark.parametrize("backend", KERNELS)
def test_weights_of_no_layer_are_there_when_there_is_no_next_layer(backend):
    case = DOWN_AND_QKV
    x, (down, qkv), residual = jax.tree.map(
        partial(jnp.asarray, dtype=case.dtype), (case.x, case.stages, case.residual)
    )

    @jax.jit
    def run(following):
        stages = down, jax.tree.map(lambda w: LayerSlice(jnp.stack([w, w]), following), qkv)
        return matmul_stages(x, stages, residual, make_arrivals(backend), backend=backend)[0]

    got = np.asarray(run(jnp.int32(-1)), np.float64)[: case.real_rows]
    np.testing.assert_array_equal(got, replace(case, stages=case.stages[:1]).run(backend)[: case.real_rows])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (BF16.case(BF16.stage(64, 64), rows=264), "264 rows, only multiples of 8 from 16 to 256"),
        (BF16.case(BF16.stage(64, 64), rows=20), "20 rows"),
        (BF16.case(BF16.stage(96, 64), rows=16), "64 inputs and 96 outputs, only multiples of 64 and 64"),
        (BF16.case(BF16.stage(2, 48, 64), rows=16), "48 outputs, only multiples of 64 and 32"),
        (BF16.case(BF16.stage(64, 96), rows=16), "96 inputs"),
        (BF16.case(BF16.stage(64, 64, activation="gelu"), rows=16), "activation gelu"),
        (Draw("float32").case(Draw("float32").stage(64, 64), rows=16), "dtype float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_a_kernel_it_says_why(case, message):
    with pytest.raises(NotImplementedError, match=f"{message}.*use backend 'reference'"):
        case.run("mosaic_gpu_interpret")


def test_how_the_products_of_a_layer_are_cut():
    """As in the LOG: attention's output and down in 8 parts, the others whole; all in flight that fits."""
    stages = layer_stages(LAYER_SHAPES[0])
    for rows in (16, 64):
        sizes = {name: cut(rows, stage) for name, stage in stages.items()}
        assert {name: (one.grid, one.parts) for name, one in sizes.items()} == {
            "qkv": (64, 1),
            "o": (128, 8),
            "gate_up": (96, 1),
            "down": (128, 8),
        }
    assert cut(64, stages["o"]).num_enders == 8 and cut(16, stages["o"]).num_enders == 4


@pytest.mark.parametrize(
    "config",
    [H200_ROW_MATMUL, INTERPRET_ROW_MATMUL, replace(H200_ROW_MATMUL, smem_bytes=64 * 1024, max_slots=1)],
    ids=["H200", "interpreter", "no room"],
)
@pytest.mark.parametrize("shape", LAYER_SHAPES, ids=lambda shape: shape.name)
def test_cuts_are_whole_and_thread_blocks_that_wait_are_resident(shape, config):
    for rows in (*DECODE_ROWS, 24):
        for name, stage in layer_stages(shape).items():
            sizes = cut(rows, stage, config)
            assert sizes.steps * sizes.slot_inputs * sizes.parts == sizes.num_inputs, name
            assert sizes.num_enders * sizes.rows_each == sizes.tokens and sizes.num_enders <= sizes.parts, name
            assert sizes.rows_each % sizes.end_rows == 0
            assert sizes.num_slots == sizes.steps or sizes.num_slots >= 2, name
            if sizes.parts > 1:
                assert sizes.num_places <= config.num_ctas and sizes.num_groups <= MAX_GROUPS, name


def test_how_the_products_of_a_layer_are_cut_as_one_kernel():
    def of_layer(shape):
        stages = tuple(layer_stages(shape)[name] for name in LAYER)
        (chain,) = stages_by_kernel(stages, H200_ROW_MATMUL)
        return make_sizes(
            64, jnp.bfloat16, chain, None, num_squares=0, layer_indices=[0, 0, 0, 1], config=H200_ROW_MATMUL
        )

    sizes = of_layer(LAYER_SHAPES[0])
    # Each begins where the one before ends, so that all have about as much to read; a ring serves all of them.
    assert [(one.first_cta, one.num_places) for one in sizes] == [(0, 128), (128, 96), (92, 128), (88, 64)]
    assert {(one.grid, one.tile, one.num_slots) for one in sizes} == {(132, 1, 8)}
    assert [one.num_squares for one in sizes] == [0, 16, 0, 16] and [one.layer_index for one in sizes] == [0, 0, 0, 1]
    # Of Llama-3.1-8B thread blocks have 3 or 4 units of gate and up.
    assert [(one.num_places, one.parts) for one in of_layer(LAYER_SHAPES[3])] == [(128, 2), (448, 1), (128, 2), (96, 1)]


@pytest.mark.parametrize(
    ("shape", "rows", "options"),
    tuple(zip(LAYER_SHAPES, (256, 16, 96, 256), ({}, {"unit_offset": True}, {"has_bias": True}, {}), strict=True)),
    ids=[shape.name for shape in LAYER_SHAPES],
)
def test_the_products_of_a_layer_lower_to_one_kernel(shape, rows, options):
    assert num_kernels(shape, rows, options) == 1


def num_kernels(shape: LayerShape, rows: int, options: dict) -> int:
    """Of the products of a layer. Mosaic checks layouts and the 227 KiB of shared memory while it lowers."""
    stages = layer_stages(shape, **options)
    stages = tuple(stages[name] for name in LAYER)

    def call(x, stages, residual):
        return matmul_stages(x, stages, residual, make_arrivals("mosaic_gpu"), backend="mosaic_gpu")

    x, residual = (jax.ShapeDtypeStruct((rows, width), jnp.bfloat16) for width in (shape.attended, shape.hidden))
    text = jax.jit(call).trace(x, stages, residual).lower(lowering_platforms=("cuda",)).as_text()
    return len(KERNEL.findall(text))
