"""Shape checks of the public ops: static, at trace time, with the remedy in the message."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.layer_slice import LayerArray
from pallas_kernels.reference_matmul import MatmulStage
from pallas_kernels.reference_rope_write import HeadNorm

Backend = Literal["reference", "mosaic_gpu", "mosaic_gpu_interpret"]
Kind = Literal["decode", "mixed"]


def is_interpreted(backend: Backend) -> bool:
    """Whether the kernels run in JAX's interpreter, on a CPU."""
    return backend == "mosaic_gpu_interpret"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_int32(**arrays: jax.Array) -> None:
    for name, array in arrays.items():
        _require(array.dtype == jnp.int32, f"{name} has dtype {array.dtype}, expected int32")


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is one of Backend."""
    _require(backend in get_args(Backend), f"{backend=} must be one of {get_args(Backend)}")


def check_kv_cache(kv_cache: jax.Array) -> None:
    """Raise ValueError unless the cache is [L, num_blocks, 2, K, block_size, H]."""
    _require(
        kv_cache.ndim == 6 and kv_cache.shape[2] == 2,
        f"kv_cache has shape {kv_cache.shape}, expected [L, num_blocks, 2, K, block_size, H]",
    )


def _check_cache_dtype(
    name: str, x: jax.Array | jax.ShapeDtypeStruct, kv_cache: jax.Array, kv_scale: LayerArray | None
) -> None:
    is_narrow = kv_cache.dtype == jnp.float8_e4m3fn
    _require(x.dtype == kv_cache.dtype or is_narrow, f"dtypes differ: {name} {x.dtype}, cache {kv_cache.dtype}")
    if kv_scale is not None:
        _require(is_narrow, f"kv_scale is for a float8_e4m3fn cache, this one is {kv_cache.dtype}: leave it out")
        _require(kv_scale.shape == (2,), f"{kv_scale.shape=}, expected (2,): of keys and of values")
        _require(kv_scale.dtype == jnp.float32, f"kv_scale has dtype {kv_scale.dtype}, expected float32")


def check_write(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None,
    norm: HeadNorm | None,
    kv_scale: LayerArray | None,
) -> None:
    """Raise ValueError if the arguments of rope_and_write_kv disagree."""
    check_kv_cache(kv_cache)
    num_kv_heads, cache_dim = kv_cache.shape[3], kv_cache.shape[5]
    _require(
        qkv.ndim == 4 and qkv.shape[1] == num_kv_heads and qkv.shape[2] > 2 and qkv.shape[3] <= cache_dim,
        f"qkv has shape {qkv.shape}, expected [T, K, G + 2, H] with K = {num_kv_heads}, H = {cache_dim} or less "
        f"for {kv_cache.shape=}",
    )
    num_tokens, head_dim = qkv.shape[0], qkv.shape[3]
    _check_cache_dtype("qkv", qkv, kv_cache, kv_scale)
    _require(slot_mapping.shape == (num_tokens,), f"{slot_mapping.shape=} expected ({num_tokens},), one slot a token")
    _require(layer.shape == (), f"{layer.shape=}, expected a scalar")
    _require_int32(slot_mapping=slot_mapping, layer=layer)
    for table in rope or ():
        _require(
            table.ndim == 2 and len(table) == num_tokens and 2 * table.shape[1] <= head_dim,
            f"a rope table has shape {table.shape}, expected [{num_tokens}, at most {head_dim // 2}]",
        )
    for weight in (norm.q_weight, norm.k_weight) if norm else ():
        _require(weight.shape == (head_dim,), f"a norm weight has shape {weight.shape}, expected ({head_dim},)")


def check_matmul_stages(x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None) -> None:
    """Raise ValueError if the arguments of matmul_stages disagree."""
    _require(x.ndim == 2, f"x has shape {x.shape}, expected [T, K]")
    _require(len(stages) > 0, "stages=(), expected at least one")
    num_rows, width = x.shape
    for i, stage in enumerate(stages):
        shape = stage.weight.shape
        _require(
            shape[-1] == width and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 2)),
            f"the weight of stage {i} has shape {shape}, expected [N, K] or [2, N, K] with K = {width}",
        )
        _require(stage.weight.dtype == x.dtype, f"dtypes differ: x {x.dtype}, weight of stage {i} {stage.weight.dtype}")
        for name, vector, expected in (
            ("norm_weight", stage.norm_weight, (width,)),
            ("bias", stage.bias, shape[:-1]),
        ):
            _require(
                vector is None or vector.shape == expected,
                f"{name} of stage {i} has shape {getattr(vector, 'shape', None)}, expected {expected}",
            )
        width = shape[-2]
        if stage.adds_residual:
            _require(
                residual is not None and residual.shape == (num_rows, width),
                f"residual has shape {getattr(residual, 'shape', None)}, expected {(num_rows, width)} for stage {i}",
            )


def check_norm(x: jax.Array, weight: LayerArray) -> None:
    """Raise ValueError if the arguments of rms_norm disagree."""
    _require(weight.shape == x.shape[-1:], f"weight has shape {weight.shape}, expected {x.shape[-1:]}")


def check_gate_up(gate_up: jax.Array) -> None:
    """Raise ValueError unless gate_up is [T, 2, F]."""
    _require(gate_up.ndim == 3 and gate_up.shape[1] == 2, f"gate_up has shape {gate_up.shape}, expected [T, 2, F]")


def check_attention(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    num_reqs: jax.Array,
    *,
    sliding_window: int | jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scale: LayerArray | None,
    kind: str,
) -> None:
    """Raise ValueError if the arguments of paged_attention disagree."""
    check_kv_cache(kv_cache)
    _require(kind in get_args(Kind), f"{kind=} must be one of {get_args(Kind)}")
    _require(q.ndim == 3, f"q has shape {q.shape}, expected [T, N, H]")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    num_rows = seq_lens.shape[0]
    _require(head_dim <= kv_cache.shape[5], f"q has head_dim {head_dim}, the cache {kv_cache.shape[5]}")
    _check_cache_dtype("q", q, kv_cache, kv_scale)
    _require(num_heads % num_kv_heads == 0, f"{num_heads=} must be a multiple of {num_kv_heads=}")
    has_window = isinstance(sliding_window, int)
    _require(not has_window or sliding_window > 0, f"{sliding_window=} must be at least 1, the token itself, or None")
    _require(soft_cap is None or soft_cap > 0, f"{soft_cap=} must be above 0, or None")
    _require(sinks is None or sinks.shape == (num_heads,), f"sinks must have shape ({num_heads},), one a query head")
    _require(
        block_tables.ndim == 2 and block_tables.shape[0] == num_rows,
        f"{block_tables.shape=}, expected [R, max_blocks] with R = {num_rows}",
    )
    _require(query_start_loc.shape == (num_rows + 1,), f"{query_start_loc.shape=}, expected ({num_rows + 1},)")
    _require(num_rows <= num_tokens, f"{num_rows} rows for {num_tokens} tokens: a row has at least one token")
    _require(kind != "decode" or num_rows == num_tokens, f"decode: {num_rows} rows but {num_tokens} tokens")
    _require(layer.shape == num_decodes.shape == num_reqs.shape == (), "layer, num_decodes, num_reqs must be scalars")
    _require_int32(
        layer=layer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        num_decodes=num_decodes,
        num_reqs=num_reqs,
    )
