"""Rows of scripts/bench_kernels.py about decode: attention alone, and with norm, rope and KV write in one kernel."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_measuring import (
    READ_CEILING,
    Measurement,
    Program,
    Requests,
    Row,
    cache_shape,
    check,
    layer_of,
    normal_program,
    num_of_calls,
    read_program,
    seconds_a_call,
    specs_of,
    timing_row,
)
from kernel_shapes import DecodeShape

from pallas_kernels.decode import paged_decode
from pallas_kernels.mosaic_attention import write_and_attend
from pallas_kernels.reference_rope_write import HeadNorm, norm_and_rotate
from pallas_kernels.work_lists import cut_attention_work, make_decode_work


def decode_row(shape: DecodeShape) -> Measurement:
    """Decode attention of one layer."""
    config = shape.config.decode
    num_calls = num_of_calls(shape.num_bytes < 2**26)
    requests = Requests(np.array(shape.lens, np.int32), np.ones(len(shape.lens), np.int32), shape.block_size)
    cut = partial(make_decode_work, num_kv_heads=shape.num_kv_heads, sliding_window=shape.sliding_window, config=config)
    one = jax.jit(partial(paged_decode, **shape.options(), config=config))

    def chain(q, kv_cache, tables, lens, starts, work):
        first = q = one(q, kv_cache, layer_of(0), tables, lens, starts, work)
        for i in range(1, num_calls):
            q = one(q, kv_cache, layer_of(i), tables, lens, starts, work)
        return first, q

    q_sizes = (len(requests.lens), shape.num_heads, shape.cache_head_dim)
    cache = jax.ShapeDtypeStruct(cache_shape(requests, shape), shape.kv_dtype)
    count = np.int32(len(requests.lens))
    work = jax.eval_shape(cut, *specs_of(requests.lens, count))
    q = jax.ShapeDtypeStruct(q_sizes, shape.dtype)
    programs = {
        "chain": Program(chain, (q, cache, *specs_of(requests.tables, requests.lens, requests.starts), work)),
        "work": Program(cut, specs_of(requests.lens, count)),
        "cache": normal_program(cache.shape, shape.kv_dtype),
        "q": normal_program(q_sizes, shape.dtype, seed=1),
        "read": read_program(requests, shape),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        q, kv_cache = compiled["q"](), compiled["cache"]()
        lens = jnp.asarray(requests.lens)
        rest = (jnp.asarray(requests.tables), lens, jnp.asarray(requests.starts), compiled["work"](lens, count))
        outs = [np.asarray(compiled["chain"](q, kv_cache, *rest)[0]) for _ in range(2)]
        checked = check(shape, requests, compiled["read"], kv_cache, q, outs)
        seconds = seconds_a_call(compiled["chain"], (q, kv_cache, *rest)) / num_calls
        rate = shape.num_bytes / seconds / 1e12
        return timing_row("decode", shape.name, seconds, rate=rate, unit="TB/s", ceiling=READ_CEILING) | checked

    return Measurement(shape.name, programs, measure)


def write_and_decode_row(shape: DecodeShape) -> Measurement:
    """Norm, rope, KV write and decode attention of one layer: in a chain each call gets the cache of the one before."""
    num_calls = num_of_calls(shape.num_bytes < 2**26)
    requests = Requests(np.array(shape.lens, np.int32), np.ones(len(shape.lens), np.int32), shape.block_size)
    sizes = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "num_tokens": len(shape.lens)}
    cut = partial(cut_attention_work, **sizes, kind="decode", windows=(shape.sliding_window,), config=shape.config)
    rows = (requests.lens, requests.starts, np.int32(0), np.int32(len(shape.lens)))
    one = jax.jit(partial(write_and_attend, **shape.options(), config=shape.config))
    last = requests.lens - 1
    slots = requests.tables[np.arange(len(last)), last // shape.block_size] * shape.block_size + last % shape.block_size
    qkv_sizes = (len(last), shape.num_kv_heads, shape.num_heads // shape.num_kv_heads + 2, shape.head_dim)

    def chain(kv_cache, first, qkv, cos, sin, weight, slots, tables, lens, starts, work):
        norm = HeadNorm(weight, weight, eps=1e-6)
        for i in range(num_calls):
            out, kv_cache = one(
                qkv, kv_cache, slots, layer_of(i), tables, lens, starts, work, rope=(cos, sin), norm=norm
            )
            first = out if i == 0 else first
        return kv_cache, first

    def queries(qkv, cos, sin, weight):
        q = norm_and_rotate(qkv, (cos, sin), HeadNorm(weight, weight, eps=1e-6))[0]
        return q.reshape(len(q), -1, q.shape[-1])

    cache = jax.ShapeDtypeStruct(cache_shape(requests, shape), shape.kv_dtype)
    qkv = jax.ShapeDtypeStruct(qkv_sizes, shape.dtype)
    table = jax.ShapeDtypeStruct((len(last), shape.head_dim // 2), jnp.float32)
    weight = jax.ShapeDtypeStruct((shape.head_dim,), shape.dtype)
    out = jax.eval_shape(queries, qkv, table, table, weight)
    lists = specs_of(slots, requests.tables, requests.lens, requests.starts)
    programs = {
        "chain": Program(
            chain, (cache, out, qkv, table, table, weight, *lists, jax.eval_shape(cut, *specs_of(*rows))), (0, 1)
        ),
        "work": Program(cut, specs_of(*rows)),
        "cache": normal_program(cache.shape, shape.kv_dtype),
        "qkv": normal_program(qkv_sizes, shape.dtype, seed=1),
        "weight": normal_program(weight.shape, shape.dtype, seed=2),
        "queries": Program(queries, (qkv, table, table, weight)),
        "out": normal_program(out.shape, shape.dtype),
        "read": read_program(requests, shape),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        angles = np.random.default_rng(0).uniform(0, 999, table.shape).astype(np.float32)
        new = (compiled["qkv"](), jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)), compiled["weight"]())
        arrays = tuple(jnp.asarray(x) for x in (slots, requests.tables, requests.lens, requests.starts))
        rest = (*new, *arrays, compiled["work"](*rows))
        kv_cache, first = compiled["cache"](), compiled["out"]()
        outs = []
        for _ in range(2):
            kv_cache, first = compiled["chain"](kv_cache, first, *rest)
            outs.append(np.asarray(first))
        checked = check(shape, requests, compiled["read"], kv_cache, compiled["queries"](*new), outs)
        seconds = seconds_a_call(compiled["chain"], (kv_cache, first, *rest), carry=True) / num_calls
        rate = shape.num_bytes / seconds / 1e12
        return (
            timing_row("write and decode", shape.name, seconds, rate=rate, unit="TB/s", ceiling=READ_CEILING) | checked
        )

    return Measurement(f"write and {shape.name}", programs, measure)
