"""On a GPU: programs from start to start, no compile while serving, and no memory that outlives a core.

JAX_PLATFORMS=cuda pytest -m gpu tests/engine/test_gpu_start.py
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxvllm import Engine, EngineDeadError, SamplingParams
from jaxvllm.device_memory import small_places
from tests.engine.played_allocator import addresses_of_steps

pytestmark = pytest.mark.gpu

# Small, and of sizes that the kernels take.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16", "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 1024, "gpu_memory_utilization": 0.3}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 4000 for j in range(1 + 13 * i)] for i in range(32)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("programs"))


def start(model: Path, programs: str, **kwargs) -> Engine:
    kwargs = {"device": "gpu", "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0} | LIMITS | kwargs
    return Engine(model, program_cache_dir=programs, **kwargs)


def metrics(engine: Engine) -> dict[str, float]:
    return {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}


def used_megabytes() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def wait_for_memory(limit_mb: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while used_megabytes() > limit_mb and time.monotonic() < deadline:
        time.sleep(0.1)
    return used_megabytes() <= limit_mb


@pytest.fixture
def memory_before() -> int:
    return used_megabytes() + 200


def test_f01_a_second_start_compiles_nothing_is_faster_and_gives_the_same_ids(model, programs, memory_before):
    seconds, ids, counts = [], [], []
    for _ in range(2):
        begin = time.monotonic()
        with start(model, programs, strict_compile=True) as engine:
            seconds.append(time.monotonic() - begin)
            ids.append([output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)])
            counts.append(metrics(engine))
        assert wait_for_memory(memory_before)
    assert ids[0] == ids[1]
    assert counts[0]["jaxvllm:num_loaded_programs"] < counts[1]["jaxvllm:num_loaded_programs"]
    assert counts[1]["jaxvllm:num_loaded_programs"] == counts[1]["jaxvllm:num_programs"]
    assert seconds[1] < 0.7 * seconds[0], seconds


def test_f01_nothing_compiles_while_serving(model, programs):
    samplings = [
        {}, {"logprobs": 5}, {"prompt_logprobs": 2}, {"top_k": 5, "temperature": 1.0},
        {"top_p": 0.5, "temperature": 1.0},
        {"min_p": 0.1, "temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 2.0}},
        {"min_tokens": 3}, {"n": 3, "temperature": 1.0},
    ]  # fmt: skip
    with start(model, programs, strict_compile=True) as engine:
        for count in (1, 2, 7, 8, 9, 31, 32):
            engine.generate(PROMPTS[:count], GREEDY, use_tqdm=False)
        params = [SamplingParams(**{"max_tokens": 9, "ignore_eos": True} | given) for given in samplings]
        engine.generate(PROMPTS[: len(params)], params, use_tqdm=False)
        assert metrics(engine)["jaxvllm:late_compiles"] == 0


def test_a_core_that_is_killed_is_heard_of_within_a_second_and_frees_the_gpu(model, programs, memory_before):
    engine = start(model, programs)
    pid = engine.llm_engine._client.pid  # type: ignore[attr-defined]
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.5, kill).start()
    params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        while True:
            engine.generate([[1, 2, 3]] * 8, params, use_tqdm=False)
    assert time.monotonic() - killed_at[0] < 1.0
    assert wait_for_memory(memory_before)


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxvllm import Engine, SamplingParams
options = {options!r}
engine = Engine({model!r}, program_cache_dir={programs!r}, device="gpu", load_format="dummy",
                skip_tokenizer_init=True, **options)
print("ready", flush=True)
engine.generate([[1]] * 8, SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_the_end_of_the_front_end_frees_the_gpu(model, programs, memory_before, how):
    script = SCRIPT.format(options=LIMITS, model=str(model), programs=programs)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert used_megabytes() > memory_before
    time.sleep(0.2)
    process.send_signal(how)
    process.wait(10)
    process.stdout.close()
    assert wait_for_memory(memory_before)


def test_f05_engines_one_after_the_other_in_one_process_each_find_the_gpu_free(model, programs):
    ids = []
    for _ in range(3):
        with start(model, programs, multiprocess=False) as engine:
            ids.append(engine.generate(PROMPTS[:3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert ids[0] == ids[1] == ids[2]


def test_a_pool_that_does_not_fit_says_how_many_tokens_do(model, programs):
    with pytest.raises(ValueError, match=r"KV cache has room for \d+ tokens.*lower max_model_len to at most"):
        start(model, programs, kv_cache_memory_bytes=1 << 20, max_model_len=4096)


HOLDER = """
import os, sys
os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.6"
import jax.numpy
jax.numpy.zeros(1).block_until_ready()  # JAX takes its share with the first array
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_share_of_the_gpu_that_another_process_holds_is_refused(model, programs):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        with pytest.raises(ValueError, match=r"only \d+\.\d\d GiB of the GPU's memory are free"):
            start(model, programs, gpu_memory_utilization=0.5)


def test_the_most_expensive_requests_at_once_do_not_run_out_of_memory(model, programs):
    params = [SamplingParams(max_tokens=3, prompt_logprobs=20, ignore_eos=True) for _ in range(8)]
    params += [
        SamplingParams(
            max_tokens=30, temperature=1.0, top_p=0.9, repetition_penalty=1.2, logprobs=20, ignore_eos=True, seed=i
        )
        for i in range(24)
    ]
    prompts = [[(i + j) % 4000 for j in range(1000)] for i in range(8)] + PROMPTS[:24]
    with start(model, programs, strict_compile=True) as engine:
        outputs = engine.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == p.max_tokens for output, p in zip(outputs, params, strict=True))


class CardAllocator:
    """The allocator of a GPU, by the addresses that arrays get."""

    def __init__(self) -> None:
        self._arrays: dict[int, jax.Array] = {}

    def allocate(self, num_bytes: int) -> int:
        array = jax.block_until_ready(jax.device_put(np.zeros(num_bytes, np.uint8)))
        address = array.unsafe_buffer_pointer()
        self._arrays[address] = array
        return address

    def free(self, address: int) -> None:
        self._arrays.pop(address).delete()


def test_a_steps_workspace_keeps_its_address_on_the_card():
    """Last here: this process takes most of the card's memory from now on."""
    kept = small_places(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert list(map(len, addresses_of_steps(CardAllocator(), seed=0))) == [1, 1]
    assert kept
