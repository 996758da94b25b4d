"""Products of the prefill kernel that Pallas has no words for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import Ref, pl, plgpu


def start_product(a: Ref, b: Ref, *, interpret: bool) -> jax.Array:
    """Begin a @ b.T: f32[M, N] in the WGMMA layout, to be read after the wait for it (plgpu.wgmma_wait).

    Pallas begins a product by adding to registers that it sets to zero: 64 moves a thread for 64 rows by 128 columns,
    which the compiler drops before a loop and keeps within one. Here the first instruction of the product overwrites.

    Args:
      a: [M, K] in shared memory, swizzled and tiled for wgmma; M is 64.
      b: [N, K] likewise.
      interpret: for the interpreter: the product is complete.
    """
    shape = (a.shape[0], b.shape[0])
    if interpret:

        def body(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, a, b.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
    return _start_product(a, b, shape)


def _start_product(a: Ref, b: Ref, shape: tuple[int, int]) -> jax.Array:
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import llvm
    from jax.experimental.mosaic import gpu as mgpu

    layout = plgpu.Layout.WGMMA
    row_bytes = min(128, a.shape[1] * a.dtype.itemsize)
    tiling = plgpu.TilingTransform((8, row_bytes // a.dtype.itemsize))
    operand = plgpu.RefType((tiling, plgpu.SwizzleTransform(row_bytes)))

    @plgpu.inline_mgpu(
        arg_types=(operand, operand), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout)
    )
    def product(ctx: Any, a: Any, b: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        false = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 0)).result
        nothing = llvm.mlir_undef(f32)
        acc = mgpu.WGMMAAccumulator.from_registers(mgpu.FragmentedArray.splat(nothing, shape, layout.to_mgpu()))
        block = ir.InsertionPoint.current.block
        num_before = len(block.operations)
        acc = mgpu.wgmma(acc, a, mgpu.memref_transpose(b, (1, 0, 3, 2)), swizzle=row_bytes)
        first = next(
            op for op in list(block.operations)[num_before:]
            if op.name == "llvm.inline_asm" and "wgmma.mma_async" in str(op.attributes["asm_string"])
        )
        # Its operands: the accumulator's registers, the descriptors of a and b, and whether to add.
        first.operands[shape[1] // 2 + 2] = false
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        return acc.value

    return product(a, b)


MAX_GROWTH = 8.0


def keep_unless_far(highest: jax.Array, new_highest: jax.Array) -> jax.Array:
    """The old maximum of each row, in log2, or the new one where it is so much higher that weights would grow large."""
    return jnp.where(new_highest - highest > MAX_GROWTH, new_highest, highest)


def multiply_if_needed(acc: jax.Array, factor: jax.Array) -> jax.Array:
    """acc * factor[:, None], in a branch that a warp skips where all its factors are 1."""
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import llvm, vector
    from jax.experimental.mosaic import gpu as mgpu

    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, layout.reduce(1)), return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout)
    )
    def multiply(ctx: Any, acc: Any, factor: Any) -> Any:
        f32 = ir.F32Type.get()
        pairs = acc.registers.reshape(-1, 2)  # [blocks of 8 columns, rows of a thread], two columns each
        num = 2 * pairs.size
        factors = [vector.extract(row, [], [0]) for row in factor.registers.flat]
        values = [vector.extract(pair, [], [i]) for pair in pairs.flat for i in range(2)]
        first, second = f"${2 * num}", f"${2 * num + 1}"
        products = "".join(f"mul.f32 ${i}, ${i}, {second if i % 4 >= 2 else first}; " for i in range(num))
        ptx = (
            f"{{ .reg .pred p, q; setp.neu.f32 p, {first}, 0f3F800000; setp.neu.f32 q, {second}, 0f3F800000; "
            f"or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra done; {products} done: }}"
        )
        constraints = ",".join(["=f"] * num + [str(i) for i in range(num)] + ["f", "f"])
        new = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * num), [*values, *factors], ptx, constraints,
            asm_dialect=0, has_side_effects=True,
        )
        new = [llvm.extractvalue(f32, new, [i]) for i in range(num)]
        registers = pairs.copy()
        for i, index in enumerate(np.ndindex(*pairs.shape)):
            registers[index] = vector.from_elements(pairs[index].type, new[2 * i : 2 * i + 2])
        return mgpu.FragmentedArray(
            _registers=registers.reshape(acc.registers.shape), _layout=acc.layout, _is_signed=None
        )

    return multiply(acc, factor)
