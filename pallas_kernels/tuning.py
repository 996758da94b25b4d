"""How the Mosaic GPU kernels cut their work: the numbers a measurement may change without changing a result.

One H200 has 132 multiprocessors (SMs) with 227 KiB of shared memory each.
"""

from dataclasses import dataclass, replace
from typing import Literal

NUM_SMS = 132


@dataclass(frozen=True)
class DecodeConfig:
    """How decode attention is cut. See decode.paged_decode.

    The key tiles of all (request, kv head) items form one line; each thread block (CTA) takes a stretch of it.

    Attributes:
      tile: keys a step; a multiple of the block size and of 64.
      stages: steps in flight between the copying warp and the computing warps.
      num_ctas: CTAs of the grid, all stretches together.
      num_small_ctas: how many of them, the last, take shorter stretches: they even out SMs of unequal speed.
      small_ratio: how much shorter.
      min_tiles: a stretch is not cut below this many tiles.
      copy_warps: warps that copy: 1, or 2, one for K and one for V.
      merge: who combines the partial results of an item that several CTAs share. "atomic": the last to arrive.
        "kernel": a second kernel, for the interpreter, which has no atomics.
    """

    tile: int = 64
    stages: int = 3
    num_ctas: int = 2 * NUM_SMS
    num_small_ctas: int = 0
    small_ratio: int = 4
    min_tiles: int = 1
    copy_warps: int = 1
    merge: Literal["atomic", "kernel"] = "atomic"


@dataclass(frozen=True)
class PrefillConfig:
    """How prefill attention is cut. See prefill.paged_prefill.

    Attributes:
      tile: keys a step; a multiple of the block size and of 64.
      stages: steps in flight between the copying warp and the computing warps.
      num_ctas: persistent CTAs; shared memory allows one an SM.
      pingpong: the two computing warpgroups take turns on the tensor cores, as in FlashAttention-3.
      copy_warps: warps that copy: 1, or 2, one for K and one for V.
      p_in_registers: the probabilities go from registers into the second product. False takes them through shared
        memory, for the interpreter, and 10% slower on the card.
      copy_whole_tiles: q arrives and o leaves by one copy a warpgroup. False takes a copy a token, for the
        interpreter, which knows no reshaped references.
    """

    tile: int = 128
    stages: int = 2
    num_ctas: int = NUM_SMS
    pingpong: bool = False
    copy_warps: int = 1
    p_in_registers: bool = True
    copy_whole_tiles: bool = True


@dataclass(frozen=True)
class AttentionConfig:
    """What a step's attention runs with; static, and the same for its work lists and its kernels."""

    decode: DecodeConfig = DecodeConfig()
    prefill: PrefillConfig = PrefillConfig()


H200 = AttentionConfig()
# Few and small, so that the CPU interpreter gets through, with every path of the large ones.
INTERPRET = AttentionConfig(
    decode=DecodeConfig(stages=2, num_ctas=5, num_small_ctas=3, small_ratio=2, merge="kernel"),
    prefill=PrefillConfig(tile=64, num_ctas=2, p_in_registers=False, copy_whole_tiles=False),
)


def attention_config(*, interpret: bool, block_size: int) -> AttentionConfig:
    """The configuration for a backend.

    Args:
      interpret: for the CPU interpreter.
      block_size: slots of a KV cache block; a tile holds at least one block.
    """
    config = INTERPRET if interpret else H200
    return AttentionConfig(
        decode=replace(config.decode, tile=max(config.decode.tile, block_size)),
        prefill=replace(config.prefill, tile=max(config.prefill.tile, block_size)),
    )


@dataclass(frozen=True)
class MatmulConfig:
    """How products of few rows are cut. See skinny_matmul.matmul_stages.

    Attributes:
      num_ctas: CTAs of the grid. With `one_kernel` all of them have to be resident at once: at most one an SM.
      max_slots: weight tiles in flight; fewer if shared memory is short.
      one_kernel: the stages are one kernel, whose CTAs wait for each other by atomics. False: a kernel each, for the
        interpreter.
      copy_whole_tiles: see skinny_matmul. False: a copy an atom, for the interpreter.
    """

    num_ctas: int = NUM_SMS
    max_slots: int = 16
    one_kernel: bool = True
    copy_whole_tiles: bool = True


H200_MATMUL = MatmulConfig()
# Elements of the weights of a chain of products. XLA is as good where there are more.
MAX_PREFERRED_WEIGHTS = 48 * 2**20
INTERPRET_MATMUL = MatmulConfig(num_ctas=3, max_slots=2, one_kernel=False, copy_whole_tiles=False)


def matmul_config(*, interpret: bool, num_sms: int | None) -> MatmulConfig:
    """The configuration for a backend.

    Args:
      interpret: for the CPU interpreter.
      num_sms: of the GPU; None stands for an H200.
    """
    return INTERPRET_MATMUL if interpret else replace(H200_MATMUL, num_ctas=num_sms or NUM_SMS)
