"""Scripted executors, named as "module:function": the next token is always the last one + 1 (mod 264)."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxvllm.config import EngineConfig
from jaxvllm.core_messages import OUTPUTS
from jaxvllm.dispatcher import DispatchedStep, Dispatcher
from scheduler.outputs import ModelRunnerOutput, SchedulerOutput

VOCAB_SIZE = 264


class Done:
    """A step whose tokens are known at once, or an error that shows when they are waited for."""

    dispatch_s = 0.0

    def __init__(self, tokens: dict[str, int], delay_s: float, error: Exception | None) -> None:
        self._tokens, self._delay_s, self._error = tokens, delay_s, error

    def wait_until_done(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self) -> ModelRunnerOutput:
        time.sleep(self._delay_s)
        if self._error is not None:
            raise self._error
        return ModelRunnerOutput(self._tokens)


class SuccessorExecutor:
    """Keeps the tokens of every request from the SchedulerOutputs alone, as a device would."""

    bucket_policy = None

    def __init__(
        self, config: EngineConfig, delay_s: float = 0.0, fail_at_step: int = -1, hang_at_step: int = -1
    ) -> None:
        self._num_blocks = config.memory.num_blocks or 1025
        self._delay_s, self._fail_at_step, self._hang_at_step = delay_s, fail_at_step, hang_at_step
        self._tokens: dict[str, list[int]] = {}
        self._num_steps = 0

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        return self._num_blocks

    def execute(self, scheduler_output: SchedulerOutput) -> Any:
        for request_id in scheduler_output.finished_request_ids | scheduler_output.preempted_request_ids:
            self._tokens.pop(request_id, None)
        if not scheduler_output.total_num_scheduled_tokens:
            return None
        computed = {}
        for new in scheduler_output.scheduled_new_requests:
            self._tokens[new.request_id] = list(new.prompt_token_ids)
            computed[new.request_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_requests
        for request_id in cached.resumed_request_ids:
            self._tokens[request_id] = list(cached.all_token_ids[request_id])
        computed |= dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            tokens = self._tokens[request_id]
            if computed[request_id] + num_new == len(tokens):
                sampled[request_id] = self.next_token(tokens)
                tokens.append(sampled[request_id])
        self._num_steps += 1
        error = RuntimeError("the device is on fire") if self._num_steps == self._fail_at_step else None
        return Done(sampled, 1e6 if self._num_steps == self._hang_at_step else self._delay_s, error)

    def next_token(self, tokens: list[int]) -> int:
        return (tokens[-1] + 1) % VOCAB_SIZE

    def metrics(self) -> dict[str, float]:
        return {"num_steps": float(self._num_steps)}

    def shutdown(self) -> None:
        self._tokens.clear()


class DispatchingExecutor(SuccessorExecutor):
    """Has its steps dispatched by a thread, as DeviceExecutor does; dispatching step `fail_at_step` raises."""

    def __init__(self, config: EngineConfig, delay_s: float, fail_at_step: int) -> None:
        super().__init__(config, delay_s)
        self._fail_dispatch_at_step = fail_at_step
        self._dispatcher = Dispatcher()

    def execute(self, scheduler_output: SchedulerOutput) -> DispatchedStep | None:
        done = super().execute(scheduler_output)
        if done is None:
            return None
        is_bad = self._num_steps == self._fail_dispatch_at_step

        def dispatch() -> Any:
            if is_bad:
                raise RuntimeError("no such program")
            return done

        return self._dispatcher.submit(dispatch)

    def shutdown(self) -> None:
        self._dispatcher.shutdown()


class ParrotExecutor(SuccessorExecutor):
    """Says what stands between the bytes 1 and 2 of the prompt, and ends (token 262)."""

    def next_token(self, tokens: list[int]) -> int:
        begin, end = tokens.index(1) + 1, tokens.index(2)
        said = tokens[tokens.index(3) + 1 :]  # byte 3 ends the prompt
        return tokens[begin + len(said)] if begin + len(said) < end else 262


def parrot(config: EngineConfig) -> ParrotExecutor:
    return ParrotExecutor(config)


def successor(config: EngineConfig) -> SuccessorExecutor:
    return SuccessorExecutor(config)


def slow(config: EngineConfig) -> SuccessorExecutor:
    return SuccessorExecutor(config, delay_s=0.02)


def slow_5ms(config: EngineConfig) -> SuccessorExecutor:
    return SuccessorExecutor(config, delay_s=0.005)


def hangs_at_step_9(config: EngineConfig) -> SuccessorExecutor:
    return SuccessorExecutor(config, delay_s=0.02, hang_at_step=9)


def fails_at_step_9(config: EngineConfig) -> SuccessorExecutor:
    return SuccessorExecutor(config, delay_s=0.02, fail_at_step=9)


def fails_at_step_3(config: EngineConfig) -> SuccessorExecutor:
    return SuccessorExecutor(config, fail_at_step=3)


def fails_at_step_3_and_ends_slowly(config: EngineConfig) -> SuccessorExecutor:
    exit_now = os._exit

    def exit_later(status: int) -> None:
        time.sleep(0.6)
        exit_now(status)

    os._exit = exit_later  # pyright: ignore[reportAttributeAccessIssue]
    return SuccessorExecutor(config, fail_at_step=3)


def speaks_nonsense_from_step_9(config: EngineConfig) -> SuccessorExecutor:
    from jaxvllm.core_process import CoreLoop

    send, num_sent = CoreLoop.send, iter(range(99))

    def send_nonsense(loop: CoreLoop, kind: bytes, body: Any) -> None:
        if kind == OUTPUTS and next(num_sent) >= 8:
            loop._outbox.send(kind + b"\xc1")
        else:
            send(loop, kind, body)

    CoreLoop.send = send_nonsense
    return SuccessorExecutor(config, delay_s=0.02)


def fails_with_a_group(config: EngineConfig) -> SuccessorExecutor:
    raise ExceptionGroup("many things at once", [ValueError("the first")])


def fails_with_a_name_that_is_no_text(config: EngineConfig) -> SuccessorExecutor:
    raise ValueError("cannot read /models/\udcff")


def fails_in_dispatch_at_step_9(config: EngineConfig) -> DispatchingExecutor:
    return DispatchingExecutor(config, delay_s=0.02, fail_at_step=9)


def kills_itself_at_start(config: EngineConfig) -> SuccessorExecutor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def sleeps_at_start(config: EngineConfig) -> SuccessorExecutor:
    time.sleep(60)
    raise AssertionError


def sleeps_at_second_start(config: EngineConfig) -> SuccessorExecutor:
    """The first start leaves a file in the model's folder."""
    mark = Path(config.model.model) / "started"
    if mark.exists():
        (mark.parent / "starts again").touch()
        time.sleep(60)
    mark.touch()
    return SuccessorExecutor(config, delay_s=0.02)


def bad_model(config: EngineConfig) -> SuccessorExecutor:
    raise ValueError("tensor 'model.norm.weight' is missing")
