"""The KV write as a Pallas Mosaic GPU kernel, in place: two copies a token, each K strided rows of the cache.

Letters: T tokens  K kv heads  H head_dim
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import Ref, pl, plgpu

# Tokens of a thread block: their slots are read together, and their rows wait in shared memory.
MAX_TOKENS_PER_CTA = 8


def write_kv_cache(
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Write new keys and values into their cache slots.

    Args:
      k, v: bf16[T, K, H].
      kv_cache: bf16[L, num_blocks, 2, K, block_size, H]; consumed, and written in place where nothing else reads it.
      slot_mapping: i32[T] flat slot of each token; slots of the null block (block 0, pads) are not written.
      layer: i32[].
      interpret: False, or InterpretGPUParams.

    Returns:
      kv_cache, same shape and dtype.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    block_size = kv_cache.shape[4]
    tokens = math.gcd(num_tokens, MAX_TOKENS_PER_CTA)
    cache_ref = jax.new_ref(kv_cache, memory_space=plgpu.GMEM)
    buffer = plgpu.SMEM((tokens, num_kv_heads, head_dim), k.dtype)

    def body(k_ref: Ref, v_ref: Ref, slots_ref: Ref, layer_ref: Ref, cache_ref: Ref) -> None:
        pl.run_scoped(
            functools.partial(_write, tokens, block_size, (k_ref, v_ref), slots_ref, layer_ref, cache_ref),
            buffer,
            buffer,
            plgpu.Barrier(num_arrivals=2),
        )

    pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(grid=(num_tokens // tokens,), grid_names=("cta",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="write_kv_cache",
    )(k, v, slot_mapping, layer.reshape(1), cache_ref)
    return jax.freeze(cache_ref)


def _write(
    tokens: int,
    block_size: int,
    kv_refs: tuple[Ref, Ref],
    slots_ref: Ref,
    layer_ref: Ref,
    cache_ref: Ref,
    *scratch: Ref,
) -> None:
    """The body of the kernel: `tokens` tokens of one thread block."""
    *buffers, full = scratch
    first = lax.axis_index("cta") * tokens
    for source, buffer in zip(kv_refs, buffers, strict=True):
        plgpu.copy_gmem_to_smem(source.at[pl.ds(first, tokens)], buffer, full)
    layer = layer_ref[0]
    slots = [slots_ref[first + t] for t in range(tokens)]
    plgpu.barrier_wait(full)
    for t, slot in enumerate(slots):
        block = lax.div(slot, jnp.int32(block_size))

        @pl.when(block > 0)
        def _(t: int = t, slot: jax.Array = slot, block: jax.Array = block):
            for kv, buffer in enumerate(buffers):
                target = cache_ref.at[layer, block, kv, :, slot - block * block_size]
                plgpu.copy_smem_to_gmem(buffer.at[t], target)

    plgpu.wait_smem_to_gmem(0)
