"""T-tiny behind EngineCore and Engine: every engine shares one runner, so its programs compile once a test session."""

import functools
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxvllm.config import EngineConfig, MemoryConfig
from jaxvllm.core import EngineCore
from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.dispatcher import DispatchedStep, Dispatcher
from jaxvllm.layers.layer_context import Attended
from jaxvllm.model_runner import ModelRunner
from scheduler.batch import BatchLimits
from scheduler.buckets import explicit
from scheduler.config import SchedulerConfig
from scheduler.outputs import SchedulerOutput, TokenLogprobs
from scheduler.plan import PlanLayout, Planner, StepPlan
from scheduler.sampling_params import SamplingParams
from tests.engine import tiny_llama
from tests.engine.fake_executor import Done
from tests.engine.logits_processors import favour

LIMITS = BatchLimits(max_num_seqs=16, max_model_len=256, block_size=16, vocab_size=264, processors=(("favour", 2),))
POLICY = explicit(16, 64, [16], [64])
NUM_BLOCKS = 65  # of the device's pool; an engine with fewer is told less
EXECUTOR = "tests.engine.tiny_core:make_executor"
VOCAB_SIZE = tiny_llama.CONFIG.vocab_size

Ended = dict[str, tuple[list[int], str]]  # request id -> output ids, finish reason


@functools.cache
def shared_runner() -> ModelRunner:
    return tiny_llama.make_runner(
        LIMITS,
        POLICY,
        NUM_BLOCKS,
        attended=Attended.of_one_token(tiny_llama.CONFIG, is_finished=True),
        has_dense_logprobs=True,
        processors=(favour,),
    )


@functools.cache
def shared_dispatcher() -> Dispatcher:
    return Dispatcher()


class TinyExecutor:
    """Runs steps on the shared runner, from a pool full of NaN: what was never written must never be read.

    It is dispatched as DeviceExecutor does it, for all engines by one thread, so that a new engine finds it idle.
    """

    bucket_policy = POLICY

    def __init__(self, config: EngineConfig) -> None:
        self.num_blocks = config.memory.num_blocks or NUM_BLOCKS
        self.planner = Planner(LIMITS, POLICY, config.seed)
        self.plans: list[StepPlan] = []

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        shared_dispatcher().submit(self._reset).wait()
        return self.num_blocks

    def _reset(self) -> Any:
        runner = shared_runner()
        runner.initialize_kv_cache(NUM_BLOCKS)
        assert runner.kv_cache is not None
        runner.kv_cache = jnp.full_like(runner.kv_cache, jnp.nan).at[:, 0].set(0)
        return Done({}, 0.0, None)

    def execute(self, scheduler_output: SchedulerOutput) -> DispatchedStep | None:
        plan = self.planner.build(scheduler_output)
        if plan is None:
            return None
        self.plans.append(plan)
        return shared_dispatcher().submit(functools.partial(shared_runner().execute, plan))

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        pass

    def largest_position(self) -> int:
        layouts = [(plan, PlanLayout.make(plan.key, LIMITS)) for plan in self.plans]
        return max(layout.unpack(plan.buffer)["positions"].max() for plan, layout in layouts)


def make_executor(config: EngineConfig) -> TinyExecutor:
    return TinyExecutor(config)


class TinyCore:
    """An EngineCore on T-tiny that notes what its caller is told.

    depth: how many steps are in flight; 1: no async scheduling.
    """

    def __init__(self, usable_blocks: int = NUM_BLOCKS - 1, caching: bool = True, depth: int = 2, **limits) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256} | limits
        limits["max_model_len"] = min(limits["max_model_len"], usable_blocks * 16)
        config = EngineConfig(
            scheduler=SchedulerConfig(**limits, async_scheduling=depth > 1),
            memory=MemoryConfig(num_blocks=usable_blocks + 1, enable_prefix_caching=caching),
        )
        self.executor = TinyExecutor(config)
        self.core = EngineCore(config, self.executor)
        self.core._depth = lambda: depth
        self.tokens: dict[str, list[int]] = {}
        self.ended: Ended = {}
        self.num_cached_tokens: dict[str, int] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}

    def add(self, request_id: str, prompt: list[int], priority: int = 0, arrival: float = 0.0, **params) -> None:
        self.core.add_request(
            EngineCoreRequest(
                request_id, prompt, sampling(**params), eos_token_id=262, arrival_time=arrival, priority=priority
            )
        )

    def step(self, read_inputs: Callable[[], None] = lambda: None) -> None:
        outputs = self.core.step(read_inputs)
        if outputs is None:
            return
        for request_id, token_id in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
            assert request_id not in self.ended, "a token after the end"
            self.tokens.setdefault(request_id, []).append(token_id)
        for request_id, logprobs in outputs.logprobs.items():
            self.logprobs.setdefault(request_id, []).append(TokenLogprobs.unpack(logprobs))
        self.num_cached_tokens |= outputs.num_cached_tokens
        for request_id, end in outputs.finished.items():
            assert request_id not in self.ended, "two ends"
            self.ended[request_id] = (self.tokens.get(request_id, []), end.finish_reason)

    def run(self, max_steps: int = 900) -> Ended:
        """To the end; then every block must be free."""
        for _ in range(max_steps):
            if not self.core.has_work():
                break
            self.step()
        else:
            raise AssertionError(f"still busy after {max_steps} steps")
        assert self.core.reset_prefix_cache(), "blocks are held"
        return self.ended

    @property
    def num_preemptions(self) -> int:
        return self.core.metrics().scheduler.num_preemptions


def ids(count: int, seed: int = 0) -> list[int]:
    """Arbitrary fixed token ids."""
    rng = random.Random(seed * 1009 + count)
    return [rng.randrange(256) for _ in range(count)]


def sampling(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | params)


def solo(prompt: list[int], **params) -> list[int]:
    """The ids of a request alone in a fresh engine with a large pool, without caching and async scheduling."""
    return _solo(tuple(prompt), tuple(sorted(params.items())))


@functools.cache
def _solo(prompt: tuple[int, ...], params: tuple[tuple[str, object], ...]) -> list[int]:
    core = TinyCore(caching=False, depth=1)
    core.add("solo", list(prompt), **dict(params))
    return core.run()["solo"][0]
