"""What the prefill kernel computes in instructions of its own, where Pallas' cost it time."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import ATOM, MIN_SCORE, Ref, across_columns, pl, plgpu

_WGMMA = plgpu.Layout.WGMMA
# Columns of one instruction, and of a swizzled tile of 16-bit numbers.
_STEP, _TILE = 16, 64


def start_product(a: Any, b: Ref, *, interpret: bool) -> jax.Array:
    """Begin a @ b.T: f32[64, N] in the WGMMA layout, not to be read before plgpu.wgmma_wait.

    plgpu.wgmma adds to registers that were set to zero before: in a loop 64 moves a thread for N = 128, of 540
    instructions in all. And it takes a copy of `a` in registers, as if it changed them. Here neither is needed.

    Args:
      a: [64, H] of 16-bit floats, in registers in the WGMMA layout, or in shared memory as swizzled_smem lays it out.
      b: [N, H] in shared memory likewise.
      interpret: for the interpreter, which wants `a` in shared memory. The product is complete.
    """
    shape = (64, b.shape[0])
    if not interpret:
        return _start_product(a, b, shape)

    def body(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def _start_product(a: Any, b: Ref, shape: tuple[int, int]) -> jax.Array:
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, vector
    from jax.experimental.mosaic.gpu import mma_utils

    num_columns, num_registers = b.shape[1], shape[1] // 2
    num_steps = num_columns // _STEP
    in_registers = isinstance(a, jax.Array)
    in_smem = plgpu.RefType((plgpu.TilingTransform((ATOM, _TILE)), plgpu.SwizzleTransform(2 * _TILE)))

    def descriptor(matrix: Any, num_rows: int) -> tuple[Any, list[int]]:
        """Where the first step's columns lie, as wgmma wants to be told, and how far behind it each step's do."""
        options: dict[str, Any] = {"group_size": (num_rows, _TILE), "logical_k_major": False}
        described: Any = mma_utils.create_descriptor(matrix, swizzle=2 * _TILE, **options)
        (first, (_, (of_step,))), (_, of_tile), _ = described
        offsets = [c // _TILE * of_tile + c % _TILE // _STEP * of_step for c in range(0, num_columns, _STEP)]
        return first, [offset // 16 for offset in offsets]  # addresses count 16 bytes

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA if in_registers else in_smem, in_smem),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _WGMMA),
    )
    def product(ctx: Any, a: Any, b: Any) -> Any:
        b_first, b_offsets = descriptor(b, shape[1])
        if in_registers:  # pairs of numbers, four to a step
            one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
            operands = [vector.extract(vector.bitcast(one, pair), [], [0]) for pair in a.registers.flat]
            operands += [arith.addi(b_first, arith.constant(b_first.type, offset)) for offset in b_offsets]
            operand_constraints = ["r"] * (4 * num_steps) + ["l"] * num_steps
        else:
            a_first, a_offsets = descriptor(a, shape[0])
            operands, operand_constraints = [a_first, b_first], ["l", "l"]
        names = [f"${num_registers + i}" for i in range(len(operands))]
        acc = ", ".join(f"${i}" for i in range(num_registers))
        dtype = str(mma_utils.tiled_memref_shape(b)[1])
        ptx = "{ .reg .pred add; setp.ne.b32 add, 0, 0; wgmma.fence.sync.aligned; "
        ptx += "" if in_registers else ".reg .b64 a, b; .reg .b32 low, high; "
        for step in range(num_steps):
            if in_registers:
                a_name, b_name = f"{{{', '.join(names[4 * step : 4 * step + 4])}}}", names[4 * num_steps + step]
            else:
                a_name, b_name = "a", "b"
                ptx += _move_behind("a", names[0], a_offsets[step]) + _move_behind("b", names[1], b_offsets[step])
            rest = "add, 1, 1, 0" if in_registers else "add, 1, 1, 0, 0"  # factors; whether a and b are transposed
            ptx += f"wgmma.mma_async.sync.aligned.m64n{shape[1]}k{_STEP}.f32.{dtype}.{dtype} "
            ptx += f"{{{acc}}}, {a_name}, {b_name}, {rest}; setp.eq.b32 add, 0, 0; "
        ptx += "wgmma.commit_group.sync.aligned; }"
        constraints = ["=&f"] * num_registers + operand_constraints
        return _array(shape, _assemble(ptx, operands, constraints, num_registers))

    return product(a, b)


def _move_behind(name: str, first: str, offset: int) -> str:
    """Assembly for the descriptor of what lies `offset` behind the first.

    LLVM would add before the loops what does not change in them, and q's descriptors would take 14 registers all along.
    """
    return f"mov.b64 {{low, high}}, {first}; add.u32 low, low, {offset}; mov.b64 {name}, {{low, high}}; "


def multiply_if_needed(acc: jax.Array, factor: jax.Array) -> jax.Array:
    """acc * factor[:, None] of f32[64, H], in a branch that a warp skips where all its factors are 1. Not interpreted.

    With a condition of lax.cond the accumulator would be copied.
    """
    num_registers = acc.size // 128

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA.reduce(1)), return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, _WGMMA)
    )
    def multiply(ctx: Any, acc: Any, factor: Any) -> Any:
        values, factors = _values(acc), _values(factor)  # a thread has two rows, and in turn two columns of each
        # Behind the results and the operands that share their registers.
        of_row = [f"${2 * num_registers + row}" for row in range(2)]
        ptx = "{ .reg .pred p, q; "
        ptx += f"setp.neu.f32 p, {of_row[0]}, 0f3F800000; setp.neu.f32 q, {of_row[1]}, 0f3F800000; "
        ptx += "or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra done; "
        ptx += "".join(f"mul.f32 ${i}, ${i}, {of_row[i // 2 % 2]}; " for i in range(num_registers))
        ptx += "done: }"
        same = [str(i) for i in range(num_registers)]
        constraints = ["=f"] * num_registers + same + ["f", "f"]
        return _array(acc.shape, _assemble(ptx, [*values, *factors], constraints, num_registers))

    return multiply(acc, factor)


def hide_columns(scores: jax.Array, begin: jax.Array | None, end: jax.Array, *, interpret: bool) -> jax.Array:
    """Scores with MIN_SCORE in the columns of each row that are not in [begin, end).

    The interpreter compares with an array of column numbers; the compiler would keep these in registers all along.

    Args:
      scores: f32[rows, columns] in the WGMMA layout.
      begin, end: i32[rows] in the same layout; begin is None for 0.
    """
    if interpret:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
        seen = column < across_columns(end, scores)
        if begin is not None:
            seen = jnp.logical_and(seen, column >= across_columns(begin, scores))
        return jnp.where(seen, scores, MIN_SCORE)
    scores = _hide(scores, end, "from")
    return scores if begin is None else _hide(scores, begin, "before")


def _hide(scores: jax.Array, bound: jax.Array, which: Literal["from", "before"]) -> jax.Array:
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, vector
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA.reduce(1), _WGMMA), return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, _WGMMA)
    )
    def hide(ctx: Any, bound: Any, scores: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), i32)
        # A thread has two rows, 8 apart, and of each 8 columns two neighbours.
        first_column = arith.shli(arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(3, i32)), mgpu.utils.c(1, i32))
        bounds = [arith.subi(vector.extract(row, [], [0]), first_column) for row in bound.registers.flat]
        bounds = [vector.broadcast(pair_type, b) for b in bounds]
        smallest = vector.broadcast(ir.VectorType.get((2,), f32), mgpu.utils.c(MIN_SCORE, f32))
        comparison = arith.CmpIPredicate.slt if which == "from" else arith.CmpIPredicate.sge
        registers = scores.registers.copy().reshape(-1, 2)
        for (block, row), pair in np.ndenumerate(registers):
            columns = ir.DenseElementsAttr.get(np.array([8 * block, 8 * block + 1], np.int32), type=pair_type)
            is_seen = arith.cmpi(comparison, arith.constant(pair_type, columns), bounds[row])
            registers[block, row] = arith.select(is_seen, pair, smallest)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(scores.registers.shape), _layout=scores.layout, _is_signed=None
        )

    return hide(bound, scores)


def finish_before_what_follows(x: jax.Array) -> None:
    """Keep ptxas from moving the computation of x, f32[64, N] of numbers >= 0, behind the next wait for products.

    It may move arithmetic past a wait, and does, so that none would be left to overlap with the products. A store that
    depends on x and never happens holds it. Not for the interpreter.
    """
    from jax._src.lib.mlir.dialects import arith, vector
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(_WGMMA,))
    def finish(ctx: Any, x: Any) -> None:
        values = [vector.extract(pair, [], [i]) for pair in x.registers.flat for i in range(2)]
        store = "mov.u32 a, 0; setp.lt.f32 p, $0, 0f00000000; @p st.volatile.shared.f32 [a], $0;"
        ptx = f"{{ .reg .pred p; .reg .b32 a; {store} }}"
        mgpu.utils.inline_ptx(ptx, functools.reduce(arith.addf, values), has_side_effects=True)

    finish(x)


def _values(array: Any) -> list[Any]:
    """The f32 registers of an array, one after the other."""
    from jax._src.lib.mlir.dialects import vector

    return [vector.extract(v, [], [i]) for v in array.registers.flat for i in range(v.type.shape[0])]


def _array(shape: tuple[int, int], values: list[Any]) -> Any:
    """The array in the WGMMA layout that has these f32 registers, two neighbouring columns after each other."""
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import vector
    from jax.experimental.mosaic import gpu as mgpu

    layout = _WGMMA.to_mgpu()
    pair = ir.VectorType.get((2,), values[0].type)
    registers = np.empty(len(values) // 2, object)
    registers[:] = [vector.from_elements(pair, values[i : i + 2]) for i in range(0, len(values), 2)]
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def _assemble(ptx: str, operands: list[Any], constraints: list[str], num_results: int) -> list[Any]:
    """The f32 results of a piece of assembly."""
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import llvm

    f32 = ir.F32Type.get()
    results = llvm.StructType.get_literal([f32] * num_results)
    out = llvm.inline_asm(results, operands, ptx, ",".join(constraints), asm_dialect=0, has_side_effects=True)
    return [llvm.extractvalue(f32, out, [i]) for i in range(num_results)]
