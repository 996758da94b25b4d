"""How the thread blocks of the few-row products wait for each other between products. Not for the interpreter."""

from typing import Any

from pallas_kernels.common import Ref, plgpu


def arrive(arrivals_ref: Ref, index: int) -> None:
    """Tell all CTAs that this one's part of a stage is stored. Not for the interpreter; all 128 threads call it."""
    _counters(arrivals_ref, "red.release.gpu.global.add.u32 [$0], 1;", "", index)


def wait_for_arrivals(arrivals_ref: Ref, index: int, count: int) -> None:
    """Wait until `count` CTAs have arrived; what they stored may be read then, by copies to shared memory too."""
    spin = (
        "{ .reg .pred again; .reg .u32 seen; "
        f"poll: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 again, seen, {count}; @again bra poll; }}"
    )
    _counters(arrivals_ref, spin, "fence.proxy.async;", index)


def reset_arrivals(arrivals_ref: Ref, index: int, num_ctas: int) -> None:
    """The last of all CTAs sets all counters back to 0."""
    last = (
        "{ .reg .pred last; .reg .u32 before; atom.acq_rel.gpu.global.add.u32 before, [$0], 1; "
        f"setp.eq.u32 last, before, {num_ctas - 1}; "
        + " ".join(f"@last st.global.u32 [$0 + {-4 * i}], 0;" for i in range(index + 1))
        + " }"
    )
    _counters(arrivals_ref, last, "", index)


def _counters(arrivals_ref: Ref, first: str, second: str, index: int) -> None:
    """One thread runs two instructions on a counter, the whole warpgroup before and after."""
    # The dialect modules are private until Pallas has atomics of its own here.
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx: Any, counters: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(counters), [index], i32)
            for text in (first, second):
                operands = (pointer,) if "$0" in text else ()
                if text:
                    mgpu.utils.inline_ptx(text, *operands, has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    run(arrivals_ref)
