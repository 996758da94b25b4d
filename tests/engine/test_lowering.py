"""Steps lowered in another process are the steps of this one."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxvllm import executor_start
from jaxvllm.config import CompileConfig, EngineConfig, lowering_environment
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.parameter import bind, param_shapes, param_specs
from jaxvllm.lowering import LoweringTask, export_step, import_step
from jaxvllm.lowering_processes import LoweringProcesses
from jaxvllm.model_runner import ModelRunner, RunnerConfig
from jaxvllm.models.registry import get_model_class
from jaxvllm.parallel import make_mesh
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, explicit
from tests.engine.tiny_llama import CONFIG, make_runner
from tests.engine.toy import Loop

LIMITS = BatchLimits(max_num_seqs=3, max_model_len=64, block_size=16)
POLICY = explicit(3, 32, [], [32])
KEY = BucketKey("mixed", 32, 3)


@pytest.fixture
def processes():
    config = replace(make_runner(LIMITS, POLICY, 9).config, mesh=None)
    processes = LoweringProcesses(lowering_environment(next(p for p in sys.path if p)), limit=2)
    processes.lower_for(LoweringTask(CONFIG, config, platform="cpu", unroll_layers=False))
    yield processes
    processes.close()


def greedy(runner: ModelRunner) -> dict[str, list[int]]:
    loop = Loop(LIMITS, POLICY, runner, chunk=1000)
    for i, prompt in enumerate(([5, 6, 7], [40, 3, 9, 9, 120, 31, 2], [17])):
        loop.add(f"r{i}", prompt, 6)
    return loop.run(1)


def test_steps_from_another_process_give_the_same_tokens_and_need_no_lowering_here(processes, monkeypatch):
    expected = greedy(make_runner(LIMITS, POLICY, 9))
    asked = []
    export = processes.export
    monkeypatch.setattr(processes, "export", lambda *question: asked.append(question) or export(*question))
    runner = make_runner(LIMITS, POLICY, 9)
    keys = list(runner.warm_up(processes))
    assert set(keys) == set(runner.program_keys())
    assert greedy(runner) == expected
    assert runner.programs.num_late_compiles == 0
    assert len(asked) >= 2 and all(num_blocks == 9 for _, num_blocks in asked)


def test_what_fails_in_a_process_is_raised_here_by_name_and_its_death_is_heard_of(processes):
    for _ in range(3):  # in both processes
        with pytest.raises(RuntimeError, match=r"mixed\(T=-1, R=-1\) could not be lowered: \w+Error"):
            processes.export(replace(KEY, T=-1, R=-1), 9)
    assert processes.export(KEY, 9).exported  # the error cost them nothing
    forks = children(processes.pid)
    assert len(forks) == 2
    assert len(os.listdir(f"/proc/{processes.pid}/task")) == 1  # threads would not have survived the fork
    os.kill(forks[0], signal.SIGKILL)
    failures = 0
    for _ in range(4):
        try:
            assert processes.export(KEY, 9).exported
        except RuntimeError as error:
            assert "a lowering process ended" in str(error)
            failures += 1
    assert failures == 2  # the other one works on
    processes.close()
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in forks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="a lowering process ended"):
        processes.export(KEY, 9)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_start_on_a_gpu_has_the_imports_of_lowering_begin_before_its_own_and_ends_them_if_it_fails(monkeypatch):
    script = """
import sys
from jaxvllm import executor_start
executor_start.LoweringProcesses = lambda environment, limit: print("jax" in sys.modules, limit >= 1)
executor_start.start_lowering(executor_start.EngineConfig(device="gpu"))
import jaxvllm.executor, jaxvllm.models.qwen3
print("jax.experimental.pallas.mosaic_gpu" in sys.modules, "jax.experimental.pallas.triton" in sys.modules)
"""
    environment = lowering_environment(next(p for p in sys.path if p))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    # Nor does what a start with stored programs imports hold the kernels' languages.
    assert done.stdout.split() == ["False", "True", "False", "False"]
    closed = []
    processes = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(executor_start, "LoweringProcesses", lambda environment, limit: processes)
    executor = executor_start.make_executor(EngineConfig(device="gpu", compile=CompileConfig(ahead=True)))
    assert not closed
    with pytest.raises(ValueError, match="device='gpu' was asked for"):
        executor.initialize()
    assert closed == [True]


def test_an_exported_step_keeps_kernels_and_donation():
    config = replace(CONFIG, head_dim=64, dtype="bfloat16")
    model = get_model_class(config.architecture)(config, unroll_layers=True)
    spec = KVCacheSpec(2, 2, 64, 16, jnp.dtype(jnp.bfloat16))
    limits = BatchLimits(max_num_seqs=8, max_model_len=64, block_size=16)
    runner = ModelRunner(
        lambda traced: bind(model, traced),
        param_shapes(param_specs(model), make_mesh(jax.devices())),
        RunnerConfig(limits, explicit(8, 256, [8], [256]), spec, 4, CONFIG.vocab_size, "mosaic_gpu"),
    )
    runner.set_num_blocks(9)
    step, args = runner.step_and_args(BucketKey("decode", 8, 8))
    # Where shapes have shardings, JAX lowers the first layer, whose inputs have them, apart from the others.
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)

    def kernels_and_donations(function) -> tuple[int, int]:
        traced = jax.jit(function, donate_argnums=(1, 2)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        main = re.search(r"func.func public @main\((.*?)\) ->", text, re.S)
        assert main is not None
        donated = len(re.findall("tf.aliasing_output|jax.buffer_donor", main[1]))
        return text.count("@mosaic_gpu"), donated

    direct = kernels_and_donations(step)
    assert kernels_and_donations(import_step(export_step(step, args, "cuda"))) == direct
    assert direct[0] >= 2 and direct[1] == 1 + len(jax.tree.leaves(args[2]))


MOSAIC_RUNTIME = """
import os, sys, types

plugin, extension = types.ModuleType("jax_cuda12_plugin"), types.ModuleType("_mosaic_gpu_ext")
extension.__file__ = sys.argv[1] + "/_mosaic_gpu_ext.so"
plugin._mosaic_gpu_ext = extension
sys.modules["jax_cuda12_plugin"] = plugin
from pallas_kernels.lazy import find_mosaic_runtime

def found():
    return {name: os.environ.pop(name) for name in ("MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH")}

find_mosaic_runtime()
assert "jax.experimental.mosaic.gpu" not in sys.modules
ours = found()
import jax.experimental.mosaic.gpu.core
assert ours == found(), ours
print(ours["MOSAIC_GPU_RUNTIME_LIB_PATH"])
"""


def test_a_process_that_lowers_nothing_finds_the_library_that_mosaic_kernels_call(tmp_path):
    library = tmp_path / "libmosaic_gpu_runtime.so"
    library.touch()
    environment = lowering_environment(next(p for p in sys.path if p))
    command = [sys.executable, "-c", MOSAIC_RUNTIME, str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.stdout.strip() == str(library), process.stderr
