"""The public ops. One place decides which backend runs; `reference` modules define what each means."""

import jax

from pallas_kernels import mosaic_attention, mosaic_matmul, reference, reference_matmul, reference_rope_write
from pallas_kernels.layer_slice import LayerArray
from pallas_kernels.reference_matmul import Activation, MatmulStage
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.validation import (
    Backend,
    Kind,
    check_attention,
    check_backend,
    check_gate_up,
    check_matmul_stages,
    check_norm,
    check_write,
)
from pallas_kernels.work_lists import AttentionWork


def rope_and_write_kv(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
    norm: HeadNorm | None = None,
    kv_scale: LayerArray | None = None,
    backend: Backend = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Norm and rotate the step's new queries and keys, and write keys and values into their cache slots.

    Args:
      qkv: [T, K, G + 2, H]: for each kv head its G query heads, its key, its value; rows past the real token count
        are pads.
      kv_cache: [L, num_blocks, 2, K, block_size, H or more] of qkv's dtype, or float8_e4m3fn; consumed: use the
        returned array. What it has beyond H becomes zero: kernels want heads padded (see cache_head_dim).
      slot_mapping: i32[T] flat slot (block_id * block_size + offset) a token; pads hold 0, in the null block.
        Never -1: JAX wraps it to the last slot.
      layer: i32[] which layer's part of the cache to write.
      rope: cos and sin, f32[T, rotated / 2] each, of the half-split layout; None rotates nothing.
      norm: RMSNorm of the query and key heads, before the rotation; None norms nothing.
      kv_scale: f32[2], of keys and of values in a float8_e4m3fn cache, which holds x / scale, clipped to its range;
        None for 1.
      backend: static; chosen once by the runner.

    Returns:
      q [T, K * G, H], for paged_attention, and kv_cache, same shape and dtype, updated in place where the caller
      donated or carries it. Norm and rotation are float32 and each is rounded to the dtype of qkv. What the null
      block holds afterwards is not defined.

    Raises:
      ValueError: shapes or dtypes disagree, or the backend is unknown.
      NotImplementedError: the backend has no kernel for these arguments.
    """
    check_backend(backend)
    check_write(qkv, kv_cache, slot_mapping, layer, rope=rope, norm=norm, kv_scale=kv_scale)
    options = {"rope": rope, "norm": norm, "kv_scale": kv_scale}
    if backend == "reference":
        return reference_rope_write.rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, **options)
    return mosaic_attention.rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, **options, backend=backend)


def paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    num_reqs: jax.Array,
    work: AttentionWork | None = None,
    *,
    scale: float,
    sliding_window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    kind: Kind,
    backend: Backend = "reference",
) -> jax.Array:
    """Causal attention of the step's tokens over the paged cache, which already holds their own keys and values.

    Tokens lie request after request without a gap: rows [0, num_decodes) have one token each, rows
    [num_decodes, num_reqs) have any number; the rest of T and R is padding.

    Args:
      q: [T, N, H] rotated queries; query head n reads kv head n // (N / K).
      kv_cache: [L, num_blocks, 2, K, block_size, H or more] of q's dtype, or float8_e4m3fn.
      layer: i32[] which layer's part of the cache to read.
      block_tables: i32[R, max_blocks] block ids of each row in order; unused entries hold 0, the null block.
      seq_lens: i32[R] keys of each row, its new tokens included; 0 in pad rows.
      query_start_loc: i32[R + 1] first token of each row; pads repeat the number of real tokens.
      num_decodes: i32[] leading rows with exactly one token.
      num_reqs: i32[] real rows.
      work: from make_attention_work with the same backend, sizes and windows; None, for the reference only.
      scale: factor of the scores, usually H ** -0.5.
      sliding_window: a query at position p sees keys p - sliding_window + 1 .. p; None sees all. An i32[] array
        is for layers that differ inside one scan and is for the reference only.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      sinks: f32[N], a score of each head that no key has and that takes its share of the softmax; None for none.
      kv_scale: f32[2], of keys and of values in a float8_e4m3fn cache; None for 1.
      kind: static; "decode" promises T == R and one token in every real row.
      backend: static; chosen once by the runner.

    Returns:
      [T, N, H] of q's dtype; zeros for pad tokens. Softmax is accumulated in float32. What lies in slots that no
      query may see (null block, tail of a last block, keys before the window) never matters, NaN included.

    Raises:
      ValueError: shapes or dtypes disagree, or kind or backend is unknown.
      NotImplementedError: the backend has no kernel for these arguments.
    """
    check_backend(backend)
    rows = (block_tables, seq_lens, query_start_loc, num_decodes, num_reqs)
    options = {"sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks, "kv_scale": kv_scale}
    check_attention(q, kv_cache, layer, *rows, **options, kind=kind)
    options |= {"scale": scale}
    if backend == "reference":
        return reference.paged_attention(q, kv_cache, layer, *rows, kind=kind, **options)
    if work is None:
        raise ValueError(f"work=None, expected what make_attention_work returns for {backend=}")
    rows = (block_tables, seq_lens, query_start_loc)
    return mosaic_attention.paged_attention(q, kv_cache, layer, *rows, work, **options, backend=backend)


def rope_write_and_attend(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_reqs: jax.Array,
    work: AttentionWork | None = None,
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
    norm: HeadNorm | None = None,
    scale: float,
    sliding_window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scale: LayerArray | None = None,
    backend: Backend = "reference",
) -> tuple[jax.Array, jax.Array]:
    """rope_and_write_kv and then paged_attention of kind "decode", in one: T == R and one token in every real row.

    Args:
      qkv, kv_cache, slot_mapping, layer, rope, norm, kv_scale: as in rope_and_write_kv; the cache is consumed.
      block_tables, seq_lens, query_start_loc, num_reqs, work, scale, sliding_window, soft_cap, sinks: as in
        paged_attention. The slot of a row's token is the one of its key seq_lens - 1.
      backend: static; chosen once by the runner.

    Returns:
      [T, N, H] of paged_attention, and kv_cache of rope_and_write_kv.

    Raises:
      ValueError: shapes or dtypes disagree, or the backend is unknown.
      NotImplementedError: the backend has no kernel for these arguments.
    """
    check_backend(backend)
    check_write(qkv, kv_cache, slot_mapping, layer, rope=rope, norm=norm, kv_scale=kv_scale)
    num_tokens, num_kv_heads, parts, head_dim = qkv.shape
    q = jax.ShapeDtypeStruct((num_tokens, num_kv_heads * (parts - 2), head_dim), qkv.dtype)
    rows = (block_tables, seq_lens, query_start_loc, num_reqs, num_reqs)
    options = {"sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks, "kv_scale": kv_scale}
    check_attention(q, kv_cache, layer, *rows, **options, kind="decode")
    options |= {"scale": scale}
    if backend == "reference":
        to_write = {"rope": rope, "norm": norm, "kv_scale": kv_scale}
        q, kv_cache = reference_rope_write.rope_and_write_kv(qkv, kv_cache, slot_mapping, layer, **to_write)
        return reference.paged_attention(q, kv_cache, layer, *rows, kind="decode", **options), kv_cache
    if work is None:
        raise ValueError(f"work=None, expected what make_attention_work returns for {backend=}")
    rows = (block_tables, seq_lens, query_start_loc)
    options |= {"rope": rope, "norm": norm, "backend": backend}
    return mosaic_attention.rope_write_and_attend(qkv, kv_cache, slot_mapping, layer, *rows, work, **options)


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None = None,
    arrivals: jax.Array | None = None,
    *,
    backend: Backend = "reference",
) -> tuple[jax.Array, ...]:
    """Products with weights, one after the other, each with what surrounds it: norm, bias, activation, gate, residual.

    Args:
      x: [T, K], of the weights' dtype; rows past the real token count are pads.
      stages: the result of each is the input of the next. Their weights may be slices of different layers. Kernels
        leave the last one out if its layer is -1; what it gives is not defined then.
      residual: [T, N], for the first stage that adds it; what that stage gives is the residual of later ones.
      arrivals: from make_arrivals, once a step; the kernels count in it. None, for the reference only.
      backend: static; chosen once by the runner. See prefers_matmul_kernel.

    Returns:
      [T, N] of each stage, in x's dtype. Sums are float32. Rows do not mix: NaN in a pad stays there. The kernels
      round a normed input once, after the product with the norm's weight, and a stage's result once; XLA, which the
      reference leaves this to, may round in between.

    Kernels take FEW_ROWS rows, or multiples of 8 from 16 to 256, whose first norm is XLA's. The products of more rows
    are XLA's with every backend, with the kernels of rms_norm and act_and_mul around them where these have one.

    Raises:
      ValueError: shapes or dtypes disagree, or the backend is unknown.
      NotImplementedError: the backend has no kernel for these arguments.
    """
    check_backend(backend)
    check_matmul_stages(x, stages, residual)
    if backend == "reference":
        return reference_matmul.matmul_stages(x, stages, residual)
    if arrivals is None:
        raise ValueError(f"arrivals=None, expected what make_arrivals returns for {backend=}")
    return mosaic_matmul.matmul_stages(x, stages, residual, arrivals, backend=backend)


def rms_norm(
    x: jax.Array,
    weight: LayerArray,
    *,
    eps: float,
    unit_offset: bool = False,
    backend: Backend = "reference",
) -> jax.Array:
    """x / rms(x) * weight over the last axis, with float32 statistics.

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.
      unit_offset: the factor is 1 + weight.
      backend: static; chosen once by the runner.

    Returns:
      x's shape and dtype. As in transformers, x / rms(x) is rounded to that dtype before the product with the weight,
      except with `unit_offset`, where the product is float32. Rows do not mix.

    Raises:
      ValueError: shapes disagree, or the backend is unknown.
      NotImplementedError: the backend has no kernel for these arguments.
    """
    check_backend(backend)
    check_norm(x, weight)
    if backend == "reference":
        return reference_rope_write.rms_norm(x, weight, eps=eps, unit_offset=unit_offset)
    return mosaic_matmul.rms_norm(x, weight, eps=eps, unit_offset=unit_offset, backend=backend)


def act_and_mul(gate_up: jax.Array, activation: Activation, *, backend: Backend = "reference") -> jax.Array:
    """activation(gate) * up of gate_up [T, 2, F], gate first: [T, F].

    Args:
      backend: static; chosen once by the runner. Its kernels compute in float32 and round once.

    Raises:
      ValueError: the shape is another one, or the backend is unknown.
      NotImplementedError: the backend has no kernel for these arguments.
    """
    check_backend(backend)
    check_gate_up(gate_up)
    if backend == "reference":
        return reference_matmul.act_and_mul(gate_up, activation)
    return mosaic_matmul.act_and_mul(gate_up, activation, backend=backend)
