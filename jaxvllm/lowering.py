"""Steps lowered in processes of their own.

Python's lock lets a process lower one program at a time, and a step takes 1 to 3 seconds, most of it in the kernels'
lowering: 23 programs of Qwen3-0.6B took most of a minute on one H200's host. Here processes without a device
(`python -m jaxvllm.lowering`) export steps for the device's platform; lowering what they return takes 0.2 s.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import Any

import jax
from jax import export

from jaxvllm.model_config import ModelConfig
from jaxvllm.sampling.row_kernel import TRITON_CALL

KERNEL_CALLS = ("mosaic_gpu", "mosaic_gpu_v2", TRITON_CALL)  # stable enough between two processes of one version


@dataclass(frozen=True)
class ExportedStep:
    """A step as it travels: a serialised jax.export.Exported over flat arguments; its outputs as a tree of zeros."""

    exported: bytearray
    outputs: Any


@dataclass(frozen=True)
class LoweringTask:
    """What a process must know to lower the steps of a runner.

    Attributes:
      model: of the weights' shapes.
      runner: model_runner.RunnerConfig of the runner, without what is bound to a process (mesh, store).
      platform: "cuda" or "cpu".
      unroll_layers: see run_layers.
    """

    model: ModelConfig
    runner: Any
    platform: str
    unroll_layers: bool


def export_step(step: Callable[..., Any], args: tuple[Any, ...], platform: str) -> ExportedStep:
    """Lower a step for a platform that this process need not have; args are trees of ShapeDtypeStructs."""
    leaves, structure = jax.tree.flatten(args)
    outputs: Any = None

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        nonlocal outputs
        out = step(*jax.tree.unflatten(structure, leaves))
        outputs = jax.tree.map(lambda _: 0, out)
        return jax.tree.leaves(out)

    checks = [export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS]
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    exported = export.export(jax.jit(flat), platforms=[platform], disabled_checks=checks)(*shapes)
    return ExportedStep(exported.serialize(), outputs)


def import_step(step: ExportedStep) -> Callable[..., Any]:
    """The step as a function of the arguments that it was exported with."""
    exported, structure = export.deserialize(step.exported), jax.tree.structure(step.outputs)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(structure, exported.call(*jax.tree.leaves(args)))

    return call


class LoweringProcesses:
    """Up to `limit` processes, each started when it is first needed; for any number of threads.

    Args:
      environment: of the processes; see config.lowering_environment.
    """

    def __init__(self, task: LoweringTask, environment: dict[str, str], limit: int) -> None:
        self._task = pickle.dumps(task)
        self._environment = environment
        self._free_places = BoundedSemaphore(limit)
        self._lock = Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: list[subprocess.Popen[bytes]] = []

    def export(self, key: Any, num_blocks: int) -> ExportedStep:
        """Have a step lowered; waits for a process.

        Raises: RuntimeError with the process's own error.
        """
        with self._free_places:
            process = self._take()
            answer = _ask(process, (key, num_blocks))
            with self._lock:
                self._idle.append(process)
        if isinstance(answer, ExportedStep):
            return answer
        raise RuntimeError(f"{key} could not be lowered: {answer}")

    def close(self) -> None:
        """End all processes, those at work too."""
        with self._lock:
            processes, self._all, self._idle = self._all, [], []
        for process in processes:
            process.kill()
            process.communicate()

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            command = [sys.executable, "-P", "-m", "jaxvllm.lowering"]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment, start_new_session=True
            )
            self._all.append(process)
        assert process.stdin is not None
        process.stdin.write(self._task)
        return process


def _ask(process: subprocess.Popen[bytes], question: Any) -> Any:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(pickle.dumps(question))
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (EOFError, BrokenPipeError) as error:
        raise RuntimeError(f"a lowering process ended with exit code {process.wait()}; its output says more") from error


def _make_runner(task: LoweringTask) -> Any:
    """A runner that knows shapes alone."""
    # Late: model_runner imports this module.
    from jaxvllm.layers.parameter import bind, param_shapes, param_specs
    from jaxvllm.model_runner import ModelRunner
    from jaxvllm.models.registry import get_model_class
    from jaxvllm.parallel import make_mesh

    model = get_model_class(task.model.architecture)(task.model, unroll_layers=task.unroll_layers)
    shapes = param_shapes(param_specs(model), make_mesh(jax.devices()))
    return ModelRunner(lambda traced: bind(model, traced), shapes, task.runner)


def main() -> None:
    """Entry of `python -m jaxvllm.lowering`: a task, then keys, on standard input; ends with it."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    task: LoweringTask = pickle.load(sys.stdin.buffer)
    runner = _make_runner(task)
    while True:
        try:
            key, num_blocks = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            runner.set_num_blocks(num_blocks)
            step, args = runner.step_and_args(key)
            answer: Any = export_step(step, args, task.platform)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # Under its real name: what is pickled here must be found there.
    from jaxvllm.lowering import main as main_of_module

    main_of_module()
