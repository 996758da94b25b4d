"""The core in a process of its own: it works from any kind of script, its death is heard, and it never outlives us."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from jaxvllm import Engine, EngineDeadError, SamplingParams, mp_client

EXECUTORS = "tests.engine.fake_executor"
ROOT = Path(__file__).resolve().parents[2]
DEATH_S = 1.0


def make_engine(folder: Path, executor: str, **kwargs) -> Engine:
    return Engine(folder, executor=f"{EXECUTORS}:{executor}", skip_tokenizer_init=True, device="cpu", **kwargs)


def core_pid(engine: Engine) -> int:
    return engine.llm_engine._client.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, limit_s: float = 3.0) -> bool:
    deadline = time.monotonic() + limit_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_core_process_gives_what_the_core_in_process_gives(model_folder):
    prompts = [[i] * (1 + 7 * i) for i in range(1, 20)]
    params = [SamplingParams(max_tokens=3 * i) for i in range(1, 20)]
    results = []
    for multiprocess in (True, False):
        with make_engine(model_folder, "successor", multiprocess=multiprocess) as engine:
            results.append([o.outputs for o in engine.generate(prompts, params, use_tqdm=False)])
            assert engine.reset_prefix_cache()
            assert {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}["jaxvllm:num_steps"] > 50
    assert results[0] == results[1]


def test_front_end_with_a_core_process_never_imports_jax_nor_what_else_is_slow(model_folder):
    script = f"""
import sys
from jaxvllm import Engine, SamplingParams
engine = Engine({str(model_folder)!r}, executor="{EXECUTORS}:successor", device="cpu")
messages = [{{"role": "user", "content": "hi"}}]
print(engine.chat(messages, SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids)
slow = ("jax", "flax", "transformers", "torch", "huggingface_hub", "gguf", "numpy")
print(*[name for name in slow if name in sys.modules], engine.llm_engine._client.pid)
"""
    # From standard input and without a __main__ guard: what multiprocessing's spawn cannot do.
    result = subprocess.run([sys.executable, "-"], input=script, text=True, capture_output=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stderr
    ids, line = result.stdout.splitlines()
    assert ids == "[59, 60, 61]"
    assert line.isdecimal(), line
    assert wait_until_gone(int(line)), "the core outlived an ordinary exit"


def test_killed_core_is_heard_of_within_a_second(model_folder):
    with make_engine(model_folder, "slow") as engine:
        killed_at = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            os.kill(core_pid(engine), signal.SIGKILL)

        threading.Timer(0.2, kill).start()
        with pytest.raises(EngineDeadError, match=r"killed by SIGKILL"):
            engine.generate([[1]] * 5, SamplingParams(max_tokens=900), use_tqdm=False)
        assert time.monotonic() - killed_at[0] < DEATH_S
        for call in (lambda: engine.generate([[1]], use_tqdm=False), engine.reset_prefix_cache, engine.get_metrics):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                call()


def test_the_core_does_not_wait_for_a_front_end_that_reads_nothing(model_folder):
    with make_engine(model_folder, "slow_5ms") as engine:
        engine.llm_engine.add_request("a", [1], SamplingParams(max_tokens=20))
        time.sleep(1.0)
        woke_at = time.monotonic()
        times = [engine.llm_engine._client.get_outputs().timestamp for _ in range(20)]
        assert times == sorted(times) and times[-1] < woke_at


@pytest.mark.parametrize("multiprocess", [True, False])
def test_exception_in_the_core_reaches_the_caller_with_its_cause(model_folder, multiprocess):
    with make_engine(model_folder, "fails_at_step_3", multiprocess=multiprocess) as engine:
        with pytest.raises(EngineDeadError, match="RuntimeError: the device is on fire") as caught:
            engine.generate([[1]], SamplingParams(max_tokens=9), use_tqdm=False)
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            engine.generate([[1]], use_tqdm=False)
        if multiprocess:
            assert "fake_executor.py" in str(caught.value)
            assert wait_until_gone(core_pid(engine))


def test_core_that_has_hung_up_but_not_ended_yet_holds_up_neither_a_request_nor_the_shutdown(model_folder):
    params = SamplingParams(max_tokens=9)
    engine = make_engine(model_folder, "fails_at_step_3_and_ends_slowly")
    engine.llm_engine.add_request("a", [1], params)
    time.sleep(0.3)
    assert is_running(core_pid(engine))
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        engine.llm_engine.add_request("b", [1], params)
    assert time.monotonic() - start < DEATH_S
    engine.shutdown()

    with make_engine(model_folder, "fails_at_step_3_and_ends_slowly") as engine:
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            engine.generate([[1]], params, use_tqdm=False)
        assert is_running(core_pid(engine))
        start = time.monotonic()
    assert time.monotonic() - start < DEATH_S


@pytest.mark.parametrize("multiprocess", [True, False])
def test_error_at_the_start_is_raised_as_the_same_kind(model_folder, multiprocess):
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' is missing"):
        make_engine(model_folder, "bad_model", multiprocess=multiprocess)


def test_core_that_is_killed_at_the_start_is_heard_of(model_folder):
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        make_engine(model_folder, "kills_itself_at_start")


@pytest.mark.parametrize(
    ("executor", "kind", "message"),
    [
        ("fails_with_a_group", RuntimeError, "ExceptionGroup: many things at once"),
        ("fails_with_a_name_that_is_no_text", ValueError, r"cannot read /models/\\udcff"),
    ],
)
def test_error_at_the_start_that_cannot_be_made_again_keeps_its_words(model_folder, executor, kind, message):
    with pytest.raises(kind, match=message):
        make_engine(model_folder, executor)


def test_core_that_ends_before_it_was_told_what_to_do_is_heard_of_and_leaves_nothing(
    model_folder, tmp_path, monkeypatch
):
    def start(config: object) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"], stdin=subprocess.PIPE)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process

    monkeypatch.setattr(mp_client, "_start_process", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineDeadError, match="ended with exit code 3"):
        make_engine(model_folder, "successor")
    assert not list(tmp_path.iterdir())


UNREADABLE = [b"", b"Z", b"A", b"A\xc1", b"X\x01", b"U\x82\xa7call_id\x01\xa6method\xa3die"]


def test_a_message_that_the_core_cannot_read_is_its_death_and_named(model_folder):
    for message in UNREADABLE:
        with make_engine(model_folder, "slow") as engine:
            engine.llm_engine._client._requests.send(message)
            with pytest.raises(EngineDeadError, match=r"a message of the front end, of kind .* cannot be read"):
                engine.generate([[1]], SamplingParams(max_tokens=900), use_tqdm=False)


def test_a_message_of_the_core_that_cannot_be_read_is_its_death(model_folder):
    with make_engine(model_folder, "speaks_nonsense_from_step_9") as engine:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="the engine core sent a message that cannot be read"):
                engine.generate([[1]], SamplingParams(max_tokens=900), use_tqdm=False)
        pid = core_pid(engine)
    assert not is_running(pid)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("multiprocess", [True, False])
def test_a_fork_may_not_use_an_llm_engine_and_its_end_costs_the_owner_nothing(model_folder, multiprocess):
    with make_engine(model_folder, "slow", multiprocess=multiprocess) as engine:
        engine.llm_engine.add_request("a", [5], SamplingParams(max_tokens=3))
        pid = os.fork()
        if not pid:
            signal.alarm(60)  # a fork that waits for the core waits for ever
            num_refused = 0
            for use in (engine.llm_engine.step, lambda: engine.llm_engine.abort_request("a")):
                try:
                    use()
                except RuntimeError as error:
                    num_refused += "fork" in str(error)
            engine.llm_engine.shutdown()
            os._exit(num_refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
        outputs = [output for _ in range(9) for output in engine.llm_engine.step()]
        assert outputs[-1].outputs[0].token_ids == [6, 7, 8]


def test_error_in_the_front_end_while_the_core_starts_does_not_wait_for_it(model_folder):
    start = time.monotonic()
    with pytest.raises(ValueError, match="/no/such/folder"):
        make_engine(model_folder, "sleeps_at_start", generation_config="/no/such/folder")
    assert time.monotonic() - start < 5.0


def test_shutdown_ends_the_process_and_leaves_no_socket(model_folder):
    engine = make_engine(model_folder, "successor")
    pid = core_pid(engine)
    assert not Path(engine.llm_engine._client._folder).exists()
    engine.shutdown()
    engine.shutdown()
    assert not is_running(pid)
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.generate([[1]], use_tqdm=False)


def test_engine_that_is_dropped_takes_its_core_with_it(model_folder):
    engine = make_engine(model_folder, "successor")
    pid = core_pid(engine)
    del engine
    assert wait_until_gone(pid)


INTERRUPTED = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
from jaxvllm import Engine, SamplingParams
engine = Engine(sys.argv[1], executor="{EXECUTORS}:slow", skip_tokenizer_init=True, device="cpu")
print(engine.llm_engine._client.pid, flush=True)
try:
    engine.generate([[1]] * 3, SamplingParams(max_tokens=900), use_tqdm=False)
except KeyboardInterrupt:
    print(engine.generate([[65]], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids, flush=True)
    print(engine.llm_engine.has_unfinished_requests(), flush=True)
"""


@pytest.fixture
def running_script(model_folder):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(model_folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.2)
    yield process, pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_ctrl_c_stops_the_batch_but_not_the_engine_and_exit_leaves_no_orphan(running_script):
    process, pid = running_script
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group gets it
    out, _ = process.communicate(timeout=10)
    assert out.splitlines() == ["[66, 67, 68]", "False"]
    assert wait_until_gone(pid)


def test_killed_front_end_leaves_no_orphan(running_script):
    process, pid = running_script
    process.kill()
    assert wait_until_gone(pid, limit_s=2.0)


STARTING = f"""
import sys
from jaxvllm import Engine
Engine(sys.argv[1], executor="{EXECUTORS}:sleeps_at_start", skip_tokenizer_init=True, device="cpu")
"""


def ignores_sigterm(pid: int) -> bool:
    [mask] = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_core_leaves_sigterm_to_the_front_end(model_folder):
    with make_engine(model_folder, "successor") as engine:
        os.kill(core_pid(engine), signal.SIGTERM)
        time.sleep(0.1)
        assert engine.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids == [6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_core_that_ignores_sigterm_while_it_starts_ends_with_the_front_end_and_leaves_no_socket(model_folder, number):
    folder = tempfile.mkdtemp(prefix="front-")  # not tmp_path: a socket's path is short
    command = [sys.executable, "-c", STARTING, str(model_folder)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": folder})
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 20
        while not (pids := children.read_text().split()) or not ignores_sigterm(int(pids[0])):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        pid = int(pids[0])
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        assert is_running(pid) and list(Path(folder).glob("jaxvllm-*"))
        process.send_signal(number)
        process.wait()
        assert wait_until_gone(pid)
        assert not list(Path(folder).glob("jaxvllm-*"))
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def test_without_pyzmq_an_engine_in_process_works_and_a_core_process_says_what_to_do(model_folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "jaxvllm.mp_client", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with make_engine(model_folder, "successor", multiprocess=False) as engine:
        assert engine.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids == [6]
    with pytest.raises(ImportError, match="multiprocess=False"):
        make_engine(model_folder, "successor")
