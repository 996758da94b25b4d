"""Products of the prefill kernel that Pallas has no words for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import Ref, pl, plgpu


def start_product(a: Ref | jax.Array, b: Ref, *, interpret: bool) -> jax.Array:
    """Begin a @ b.T: f32[M, N] in the WGMMA layout, to be read after the wait for it (plgpu.wgmma_wait).

    Pallas begins a product by adding to registers that it sets to zero: 64 moves a thread for 64 rows by 128 columns,
    which the compiler drops before a loop and keeps within one. Here the first instruction overwrites.

    Args:
      a: [M, K] in shared memory, swizzled and tiled for wgmma, or in registers in the WGMMA layout; M is 64.
      b: [N, K] in shared memory likewise.
      interpret: for the interpreter: the product is complete.
    """
    shape = (a.shape[0], b.shape[0])
    if interpret:

        def body(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, a, b.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
    return _start_product(a, b, shape)


def _start_product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """The instructions of start_product: 16 columns of a and b each."""
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, llvm, vector
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import mma_utils

    layout = plgpu.Layout.WGMMA
    in_registers = isinstance(a, jax.Array)
    num_columns = b.shape[1]
    width = min(64, num_columns)  # columns of a swizzled tile
    operand = plgpu.RefType((plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)))

    def descriptors(matrix: Any, rows: int) -> list[Any]:
        """Of each 16 columns; addresses count 16 bytes."""
        (base, (_, (step,))), (_, of_tile), _ = mma_utils.create_descriptor(
            matrix, swizzle=2 * width, group_size=(rows, width), logical_k_major=False
        )
        i64 = ir.IntegerType.get_signless(64)
        steps = [(c // width * of_tile + c % width // 16 * step) // 16 for c in range(0, num_columns, 16)]
        return [arith.addi(base, arith.constant(i64, step)) for step in steps]

    @plgpu.inline_mgpu(
        arg_types=(layout if in_registers else operand, operand),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout),
    )
    def product(ctx: Any, a: Any, b: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        num = shape[1] // 2
        b_operands = descriptors(b, shape[1])
        if in_registers:
            pairs = [vector.bitcast(ir.VectorType.get((1,), i32), pair) for pair in a.registers.flat]
            a_operands = [vector.extract(pair, [], [0]) for pair in pairs]
        else:
            a_operands = descriptors(a, shape[0])
        of_a, of_b = (range(first, first + n) for first, n in ((num, len(a_operands)), (num + len(a_operands), len(b_operands))))
        dtype = str(mma_utils.tiled_memref_shape(b)[1])
        registers = "{" + ",".join(f"${i}" for i in range(num)) + "}"
        ptx = "{ .reg .pred add; setp.ne.b32 add, 0, 0; wgmma.fence.sync.aligned;"
        for i, b_operand in enumerate(of_b):
            mine = of_a[4 * i : 4 * i + 4] if in_registers else of_a[i : i + 1]
            name = ",".join(f"${a_operand}" for a_operand in mine)
            name, rest = ("{" + name + "}", "add, 1, 1, 0") if in_registers else (name, "add, 1, 1, 0, 0")
            ptx += f"wgmma.mma_async.sync.aligned.m64n{shape[1]}k16.f32.{dtype}.{dtype} {registers}, {name}, ${b_operand}, {rest};"
            ptx += "setp.eq.b32 add, 0, 0;" if i == 0 else ""
        ptx += "wgmma.commit_group.sync.aligned; }"
        constraints = ["=&f"] * num + ["r" if in_registers else "l"] * len(a_operands) + ["l"] * len(b_operands)
        results = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * num),
            [*a_operands, *b_operands],
            ptx,
            ",".join(constraints),
            asm_dialect=0,
            has_side_effects=True,
        )
        values = [llvm.extractvalue(f32, results, [i]) for i in range(num)]
        pair_type = ir.VectorType.get((2,), f32)
        pairs = [vector.from_elements(pair_type, values[i : i + 2]) for i in range(0, num, 2)]
        new = mgpu.FragmentedArray.splat(values[0], shape, layout.to_mgpu())
        registers = np.array(pairs, dtype=object).reshape(new.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=new.layout, _is_signed=None)

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
