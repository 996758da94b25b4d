"""Rows of scripts/bench_kernels.py about prefill, mixed steps and their work lists, and the KV write."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kernel_shapes as shapes
import numpy as np
from kernel_measuring import (
    CHAIN,
    MATMUL_CEILING,
    NUM_LAYERS,
    Measurement,
    Program,
    Requests,
    Row,
    cache_shape,
    check,
    device_seconds,
    layer_of,
    normal_program,
    num_of_calls,
    read_program,
    seconds_a_call,
    specs_of,
    timing_row,
)
from kernel_shapes import KernelShape, MixedStep, PrefillShape

from pallas_kernels import ops
from pallas_kernels.mosaic_attention import attend
from pallas_kernels.prefill import paged_prefill
from pallas_kernels.reference_rope_write import HeadNorm
from pallas_kernels.work_lists import cut_attention_work, make_prefill_work


def prefill_row(shape: PrefillShape) -> Measurement:
    """Prefill attention of one layer. Three arrays take turns: q, the last result, the first result."""
    config = shape.config_for(shape.num_requests).prefill
    sizes = np.ones(shape.num_requests, np.int32)
    requests = Requests(sizes * (shape.new + shape.cached), sizes * shape.new, shape.block_size)
    num_tokens = shape.num_requests * shape.new
    group = shape.num_heads // shape.num_kv_heads
    cut = partial(make_prefill_work, num_tokens=num_tokens, group_size=group, config=config)
    rows = (requests.lens, requests.starts, np.int32(0), np.int32(shape.num_requests))
    one = jax.jit(partial(paged_prefill, **shape.options(), config=config))

    def chain(q, x, y, kv_cache, tables, work):
        first = one(q, kv_cache, layer_of(0), tables, y, work)
        last, spare = one(first, kv_cache, layer_of(1), tables, x, work), q
        for i in range(2, CHAIN):
            last, spare = one(last, kv_cache, layer_of(i), tables, spare, work), last
        return spare, last, first  # in the places where they lie, so that nothing is copied

    q_sizes = (num_tokens, shape.num_heads, shape.cache_head_dim)
    q = jax.ShapeDtypeStruct(q_sizes, shape.dtype)
    cache = jax.ShapeDtypeStruct(cache_shape(requests, shape), shape.kv_dtype)
    work = jax.eval_shape(cut, *specs_of(*rows))
    programs = {
        "chain": Program(chain, (q, q, q, cache, *specs_of(requests.tables), work), donated=(0, 1, 2)),
        "work": Program(cut, specs_of(*rows)),
        "cache": normal_program(cache.shape, shape.kv_dtype),
        "q": normal_program(q_sizes, shape.dtype, seed=1),
        "read": read_program(requests, shape),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        kv_cache, q = compiled["cache"](), np.asarray(compiled["q"]())
        rest = (kv_cache, jnp.asarray(requests.tables), compiled["work"](*rows))
        outs, arrays = [], ()
        for _ in range(2):
            arrays = compiled["chain"](compiled["q"](), compiled["q"](), compiled["q"](), *rest)
            outs.append(np.asarray(arrays[2]))
        checked = check(shape, requests, compiled["read"], kv_cache, q, outs)
        seconds = seconds_a_call(compiled["chain"], (*arrays, *rest), carry=True) / CHAIN
        rate = shape.flops / seconds / 1e12
        return timing_row("prefill", shape.name, seconds, rate=rate, unit="TFLOP/s", ceiling=MATMUL_CEILING) | checked

    return Measurement(shape.name, programs, measure)


def mixed_row(step: MixedStep) -> Measurement:
    """A mixed step's attention, and that of its decodes and of its chunk alone, which are steps as well."""
    shape, config = step.heads, step.heads.config_for(step.num_decodes + 1)
    heads = (shape.num_heads, shape.head_dim)
    one = jax.jit(partial(attend, **shape.options(), config=config))
    programs: dict[str, Program] = {"q": normal_program((step.num_tokens, *heads), jnp.bfloat16, seed=1)}
    requests = {part: Requests(*lens, shape.block_size) for part, lens in step.parts().items()}
    rows = {}

    def chain(q, kv_cache, tables, lens, starts, work):
        first = q = one(q, kv_cache, layer_of(0), tables, lens, starts, work)
        for i in range(1, CHAIN):
            q = one(q, kv_cache, layer_of(i), tables, lens, starts, work)
        return first, q

    for part, mine in requests.items():
        num_decodes = sum(mine.new == 1)
        rows[part] = (mine.lens, mine.starts, np.int32(num_decodes), np.int32(len(mine.lens)))
        kind = "decode" if part == "decodes" else "mixed"
        num_tokens = int(sum(mine.new))
        sizes = {"num_tokens": num_tokens, "num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads}
        cut = partial(cut_attention_work, **sizes, kind=kind, config=config)
        q = jax.ShapeDtypeStruct((num_tokens, *heads), jnp.bfloat16)
        cache = jax.ShapeDtypeStruct(cache_shape(mine, shape), shape.kv_dtype)
        work = jax.eval_shape(cut, *specs_of(*rows[part]))
        args = (q, cache, *specs_of(mine.tables, mine.lens, mine.starts), work)
        programs[part] = Program(chain, args)
        programs[f"{part} work"] = Program(cut, specs_of(*rows[part]))
        programs[f"{part} cache"] = normal_program(cache.shape, shape.kv_dtype)
    programs["read"] = read_program(requests["all"], shape)

    def measure(compiled: dict[str, Any]) -> Row:
        seconds, checked = {}, {}
        for part, mine in requests.items():
            q, kv_cache = compiled["q"]()[: sum(mine.new)], compiled[f"{part} cache"]()
            work = compiled[f"{part} work"](*rows[part])
            rest = tuple(jnp.asarray(x) for x in (mine.tables, mine.lens, mine.starts))
            if part == "all":
                outs = [np.asarray(compiled[part](q, kv_cache, *rest, work)[0]) for _ in range(2)]
                checked = check(shape, mine, compiled["read"], kv_cache, q, outs)
            seconds[part] = seconds_a_call(compiled[part], (q, kv_cache, *rest, work)) / CHAIN
        parts = {f"{part}_us": round(1e6 * seconds[part], 2) for part in ("decodes", "chunk")}
        of_parts = seconds["all"] / (seconds["decodes"] + seconds["chunk"])
        return timing_row("mixed", step.name, seconds["all"], **parts, of_parts=round(of_parts, 3)) | checked

    return Measurement(step.name, programs, measure)


def work_row(num_tokens: int, num_rows: int, kind: str) -> Measurement:
    """The work lists of a step, which come once a step and not once a layer."""
    config = KernelShape("", 32, 8).config_for(num_rows)
    sizes = {"kind": kind, "num_tokens": num_tokens, "num_heads": 32, "num_kv_heads": 8, "config": config}
    lens = np.full(num_rows, max(num_tokens // num_rows, 1), np.int32)
    starts = np.arange(num_rows + 1, dtype=np.int32) * (num_tokens // num_rows)
    args = (lens, starts, np.int32(0), np.int32(num_rows))

    def chain(lens, starts, num_decodes, num_reqs):
        for _ in range(CHAIN):
            work = cut_attention_work(lens, starts, num_decodes, num_reqs, **sizes)
            lens = lens + work.decode[0].starts[0, 0]
            lens = lens if work.prefill is None else lens + jnp.minimum(work.prefill.tiles[1, 0], 0)
        return lens

    def measure(compiled: dict[str, Any]) -> Row:
        arrays = tuple(jnp.asarray(x) for x in args)
        return timing_row("work lists", name, seconds_a_call(compiled["chain"], arrays) / CHAIN)

    name = f"{kind} T={num_tokens} R={num_rows}"
    return Measurement(f"work {name}", {"chain": Program(chain, specs_of(*args))}, measure)


def write_row(num_tokens: int) -> Measurement:
    """Norm, rope and KV write of 16 / 8 heads of 128 by the kernel, and by the XLA operations that it replaces.

    Scattered slots up to 256 tokens, whole blocks above.
    """
    shape = KernelShape("", 16, 8)
    heads, group, head_dim, block_size = 8, 2, shape.head_dim, shape.block_size
    num_blocks = 1088 if shapes.ON_CARD else 9
    num_calls = num_of_calls(num_tokens <= 256)
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks))
    token = np.arange(num_tokens)
    slots = blocks[token] * block_size + 5 if num_tokens <= 256 else blocks[token // 16] * block_size + token % 16
    slots = slots.astype(np.int32)
    queries = [jax.ShapeDtypeStruct((num_tokens, heads * group, head_dim), jnp.bfloat16)] * num_calls
    cache = jax.ShapeDtypeStruct((NUM_LAYERS, num_blocks, 2, heads, block_size, head_dim), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((num_tokens, heads, group + 2, head_dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((num_tokens, head_dim // 2), jnp.float32)
    weight = jax.ShapeDtypeStruct((head_dim,), jnp.bfloat16)

    def chain(backend, kv_cache, queries, qkv, cos, sin, weight, slots):
        one = jax.jit(partial(ops.rope_and_write_kv, backend=backend))
        queries = []  # all are results, and a barrier lies between, so that XLA does each as often as a model would
        for i in range(num_calls):
            norm = HeadNorm(weight, weight, eps=1e-6)
            q, kv_cache = one(qkv, kv_cache, slots, layer_of(i), rope=(cos, sin), norm=norm)
            qkv, kv_cache, q = jax.lax.optimization_barrier((qkv, kv_cache, q))
            queries.append(q)
        return kv_cache, queries

    def differences(caches, queries):
        """Of q the norm relative to XLA's; of the cache the largest, in last places of the head's largest number."""
        got, want = (x.astype(jnp.float32) for x in queries)
        old, new = (x.astype(jnp.float32) for x in caches)
        unit = 2.0**-7 * jnp.maximum(jnp.abs(new).max(axis=-1, keepdims=True) / 2, jnp.abs(new))
        return jnp.linalg.norm(got - want) / jnp.linalg.norm(want), jnp.max(jnp.abs(old - new) / unit)

    specs = (cache, queries, qkv, table, table, weight, jax.ShapeDtypeStruct(slots.shape, jnp.int32))
    programs = {
        "kernel": Program(partial(chain, shapes.BACKEND), specs, donated=(0, 1)),
        "xla": Program(partial(chain, "reference"), specs, donated=(0, 1)),
        "differences": Program(differences, ((cache, cache), (queries[0], queries[0]))),
        "cache": normal_program(cache.shape, jnp.bfloat16),
        "queries": Program(lambda: [jnp.zeros(q.shape, q.dtype) for q in queries]),
        "qkv": normal_program(qkv.shape, jnp.bfloat16, seed=1),
        "weight": normal_program(weight.shape, jnp.bfloat16, seed=2),
    }

    def measure(compiled: dict[str, Any]) -> Row:
        angles = np.random.default_rng(0).uniform(0, 999, table.shape).astype(np.float32)
        tables = (jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)))
        rest = (compiled["qkv"](), *tables, compiled["weight"](), jnp.asarray(slots))
        state = {name: compiled[name](compiled["cache"](), compiled["queries"](), *rest) for name in ("kernel", "xla")}
        caches, queries = zip(*state.values(), strict=True)
        of_q, of_cache = (float(x) for x in compiled["differences"](caches, tuple(q[0] for q in queries)))
        seconds = {}
        for name in state:
            seconds[name] = seconds_a_call(compiled[name], (*state[name], *rest), carry=True) / num_calls
        rate = 2 * math.prod(qkv.shape) * 2 / seconds["kernel"] / 1e12
        row = timing_row(
            "rope and kv write", f"T={num_tokens}", seconds["kernel"], rate=rate, unit="TB/s read + written"
        )
        row |= {"xla_us": round(1e6 * seconds["xla"], 2), "of_xla": round(seconds["kernel"] / seconds["xla"], 3)}
        if shapes.ON_CARD:
            # The host takes longer for a short call than the device, so that the clock says nothing of the kernels.
            args = {name: (compiled["cache"](), compiled["queries"](), *rest) for name in seconds}
            traced = {name: device_seconds(compiled[name], args[name]) / num_calls for name in seconds}
            row |= {"device_us": round(1e6 * traced["kernel"], 2), "xla_device_us": round(1e6 * traced["xla"], 2)}
        is_right = of_q < shapes.MAX_RELATIVE_ERROR["bfloat16"] and of_cache < 4
        return row | {"relative_error": round(of_q, 6), "cache_last_places": of_cache, "is_right": is_right}

    return Measurement(f"write T={num_tokens}", programs, measure)
