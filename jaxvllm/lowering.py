"""Steps lowered in processes of their own: what such a process does. lowering_processes.py starts them.

Python's lock lets a process lower one program at a time, and a step takes 1 to 3 seconds, most of it in the kernels'
lowering: 23 programs of Qwen3-0.6B took most of a minute on one H200's host. Here processes without a device
(`python -m jaxvllm.lowering`) export steps for the device's platform; lowering what they return takes 0.2 s.
"""

import gc
import importlib
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax import export

from jaxvllm.model_config import ModelConfig
from jaxvllm.models.registry import get_model_class
from jaxvllm.sampling.row_kernel import TRITON_CALL
from pallas_kernels.lazy import import_kernels

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


def _make_runner(task: LoweringTask) -> Any:
    """A runner that knows shapes alone."""
    # Late: model_runner imports this module.
    from jaxvllm.layers.parameter import bind, param_shapes, param_specs
    from jaxvllm.model_runner import ModelRunner
    from jaxvllm.parallel import make_mesh

    model = get_model_class(task.model.architecture)(task.model, unroll_layers=task.unroll_layers)
    shapes = param_shapes(param_specs(model), make_mesh(jax.devices()))
    return ModelRunner(lambda traced: bind(model, traced), shapes, task.runner)


def main(descriptors: Sequence[int]) -> None:
    """Entry of `python -m jaxvllm.lowering`: forks a process a socket when it is told the task on standard input.

    No device client may be there before: its threads do not survive a fork.

    Args:
      descriptors: of the sockets on which keys come and exported steps go; a process ends when its socket does.
    """
    import_kernels()
    importlib.import_module("jaxvllm.model_runner")  # late: it imports this module

    sockets = [socket.socket(fileno=descriptor) for descriptor in reversed(descriptors)]
    try:
        task: LoweringTask = pickle.load(sys.stdin.buffer)
    except EOFError:  # nothing has to be lowered
        return
    get_model_class(task.model.architecture)  # imports the model
    gc.freeze()  # what is shared stays shared
    while sockets:
        mine = sockets.pop()
        if not os.fork():
            for other in sockets:  # a process that ends must not leave its socket open here
                other.close()
            _answer(task, mine)
        mine.close()
    for _ in descriptors:
        _, status = os.wait()
        if code := os.waitstatus_to_exitcode(status):
            print(f"a lowering process ended with exit code {code}", file=sys.stderr, flush=True)


def _answer(task: LoweringTask, questions: socket.socket) -> NoReturn:
    """Lower what is asked for until nobody asks any more; then the process ends."""
    code = 1
    try:
        runner = _make_runner(task)
        with questions.makefile("rwb") as stream:
            while question := _read(stream):
                pickle.dump(_lower(runner, task, *question), stream)
                stream.flush()
        code = 0
    except (BrokenPipeError, ConnectionResetError):  # the engine has ended
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # what Python does at its end is the business of the process that was forked


def _read(stream: Any) -> tuple[Any, int] | None:
    try:
        return pickle.load(stream)
    except EOFError:
        return None


def _lower(runner: Any, task: LoweringTask, key: Any, num_blocks: int) -> ExportedStep | str:
    try:
        runner.set_num_blocks(num_blocks)
        step, args = runner.step_and_args(key)
        return export_step(step, args, task.platform)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    # Under its real name: what is pickled here must be found there.
    from jaxvllm.lowering import main as main_of_module

    main_of_module([int(argument) for argument in sys.argv[1:]])
