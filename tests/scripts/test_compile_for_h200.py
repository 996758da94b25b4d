"""The check of what the compiler makes of the kernels for an H200."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.load import SCRIPTS, load


def test_spills_are_found_and_named():
    output = """== llama mixed
ptxas info    : Function properties for paged_decode_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for paged_prefill_mosaic_gpu_kernel
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
== done in 2.0 s"""
    assert load("compile_for_h200").find_spills(output) == [
        "llama mixed: paged_prefill_mosaic_gpu_kernel spills 12 bytes"
    ]


def test_kernels_of_which_the_compiler_says_nothing_are_not_taken_for_good():
    output = """== qwen3-0.6b sampling, process
ptxas info    : Function properties for process
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
== qwen3-0.6b sampling, sample
== done"""
    assert load("compile_for_h200").find_spills(output) == [
        "qwen3-0.6b sampling, sample: nothing is known of its kernels"
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax-cuda13-plugin and ptxas")
def test_nothing_spills_caches_stay_in_place_and_a_step_is_one_graph():
    environment = {"PYTHONPATH": str(SCRIPTS.parent), "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "compile_for_h200.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
