"""Compare the logits of whole steps between the attention backend of this device and the XLA reference.

    python scripts/check_backend.py --model qwen3-0.6b

A real scheduler admits requests of uneven lengths in two waves, so that the steps are prefills, decodes of few rows, a
mixture and decodes of more rows.
The same plans run three times with the same random weights, each on its own cache: with the backend, with the XLA
reference, and with the XLA reference in float32. How far rounding carries two right bfloat16 results apart depends on
the model (1.4% for Qwen3-0.6B, 5% for Llama-3.1-8B), so the backend is held against float32, and its error may be
little larger than that of the reference. Prints one JSON object; exits with 1 if it is larger.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import workloads

from jaxvllm.attention_backend import choose_backend
from jaxvllm.compile_cache import compiler_options
from jaxvllm.device_state import DeviceState
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.model_source import resolve
from jaxvllm.models.registry import get_model_class
from jaxvllm.step import make_step
from jaxvllm.weights.dummy import dummy_params
from pallas_kernels import FEW_ROWS, Backend
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, explicit
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.outputs import ModelRunnerOutput
from scheduler.plan import PlanLayout, Planner, StepPlan
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import make_scheduler

# The kernels round the probabilities to bfloat16 before they meet the values, the reference does not.
MAX_ERROR_RATIO = 1.25
# Prompts by the step before which they arrive, 16 at most, as more are admitted by a program of their own: two steps
# prefill, two decode few rows, one is mixed, two decode more rows.
WAVES = {0: (251, 17, 700, 1, 64), 4: (33, 128, 311, *range(1, 12))}
NUM_STEPS = 7
MAX_NUM_SEQS = 32
NUM_BLOCKS = 512


class LogitsRunner:
    """Runs plans with one backend and gives the logits instead of sampling."""

    def __init__(self, model, config, params, limits: BatchLimits, num_blocks: int, backend: Backend) -> None:
        self.model, self.params, self.limits = model, params, limits
        self.backend: Backend = backend
        self.num_heads = config.num_heads
        spec = KVCacheSpec(
            config.num_layers, config.num_kv_heads, config.head_dim, limits.block_size, jnp.dtype(config.dtype)
        )
        # NaN in every slot that nothing wrote: reading one shows.
        self.steps: dict[BucketKey, Callable] = {}
        self.kv_cache = jnp.full(spec.shape(num_blocks), jnp.nan, spec.dtype)
        self.state = DeviceState.zeros(limits)

    def run(self, plan: StepPlan, last_tokens: np.ndarray) -> np.ndarray:
        """f32[num_reqs, V] logits; last_tokens i32[max_num_seqs] stands for what the step before sampled."""
        # At every position, so at the last one.
        token_ids = jnp.broadcast_to(jnp.asarray(last_tokens)[:, None], self.state.token_ids.shape)
        self.state = replace(self.state, token_ids=token_ids)
        if plan.key not in self.steps:
            layout = PlanLayout.make(plan.key, self.limits)
            step = make_step(partial(bind, self.model), plan.key, layout, self.backend, self.num_heads)
            options = compiler_options(jax.default_backend()) or None
            self.steps[plan.key] = jax.jit(step, donate_argnums=(1, 2), compiler_options=options)
        step = self.steps[plan.key]
        print(f"{plan.key} {self.backend}", file=sys.stderr, flush=True)
        # "highest" keeps a float32 product from being computed in TF32; it says nothing about bfloat16 ones.
        with jax.default_matmul_precision("highest"):
            output, self.kv_cache, self.state = step(self.params, self.kv_cache, self.state, plan.buffer)
        return np.asarray(output.logits)[: plan.num_reqs]


def make_runners(name: str, requested: str | None, limits: BatchLimits) -> dict[str, LogitsRunner]:
    """The runners by what they are: "backend", "reference" and "float32"; one set of weights."""
    config = resolve(workloads.write_config(name)).config
    backend = choose_backend(requested, jax.devices()[0], config, limits)
    model = get_model_class(config.architecture)(config)
    params = dummy_params(param_specs(model))
    exact_config = replace(config, dtype="float32")
    exact_model = get_model_class(config.architecture)(exact_config)
    exact_params = jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
    return {
        "backend": LogitsRunner(model, config, params, limits, NUM_BLOCKS, backend),
        "reference": LogitsRunner(model, config, params, limits, NUM_BLOCKS, "reference"),
        "float32": LogitsRunner(exact_model, exact_config, exact_params, limits, NUM_BLOCKS, "reference"),
    }


def compare(name: str, requested: str | None = None) -> dict:
    """Errors of the backend and of the reference against float32 by step, and how many of their argmaxes agree."""
    limits = BatchLimits(max_num_seqs=MAX_NUM_SEQS, max_model_len=1024, block_size=16)
    scheduler_config = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=1024, max_model_len=1024, async_scheduling=False
    )
    scheduler = make_scheduler(scheduler_config, CacheConfig(num_blocks=NUM_BLOCKS, enable_prefix_caching=False))
    planner = Planner(limits, explicit(MAX_NUM_SEQS, 1024, [FEW_ROWS, MAX_NUM_SEQS], [1024]), seed=0)
    runners = make_runners(name, requested, limits)
    vocab_size = resolve(workloads.write_config(name)).config.vocab_size
    rng = np.random.default_rng(0)
    kinds = []
    errors: dict[str, list[float]] = {"backend": [], "reference": []}
    agreed, total = dict.fromkeys(errors, 0), 0
    last_tokens = np.zeros(limits.max_num_seqs, np.int32)
    for step_number in range(NUM_STEPS):
        for i, length in enumerate(WAVES.get(step_number, ())):
            prompt = rng.integers(10, vocab_size, length).tolist()
            params_of = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 1, ignore_eos=True)
            scheduler.add_request(Request(f"{step_number}-{i}", prompt, params_of))
        scheduled = scheduler.schedule()
        plan = planner.build(scheduled)
        assert plan is not None, "every step has work"
        logits = {what: runner.run(plan, last_tokens)[plan.needs_sample] for what, runner in runners.items()}
        for what, array in logits.items():
            assert np.isfinite(array).all(), f"{plan.key}: NaN reached the logits of {what}"
        exact = logits["float32"]
        for what in errors:
            errors[what].append(float(np.linalg.norm(logits[what] - exact) / np.linalg.norm(exact)))
            agreed[what] += int((logits[what].argmax(-1) == exact.argmax(-1)).sum())
        kinds.append(str(plan.key))
        total += len(exact)
        sampled = {}
        for row, request_id in enumerate(plan.request_ids):
            if plan.needs_sample[row]:
                sampled[request_id] = int(rng.integers(10, vocab_size))
                last_tokens[planner.batch.row_of[request_id]] = sampled[request_id]
        scheduler.update_from_output(scheduled, ModelRunnerOutput(sampled))
    ratios = [mine / its for mine, its in zip(errors["backend"], errors["reference"], strict=True)]
    return {
        "model": name,
        "backend": runners["backend"].backend,
        "steps": kinds,
        "errors_against_float32": errors,
        "argmax_agreement_with_float32": {what: count / total for what, count in agreed.items()},
        "max_error_ratio": max(ratios),
        "passed": max(ratios) <= MAX_ERROR_RATIO,
    }


def main() -> int:
    """Run the comparison for one model shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.MODELS, default="qwen3-0.6b")
    parser.add_argument("--backend", default=None, help="instead of the one the engine would choose")
    args = parser.parse_args()
    result = compare(args.model, args.backend)
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
