"""How thread blocks wait for each other, between products of few rows and for parts of one. Not for the interpreter."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.common import Ref, one_thread, plgpu


def arrive(arrivals_ref: Ref, index: int | jax.Array) -> None:
    """Tell other CTAs, by a counter, that this one's part is stored. All 128 threads that compute call it."""

    def run(mgpu: Any, counter: Callable[[], Any]) -> None:
        mgpu.utils.warpgroup_barrier()  # the stores of all 128 threads come before the release
        with one_thread("WARPGROUP"):
            mgpu.utils.inline_ptx("red.release.gpu.global.add.u32 [$0], 1;", counter(), has_side_effects=True)

    _with_counter(arrivals_ref, index, run)


def wait_for_arrivals(arrivals_ref: Ref, index: int, count: int) -> None:
    """Wait until `count` CTAs have arrived; what they stored may then be copied to shared memory. A warp calls it."""
    spin = (
        "{ .reg .pred again; .reg .u32 seen; "
        f"poll: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 again, seen, {count}; @again bra poll; "
        "bar.warp.sync 0xffffffff; fence.proxy.async; }"
    )

    def run(mgpu: Any, counter: Callable[[], Any]) -> None:
        mgpu.utils.inline_ptx(spin, counter(), has_side_effects=True)

    _with_counter(arrivals_ref, index, run)


def reset_arrivals(arrivals_ref: Ref, index: int, num_ctas: int) -> None:
    """Tell that this CTA waits no more; the last of all CTAs sets all counters back to 0. A warp calls it."""
    last = (
        "{ .reg .pred last; .reg .u32 before; atom.acq_rel.gpu.global.add.u32 before, [$0], 1; "
        f"setp.eq.u32 last, before, {num_ctas - 1}; "
        + " ".join(f"@last st.global.u32 [$0 + {-4 * i}], 0;" for i in range(index + 1))
        + " }"
    )

    def run(mgpu: Any, counter: Callable[[], Any]) -> None:
        with one_thread("WARP"):
            mgpu.utils.inline_ptx(last, counter(), has_side_effects=True)

    _with_counter(arrivals_ref, index, run)


def wait_for_parts(arrivals_ref: Ref, index: int | jax.Array, parts: int, readers: int) -> None:
    """Wait until so many CTAs have arrived, and read what they stored. All 128 threads of each reader call it, once.

    Each reader counts itself too, and the last one sets the counter back to 0, as all of them have seen it by then.
    """
    ptx = (
        "{ .reg .pred again; .reg .pred last; .reg .u32 seen; "
        f"poll: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 again, seen, {parts}; @again bra poll; "
        "atom.acq_rel.gpu.global.add.u32 seen, [$0], 1; "
        f"setp.eq.u32 last, seen, {parts + readers - 1}; @last st.global.u32 [$0], 0; }}"
    )

    def run(mgpu: Any, counter: Callable[[], Any]) -> None:
        with one_thread("WARPGROUP"):
            mgpu.utils.inline_ptx(ptx, counter(), has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    _with_counter(arrivals_ref, index, run)


def _with_counter(arrivals_ref: Ref, index: int | jax.Array, run: Callable[[Any, Callable[[], Any]], None]) -> None:
    """Call run(mgpu, function that gives the address of a counter) where the kernel is lowered."""
    # The dialect modules are private until Pallas has atomics of its own here.
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax.experimental.mosaic import gpu as mgpu

    known = () if isinstance(index, jax.Array) else (index,)
    traced = (index,) if isinstance(index, jax.Array) else ()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT for _ in traced]))
    def inline(ctx: Any, counters: Any, *numbers: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        place = [*known, *(number.registers.item() for number in numbers)]
        run(mgpu, lambda: mgpu.utils.getelementptr(mgpu.utils.memref_ptr(counters), place, i32))

    inline(arrivals_ref, *traced)
