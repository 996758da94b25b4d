"""The built wheel, in an environment of its own and outside the checkout, serves a model from a local folder."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from tests.engine.conftest import write_model

REPO = Path(__file__).parent.parent
UV = shutil.which("uv")


def run(*command: str | Path, cwd: Path) -> str:
    # Only what a user's shell has: the variables that the test session set must not help.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "PYTHON", "VIRTUAL_ENV", "UV_"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_weights(folder: Path) -> None:
    """Random weights under the checkpoint's names, as the model declares them."""
    config = resolve(folder).config
    rng = np.random.default_rng(7)
    tensors = {}
    for spec in param_specs(get_model_class(config.architecture)(config)).values():
        for source in spec.sources:
            for layer in range(spec.num_layers or 1):
                tensors[source.name.format(layer=layer)] = rng.normal(0, 0.08, source.shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.skipif(UV is None, reason="needs uv")
def test_wheel_in_an_empty_environment_generates_from_a_local_folder_and_hears_of_a_killed_core(tmp_path):
    assert UV is not None
    run(UV, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "dist", REPO, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    environment = tmp_path / "env"
    run(UV, "venv", "--quiet", "--python", "3.12", environment, cwd=tmp_path)
    run(UV, "pip", "install", "--quiet", "--python", environment / "bin/python", wheel, cwd=tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    write_weights(write_model(folder))
    program = f"""
import os, signal, time
import jaxvllm
from jaxvllm import Engine, EngineDeadError, SamplingParams
engine = Engine({str(folder)!r})
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
print(jaxvllm.__file__, len(engine.generate("stone", params)[0].outputs[0].token_ids))
engine.llm_engine.add_request("a", "stone", SamplingParams(max_tokens=900, ignore_eos=True))
engine.llm_engine.step()
os.kill(engine.llm_engine._client.pid, signal.SIGKILL)
start = time.monotonic()
try:
    while True:
        engine.llm_engine.step()
except EngineDeadError:
    print(time.monotonic() - start)
"""
    origin, num_tokens, death_s = run(environment / "bin/python", "-c", program, cwd=tmp_path).split()[-3:]
    assert Path(origin).is_relative_to(environment)
    assert num_tokens == "5"
    assert float(death_s) < 1.0
    default = "from jaxvllm.model_source import default_model; print(default_model())"
    assert run(environment / "bin/python", "-c", default, cwd=tmp_path).strip() == "HuggingFaceTB/SmolLM2-135M-Instruct"
