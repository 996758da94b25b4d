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
      num_ctas: CTAs of the grid, one a stretch. 256 and not two for each of 132 SMs: it divides the items of many
        batches, so that no item is cut and nothing has to be merged, and 128 SMs saturate the memory. Of few rows it
        is one of 128, see FEW_DECODE_ROWS.
      merge: who combines the partial results of an item that several CTAs share. "atomic": the last to arrive.
        "kernel": a second kernel, for the interpreter, which has no atomics.
    """

    tile: int = 64
    stages: int = 2
    num_ctas: int = 256
    merge: Literal["atomic", "kernel"] = "atomic"


@dataclass(frozen=True)
class PrefillConfig:
    """How prefill attention is cut. See prefill.paged_prefill.

    Attributes:
      tile: keys a step; a multiple of the block size and of 64.
      stages: steps in flight between the copying warp and the computing warps.
      num_ctas: persistent CTAs; shared memory allows one an SM.
      warpgroups: computing warpgroups of a CTA, 64 query rows each: 2, or 1 for large heads.
      p_in_registers: the probabilities go from registers into the second product. False takes them through shared
        memory, for the interpreter, and 10% slower on the card.
      copy_whole_tiles: q arrives and o leaves by one copy a warpgroup. False takes a copy a token, for the
        interpreter, which knows no reshaped references.
    """

    tile: int = 128
    stages: int = 2
    num_ctas: int = NUM_SMS
    warpgroups: int = 2
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
    decode=DecodeConfig(num_ctas=5, merge="kernel"),
    prefill=PrefillConfig(tile=64, num_ctas=2, p_in_registers=False, copy_whole_tiles=False),
)
# Bytes of keys and values on their way to one SM: 128 KiB beat 192 KiB and 96 KiB at every length.
_BYTES_IN_FLIGHT = 128 * 1024
_MAX_SMEM_BYTES = 225 * 1024
# So many rows are decoded in tiles of 128 keys by one CTA an SM, more in tiles of 64 by two. Microseconds with tiles of
# 64 and of 128, 16-bit heads of 128, on one H200: 13.2 and 11.9 for 16 rows of 500 keys, 243.1 and 241.6 of 16,384,
# 39.8 and 38.9 for one of 32,768; but 34.7 and 35.3 for 64 rows of 500 keys, 193.7 and 195.4 for 256 of 800.
FEW_DECODE_ROWS = 16


def attention_config(
    *, interpret: bool, num_rows: int, block_size: int, head_dim: int = 128, cache_bytes: int = 2
) -> AttentionConfig:
    """The configuration for a backend, a bucket and a cache.

    Args:
      interpret: for the CPU interpreter.
      num_rows: requests, padded.
      block_size: slots of a KV cache block; a tile holds at least one block.
      head_dim: of the cache.
      cache_bytes: of a number in the cache, 2 or 1.
    """
    config = INTERPRET if interpret else H200
    is_narrow = cache_bytes == 1
    has_large_tiles = num_rows <= FEW_DECODE_ROWS and head_dim == 128 and not is_narrow and not interpret
    decode = replace(config.decode, tile=max(128 if has_large_tiles else config.decode.tile, block_size))
    prefill_tile = 64 if is_narrow or head_dim > 128 else config.prefill.tile
    prefill = replace(config.prefill, tile=max(prefill_tile, block_size), warpgroups=2 if head_dim <= 128 else 1)
    if interpret:
        return AttentionConfig(decode, prefill)
    tile_bytes = 2 * decode.tile * head_dim * cache_bytes
    # Larger heads take more than the 128 registers a thread that two CTAs leave each other.
    ctas_an_sm = 2 if 2 * tile_bytes <= _BYTES_IN_FLIGHT // 2 and head_dim <= 128 else 1
    stages = _BYTES_IN_FLIGHT // ctas_an_sm // tile_bytes
    decode = replace(decode, num_ctas=ctas_an_sm * 128, stages=stages)
    # Up to three copies of the query rows: as they arrive, as products read them if not from registers, and the result.
    row_bytes = 3 * prefill.warpgroups * 64 * head_dim * 2
    stage_bytes = 2 * prefill.tile * head_dim * (2 + is_narrow)
    prefill = replace(prefill, stages=min((_MAX_SMEM_BYTES - row_bytes) // stage_bytes, config.prefill.stages))
    return AttentionConfig(decode, prefill)


@dataclass(frozen=True)
class MatmulConfig:
    """How products of few rows are cut. See skinny_matmul.matmul_stages.

    Attributes:
      num_ctas: CTAs of the grid. With `one_kernel` all of them have to be resident at once: at most one an SM.
      max_slots: weight tiles of the ring; fewer if shared memory is short.
      one_kernel: stages are one kernel where they can be, whose CTAs wait for each other by atomics. Two such kernels
        must not run side by side: each result has to depend on the other's. False: a kernel each, for the interpreter.
      copy_whole_tiles: see skinny_matmul. False: a copy an atom, for the interpreter.
      in_flight: weight tiles, of 32 KiB mostly, that a CTA may have asked for and not got. With all slots asked for at
        once, the stores by which CTAs tell each other of their results took 3 us. 0: no bound, for the interpreter,
        where a thread that waits for a barrier once has to wait for all its completions.
    """

    num_ctas: int = NUM_SMS
    max_slots: int = 16
    one_kernel: bool = True
    copy_whole_tiles: bool = True
    in_flight: int = 2


H200_MATMUL = MatmulConfig()
# A chain of products whose input or weights are larger is left to XLA. Microseconds a layer without attention, kernels
# and XLA, on one H200: Qwen3-0.6B 24.7 and 30.7, SmolLM2-135M 20.9 and 32.1, Qwen3-1.7B 43.1 and 47.5; the qkv product
# alone of Llama-3.1-8B 23.7 and 18.9.
MAX_PREFERRED_INPUT = 2048  # columns
MAX_PREFERRED_WEIGHTS = 48 * 2**20  # elements
# The most rows whose products are kernels: skinny_matmul's, as measured above, for 8, row_matmul's for chains of more,
# up to the weights of Qwen3-0.6B. Milliseconds of all its layers at 800 keys, kernels and XLA, on one H200: 1.24 and
# 1.50 for 16 rows, 2.36 and 2.60 for 64, 3.88 and 4.01 for 128, but 7.10 and 6.90 for 256 (scripts/bench_rows.py); a
# product by itself, at 64, microseconds: qkv 16.1 and 12.5, gate-up 17.1 and 12.0 (scripts/bench_matmul.py). A layer of
# Llama-3.1-8B without attention: 116 and 115 us at 8 rows, 135 and 121 at 64.
MAX_PREFERRED_ROWS = 128
MAX_PREFERRED_WEIGHTS_OF_ROWS = 16 * 2**20  # elements
# Norms and gates of more rows than that are left to XLA up to here. Milliseconds a step of Qwen3-0.6B, XLA and
# kernels, on one H200: 7.057 and 7.068 for 256 rows, 5.141 and 5.108 for 2,048, 38.03 and 37.61 for 16,384.
MIN_PREFERRED_ROWS = 2048
INTERPRET_MATMUL = MatmulConfig(num_ctas=3, max_slots=2, one_kernel=False, copy_whole_tiles=False, in_flight=0)


def matmul_config(*, interpret: bool, num_sms: int | None) -> MatmulConfig:
    """The configuration for a backend.

    Args:
      interpret: for the CPU interpreter.
      num_sms: of the GPU; None stands for an H200.
    """
    return INTERPRET_MATMUL if interpret else replace(H200_MATMUL, num_ctas=num_sms or NUM_SMS)


@dataclass(frozen=True)
class RowMatmulConfig:
    """How products of 16 to 256 rows are cut. See row_matmul.matmul_stages.

    Attributes:
      num_ctas: CTAs that are resident at once, one an SM: so many at most wait for each other.
      max_parts: of K.
      exchange_bytes: what a CTA could read in the time that an exchange of parts takes beside its own bytes.
      max_tokens: rows that a CTA takes; more rows than that read the weights again.
      slot_bytes: of the ring, at most, unless 64 numbers of K take more.
      max_slots: of the ring; fewer if shared memory is short.
      smem_bytes: for the ring and for turning results around.
      one_kernel: stages are one kernel where they can be, whose CTAs wait for each other by atomics, as do those that
        share a product. Two such kernels must not run side by side: one's operands have to depend on the other's
        results. False: one each, and a second one where there are parts to add, for the interpreter.
      copy_whole_tiles: the weights of a gate and what it gates arrive by one copy. False: by two, for the interpreter,
        which forbids to read a union of references otherwise than it was written.
    """

    num_ctas: int = NUM_SMS
    max_parts: int = 8
    exchange_bytes: int = 192 * 1024
    max_tokens: int = 256
    slot_bytes: int = 16 * 1024
    max_slots: int = 8
    smem_bytes: int = 224 * 1024
    one_kernel: bool = True
    copy_whole_tiles: bool = True


H200_ROW_MATMUL = RowMatmulConfig()
# K is cut where it can be, and rings are short, so that small products take every path.
INTERPRET_ROW_MATMUL = RowMatmulConfig(
    max_parts=4,
    exchange_bytes=0,
    slot_bytes=1,
    max_slots=2,
    one_kernel=False,
    copy_whole_tiles=False,
)


def row_matmul_config(*, interpret: bool, num_sms: int | None) -> RowMatmulConfig:
    """The configuration for a backend; arguments as for matmul_config."""
    return INTERPRET_ROW_MATMUL if interpret else replace(H200_ROW_MATMUL, num_ctas=num_sms or NUM_SMS)
