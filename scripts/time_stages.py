"""When each part of the kernel of a layer's few-row products begins and ends, by the clocks of the card's SMs.

    PYTHONPATH=.:scripts python scripts/time_stages.py

Stamps are written behind the counters of the kernel. Prints microseconds after the start of the kernel: the earliest,
the median and the latest of all thread blocks.
"""

import functools
import json
from typing import Any

import bench_matmul
import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.compile_cache import compiler_options
from pallas_kernels import skinny_matmul
from pallas_kernels.common import plgpu
from pallas_kernels.tuning import H200_MATMUL

NUM_STAMPS = 64
EVENTS: dict[str, int] = {}
arrivals_of_kernel: list[Any] = []


def stamp(name: str, threads: str) -> None:
    """Note the time in one thread of `threads`: WARPGROUP or WARP."""
    from jax.experimental.mosaic import gpu as mgpu

    slot = EVENTS.setdefault(name, 2 * len(EVENTS) + 8)
    assert slot < NUM_STAMPS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def inline(ctx: Any, counters: Any) -> None:
        with mgpu.utils.single_thread(scope=getattr(mgpu.utils.ThreadSubset, threads)):
            text = (
                "{ .reg .u32 t, g, c; .reg .u64 a; mov.u32 t, %clock; mov.u32 g, %globaltimer_lo; mov.u32 c, %ctaid.x; "
                f"mad.wide.u32 a, c, {4 * NUM_STAMPS}, $0; st.global.u32 [a + {4 * slot}], t; "
                f"st.global.u32 [a + {4 * slot + 4}], g; }}"
            )
            mgpu.utils.inline_ptx(text, mgpu.utils.memref_ptr(counters), has_side_effects=True)

    inline(arrivals_of_kernel[-1])


def patch(name: str, before: str | None, after: str | None, threads: str) -> None:
    plain = getattr(skinny_matmul, name)
    count = [0]

    @functools.wraps(plain)
    def stamped(*args: Any) -> Any:
        count[0] += 1
        if before:
            stamp(before.format(count[0]), threads)
        out = plain(*args)
        if after:
            stamp(after.format(count[0]), threads)
        return out

    setattr(skinny_matmul, name, stamped)


def stamp_layer(layer: jax.Array) -> None:
    """When the layer's number has come from memory."""
    from jax.experimental.mosaic import gpu as mgpu

    slot = EVENTS.setdefault("a layer read", 2 * len(EVENTS) + 8)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def inline(ctx: Any, counters: Any, layer: Any) -> None:
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARP):
            text = (
                "{ .reg .u32 t, c; .reg .u64 a; .reg .pred p; setp.ne.u32 p, $1, 0xffffffff; @p mov.u32 t, %clock; "
                f"mov.u32 c, %ctaid.x; mad.wide.u32 a, c, {4 * NUM_STAMPS}, $0; "
                f"@p st.global.u32 [a + {4 * slot}], t; }}"
            )
            operands = mgpu.utils.memref_ptr(counters), layer.registers.item()
            mgpu.utils.inline_ptx(text, *operands, has_side_effects=True)

    inline(arrivals_of_kernel[-1], layer)


def body(plain: Any, statics: Any, has_residual: bool, *refs: Any) -> None:
    arrivals_of_kernel.append(refs[1])
    plain(statics, has_residual, *refs)


def main() -> None:
    patch("wait_for_arrivals", None, "inputs of {0} + 1 are there", "WARP")
    patch("_copy_weights", "a copying warp begins", "b all weights used", "WARP")
    stamped = skinny_matmul._copy_weights

    def copy_weights(statics: Any, stages: Any, scratch: Any) -> None:
        stamp_layer(stages[0].layer)
        stamped(statics, stages, scratch)

    skinny_matmul._copy_weights = copy_weights
    patch("take_x", "x of {0} awaited", "x of {0} taken", "WARPGROUP")
    patch("compute_unit", None, "last unit of {0}", "WARPGROUP")
    patch("arrive", None, "arrived {0}", "WARPGROUP")
    patch("_compute", "a begins", "z ends", "WARPGROUP")
    skinny_matmul._body = functools.partial(body, skinny_matmul._body)
    shape = bench_matmul.MODELS["qwen3-0.6b"]
    params = bench_matmul.make_params(shape)
    num_layers = bench_matmul.NUM_LAYERS[shape.name]

    def chain(x: jax.Array, params: Any, arrivals: list[jax.Array]) -> jax.Array:
        attended = jnp.tile(x, (1, 2))
        for i in range(num_layers):
            layer = jax.tree.map(lambda w, i=i: w[i], params, is_leaf=bench_matmul._is_leaf)
            x, qkv = run(x, attended, layer, arrivals[i])
            attended = jax.lax.optimization_barrier(qkv[:, : shape.attended])
        return x

    run = jax.jit(functools.partial(bench_matmul.layer_kernels, config=H200_MATMUL, splits=0))
    arrivals = [jnp.zeros(132 * NUM_STAMPS + NUM_STAMPS, jnp.int32) for _ in range(num_layers)]
    args = (jnp.ones((8, shape.hidden), jnp.bfloat16), params, arrivals)
    compiled = jax.jit(chain).lower(*args).compile(compiler_options(jax.default_backend()))
    for _ in range(3):
        jax.block_until_ready(compiled(*args))
    print("us a layer, with stamps", round(1e6 * bench_matmul.seconds_a_call(compiled, args) / num_layers, 2))
    stamps = np.stack([np.asarray(a)[: 132 * NUM_STAMPS].reshape(132, NUM_STAMPS) for a in arrivals]).astype(np.uint32)
    begin, end = EVENTS["a begins"], EVENTS["z ends"]
    ticks = (stamps[..., end] - stamps[..., begin]).astype(np.int64).sum()
    ns = (stamps[..., end + 1] - stamps[..., begin + 1]).astype(np.int64).sum()
    ghz = ticks / ns
    first = stamps[..., begin + 1].min(axis=1)
    spread = (stamps[..., begin + 1] - first[:, None]).astype(np.int64)
    print("GHz", round(float(ghz), 3), "starts spread, ns", spread.mean(axis=0).max(), "kernel ns", np.median(
        (stamps[..., end + 1] - first[:, None]).astype(np.int64).max(axis=1)),
        "from kernel to kernel", np.median(np.diff(first.astype(np.int64))))  # fmt: skip
    for name, slot in sorted(EVENTS.items()):
        has = stamps[..., slot] != 0
        since = (stamps[..., slot] - stamps[..., begin]).astype(np.int32) / ghz / 1e3
        values = [since[i][has[i]] for i in range(2, num_layers)]
        values = [v for v in values if len(v)]
        if not values:
            continue
        row = [round(float(np.mean([f(v) for v in values])), 2) for f in (np.min, np.median, np.max)]
        print(json.dumps({"event": name, "ctas": int(has[5].sum()), "first, median, last": row}))


if __name__ == "__main__":
    main()
