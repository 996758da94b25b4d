"""Compile the kernels and a decode step for an H200, on a machine that has none, and check what the compiler says.

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
    PYTHONPATH=. python scripts/compile_for_h200.py [--only NAME]

For every model of pallas_kernels.arg_specs, the products of its layers up to 256 rows, and their norms and gates of
many rows, and the sampler at three vocabularies: no kernel spills registers, the compiler does not make products wait
for each other, and the donated KV cache is the one that comes back.
For whole steps, decode of few rows and of many, and mixed: all of it is one command buffer (a CUDA graph), and a mixed
one computes no product twice. Exits with 1 otherwise.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

# What the compiler has to know of the card.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  name: "NVIDIA H200"
  model_str: "sm_9.0 with 150754820096B RAM, 132 cores"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
KERNEL = re.compile(r"Function properties for (\S+)")
# What ptxas says when it makes each product of the tensor cores wait for the one before.
SERIAL = re.compile(r"C7510|C7513")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
VOCAB_SIZES = {"llama-3.1-8b": 128256, "qwen3-0.6b": 151936, "gemma-3-1b": 262144}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def compile_kernels(only: str) -> list[str]:
    """Compile each model's decode and mixed layer; what is wrong, in words."""
    import jax

    from pallas_kernels.arg_specs import HEAD_SHAPES, Bucket, layer_function, layer_specs

    device = _device()
    wrong = []
    for heads in HEAD_SHAPES:
        for bucket in (*(Bucket("decode", rows, rows) for rows in (8, 16, 256)), Bucket("mixed", 2048, 256)):
            name = f"{heads.name} {bucket.kind}" + ({8: " of few rows", 16: " of 16 rows"}.get(bucket.num_rows, ""))
            if only not in name:
                continue
            print(f"== {name}", flush=True)
            start = time.monotonic()
            specs = jax.tree.map(lambda x: _on(device, x), layer_specs(heads, bucket))
            jitted = jax.jit(layer_function(heads, bucket), donate_argnums=0)
            memory = jitted.trace(*specs).lower(lowering_platforms=("cuda",)).compile().memory_analysis()
            cache = specs[0]
            if memory is None or memory.alias_size_in_bytes < cache.size * cache.dtype.itemsize:
                wrong.append(f"{name}: the cache is not updated in place")
            print(f"== done in {time.monotonic() - start:.1f} s", flush=True)
    return wrong


def compile_products(only: str) -> None:
    """Compile the few-row products of each layer, alone and, where one kernel takes them, after each other.

    And those of 16 to 256 rows after each other.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels import FEW_ROWS, LayerSlice, make_arrivals, matmul_stages, prefers_matmul_kernel
    from pallas_kernels.arg_specs import LAYER_SHAPES, ROW_PRODUCTS, layer_stages

    device = _device()

    def call(x, stages, residual, layer):
        stages = jax.tree.map(lambda stack: LayerSlice(stack, layer), stages)
        return matmul_stages(x, stages, residual, make_arrivals("mosaic_gpu"), backend="mosaic_gpu")

    def stacked(x):
        return jax.ShapeDtypeStruct((4, *x.shape), x.dtype)

    for shape in LAYER_SHAPES:
        stages = layer_stages(shape, has_bias=True)
        whole = ("o", "gate_up", "down", "qkv")
        chains = [(FEW_ROWS, (name,)) for name in stages] + [(FEW_ROWS, whole[:-1]), (FEW_ROWS, whole)]
        chains += [(rows, whole) for rows in ROW_PRODUCTS]
        for rows, chain in chains:
            name = f"{shape.name} products of {rows} rows {'+'.join(chain)}"
            of_chain = tuple(stages[part] for part in chain)
            x: Any = jax.ShapeDtypeStruct((rows, of_chain[0].weight.shape[-1]), jnp.bfloat16)
            is_wanted = rows != FEW_ROWS or prefers_matmul_kernel(x, of_chain, "mosaic_gpu")
            if not is_wanted:
                continue
            residual = jax.ShapeDtypeStruct((rows, shape.hidden), jnp.bfloat16)
            specs = (x, jax.tree.map(stacked, of_chain), residual if chain != ("qkv",) else None)
            specs = jax.tree.map(lambda x: _on(device, x), (*specs, jax.ShapeDtypeStruct((), jnp.int32)))
            _compile_one(only, name, call, *specs)


def compile_rows(only: str) -> None:
    """Compile the norms and gates of each layer for many rows."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import LayerSlice, act_and_mul, rms_norm
    from pallas_kernels.arg_specs import LAYER_SHAPES

    device = _device()
    compile_one = partial(_compile_one, only)

    def norm(x, stack, layer):
        return rms_norm(x, LayerSlice(stack, layer), eps=1e-6, backend="mosaic_gpu")

    def spec(*shape: int, dtype: Any = jnp.bfloat16):
        return _on(device, jax.ShapeDtypeStruct(shape, dtype))

    for shape in LAYER_SHAPES:
        if shape.hidden % 128 == 0:
            specs = (spec(2045, shape.hidden), spec(4, shape.hidden), spec(dtype=jnp.int32))
            compile_one(f"{shape.name} rows norm", norm, *specs)
        for activation in ("silu", "gelu_pytorch_tanh"):
            gate = partial(act_and_mul, activation=activation, backend="mosaic_gpu")
            compile_one(f"{shape.name} rows {activation}", gate, spec(2045, 2, shape.ffn))
    compile_one("widest rows norm", norm, spec(2045, 8192), spec(4, 8192), spec(dtype=jnp.int32))


def compile_sampling(only: str) -> None:
    """Compile the programs that follow a step, `process` and `sample`, at the vocabularies of some models."""
    import jax
    import jax.numpy as jnp

    from jaxvllm.sampling import SamplingRows, process_logits, sample
    from scheduler.records import RECORD_WIDTH
    from scheduler.token_lists import list_width

    device, num_rows, num_persistent, max_model_len = _device(), 64, 256, 4096

    def spec(*shape: int, dtype: Any = jnp.int32) -> Any:
        return _on(device, jax.ShapeDtypeStruct(shape, dtype))

    rows = SamplingRows(
        records=spec(num_rows, RECORD_WIDTH),
        seq_lens=spec(num_rows),
        needs_sample=spec(num_rows, dtype=jnp.bool_),
        rows=spec(num_rows),
        token_ids=spec(num_persistent, max_model_len),
        token_lists=spec(num_persistent, list_width(0)),
    )
    for model, vocab_size in VOCAB_SIZES.items():
        logits = spec(num_rows, vocab_size, dtype=jnp.float32)
        process, choose = (partial(function, backend="mosaic_gpu") for function in (process_logits, sample))
        _compile_one(only, f"{model} sampling, process", process, logits, rows)
        _compile_one(only, f"{model} sampling, sample", choose, logits, logits, rows)


def compile_step(folder: Path) -> list[str]:
    """Compile whole steps of a model, decode of few rows and of many, and mixed; what is wrong, in words."""
    from jaxvllm.compile_cache import compiler_options
    from jaxvllm.kv_cache import KVCacheSpec
    from jaxvllm.layers.layer_context import Attended
    from jaxvllm.layers.parameter import bind, param_shapes, param_specs
    from jaxvllm.model_config import ModelConfig
    from jaxvllm.model_runner import ModelRunner, RunnerConfig
    from jaxvllm.models.registry import get_model_class
    from jaxvllm.parallel import make_mesh
    from scheduler.batch import BatchLimits
    from scheduler.buckets import BucketKey, powers_of_two

    mesh = make_mesh([_device()], 1)
    config = ModelConfig.from_hf(QWEN3)
    limits = BatchLimits(64, 4096, 16, config.vocab_size)
    model = get_model_class(config.architecture)(config)
    model.unroll_layers = True  # as on a GPU
    runner = ModelRunner(
        lambda traced: bind(model, traced),
        param_shapes(param_specs(model), mesh),
        RunnerConfig(
            limits,
            powers_of_two(64, 2048),
            KVCacheSpec.of_model(config, 16, backend="mosaic_gpu"),
            config.num_heads,
            config.vocab_size,
            "mosaic_gpu",
            mesh,
            attended=Attended.of_one_token(config, is_finished=False),
        ),
    )
    runner.set_num_blocks(4096)
    wrong = []
    for key in (BucketKey("decode", 8, 8), BucketKey("decode", 64, 64), BucketKey("mixed", 1024, 64)):
        print(f"== {key}", flush=True)
        compiled = runner._lower_step(key).compile(compiler_options("gpu"))
        sequences = list(folder.glob(f"*step_{key.kind}*thunk_sequence_after_thunk_passes*"))
        if not sequences:
            return [*wrong, f"{key}: the compiler wrote no thunk sequence"]
        newest = max(sequences, key=lambda path: path.stat().st_mtime_ns)
        kinds = re.findall(r"^\d+: (\w+)", newest.read_text(), re.MULTILINE)
        print(f"== thunks of {key}: {kinds}", flush=True)
        if kinds != ["kCommandBuffer"]:
            outside = [kind for kind in kinds if kind != "kCommandBuffer"]
            wrong.append(f"{key}: {len(outside)} thunks outside its graph: {outside}")
        if key.kind == "mixed":
            # Four products a layer and the logits. XLA may run one whose result is kept for prompt logprobs once more.
            num_products = (compiled.as_text() or "").count('custom_call_target="__cublas')
            print(f"== products of {key}: {num_products}", flush=True)
            if num_products != 4 * config.num_layers + 1:
                wrong.append(f"{key}: {num_products} products instead of {4 * config.num_layers + 1}")
    return wrong


def _compile_one(only: str, name: str, function: Any, *specs: Any) -> None:
    """Compile a function if its name is wanted, behind its marker in the output."""
    import jax

    if only in name:
        print(f"== {name}", flush=True)
        jax.jit(function).trace(*specs).lower(lowering_platforms=("cuda",)).compile()


def _device():
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1").devices[0]


def _on(device, x):
    import jax

    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def find_spills(output: str) -> list[str]:
    """Kernels that spill or wait after each product, from what ptxas printed between the markers of the models.

    And where nothing was printed: XLA, which compiles the sampler's kernels, says nothing if it finds no ptxas.
    """
    wrong, model, kernel = [], "", ""
    silent = re.findall(r"^== (.* sampling, .*)", output, re.MULTILINE)
    for line in output.splitlines():
        if line.startswith("== "):
            model = line[3:]
        elif SERIAL.search(line):
            wrong.append(f"{model}: {line}")
        elif match := KERNEL.search(line):
            kernel = match[1]
            silent = [name for name in silent if name != model]
        elif (match := SPILLS.search(line)) and kernel:
            if int(match[1]):
                wrong.append(f"{model}: {kernel} spills {match[1]} bytes")
            kernel = ""
    return wrong + [f"{name}: nothing is known of its kernels" for name in silent]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose name contains this; 'step' for the whole steps")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        wrong = []
        if args.only != "step":
            compile_products(args.only)
            compile_rows(args.only)
            compile_sampling(args.only)
            wrong = compile_kernels(args.only)
        wrong += compile_step(args.child) if args.only in ("", "step") else []
        print("".join(f"wrong: {line}\n" for line in wrong), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        # ptxas reports to the standard error of the process that compiles.
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            # Of kernels that come by way of Triton, and of XLA's own.
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "subprocess_compilation=3",
            "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_module_re=.*step_(decode|mixed).*",
        }
        command = [sys.executable, __file__, "--child", folder, "--only", args.only]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    wrong = find_spills(done.stdout) + re.findall(r"^wrong: (.*)", done.stdout, re.MULTILINE)
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith("== ")))
    if done.returncode:
        print(done.stdout[-3000:])
        wrong.append(f"the compiling process ended with {done.returncode}")
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
