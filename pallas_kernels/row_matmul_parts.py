"""How the thread blocks that share a product's sums tell each other that theirs are stored. Not for the interpreter."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.common import Ref, plgpu


def arrive(arrivals_ref: Ref, group: jax.Array) -> None:
    """Tell the others of the group that this one's sums are stored. All 128 threads call it."""

    def run(mgpu: Any, counter: Any) -> None:
        mgpu.utils.warpgroup_barrier()  # the stores of all 128 threads come before the release
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx("red.release.gpu.global.add.u32 [$0], 1;", counter, has_side_effects=True)

    _with_counter(arrivals_ref, group, run)


def wait_for_parts(arrivals_ref: Ref, group: jax.Array, parts: int, readers: int) -> None:
    """Wait until the sums of all parts are stored. All 128 threads of each of the readers call it, once.

    Each reader counts itself too, and the last one sets the counter back to 0, as all of them have seen it by then.
    """
    ptx = (
        "{ .reg .pred again; .reg .pred last; .reg .u32 seen; "
        f"poll: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 again, seen, {parts}; @again bra poll; "
        "atom.acq_rel.gpu.global.add.u32 seen, [$0], 1; "
        f"setp.eq.u32 last, seen, {parts + readers - 1}; @last st.global.u32 [$0], 0; }}"
    )

    def run(mgpu: Any, counter: Any) -> None:
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx(ptx, counter, has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    _with_counter(arrivals_ref, group, run)


def _with_counter(arrivals_ref: Ref, group: jax.Array, run: Callable[[Any, Any], None]) -> None:
    """Call run(mgpu, the address of a group's counter) where the kernel is lowered."""
    # The dialect modules are private until Pallas has atomics of its own here.
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def inline(ctx: Any, counters: Any, index: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        run(mgpu, mgpu.utils.getelementptr(mgpu.utils.memref_ptr(counters), [index.registers.item()], i32))

    inline(arrivals_ref, group)
