"""A model small enough to check by hand, and a loop that drives planner and runner without a scheduler."""

from collections.abc import Callable
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.layer_context import Attended
from jaxvllm.model_runner import ModelRunner, RunnerConfig
from pallas_kernels import paged_attention, rope_and_write_kv
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketPolicy
from scheduler.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.plan import Planner, StepPlan
from scheduler.sampling_params import SamplingParams

VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 53, 1, 6, 3, 8
HIDDEN = HEADS * HEAD_DIM


def toy_params(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32)

    kv = KV_HEADS * HEAD_DIM
    return {
        "embed": weight(VOCAB, HIDDEN), "position": weight(211, HIDDEN), "q": weight(LAYERS, HIDDEN, HIDDEN),
        "kv": weight(LAYERS, HIDDEN, 2 * kv), "o": weight(LAYERS, HIDDEN, HIDDEN), "head": weight(HIDDEN, VOCAB) * 5,
    }  # fmt: skip


class ToyModel:
    """Attention layers over learned positions; no norm, no MLP."""

    windows = (None,)

    def __init__(self, params: dict[str, jax.Array]) -> None:
        self.params = params

    def __call__(self, input_ids, positions, kv_cache, metadata: AttentionMetadata):
        p, m = self.params, metadata
        x = p["embed"][input_ids] + p["position"][positions]
        for i in range(LAYERS):
            layer = jnp.int32(i)
            q = (x @ p["q"][i]).reshape(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            k, v = jnp.split((x @ p["kv"][i]).reshape(-1, 2 * KV_HEADS, HEAD_DIM), 2, axis=1)
            qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)
            q, kv_cache = rope_and_write_kv(qkv, kv_cache, m.slot_mapping, layer, backend=m.backend)
            rows = (m.block_tables, m.seq_lens, m.query_start_loc, m.num_decodes, m.num_reqs)
            options = {"scale": HEAD_DIM**-0.5, "kind": m.kind, "backend": m.backend}
            attended = Attended(paged_attention(q, kv_cache, layer, *rows, **options).reshape(-1, HIDDEN), x)
            x = x + attended.heads @ p["o"][i]
        return attended, kv_cache

    def compute_logits(self, attended, backend="reference"):
        return (attended.residual + attended.heads @ self.params["o"][-1]) @ self.params["head"]


def make_runner(limits: BatchLimits, policy: BucketPolicy, num_blocks: int, **options) -> ModelRunner:
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, limits.block_size, jnp.dtype(jnp.float32))
    runner = ModelRunner(ToyModel, toy_params(), RunnerConfig(limits, policy, spec, HEADS, VOCAB, **options))
    runner.initialize_kv_cache(num_blocks)
    return runner


class Loop:
    """Runs requests to a fixed number of tokens, the blocks of each decided up front; chunks of `chunk` tokens."""

    def __init__(
        self, limits: BatchLimits, policy: BucketPolicy, runner: ModelRunner, chunk: int = 1000, blocks=None
    ) -> None:
        self.limits, self.runner, self.chunk = limits, runner, chunk
        self.planner = Planner(limits, policy)
        self.blocks = iter(range(1, 10**6)) if blocks is None else iter(blocks)
        self.state: dict[str, dict] = {}
        self.finished: set[str] = set()
        self.in_flight: list = []
        self.observe: Callable[[StepPlan], None] = lambda plan: None  # called after each dispatch

    def add(self, request_id: str, prompt: list[int], num_outputs: int, **params) -> None:
        num_blocks = -(-(len(prompt) + num_outputs) // self.limits.block_size)
        blocks = list(islice(self.blocks, num_blocks))
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": None} | params)
        self.state[request_id] = {
            "prompt": prompt, "blocks": blocks, "given": 0, "computed": 0, "left": num_outputs, "out": [],
            "params": params,
        }  # fmt: skip

    def schedule(self) -> SchedulerOutput:
        out, cached = SchedulerOutput(finished_request_ids=self.finished), CachedRequestData()
        self.finished = set()
        for request_id, s in list(self.state.items()):
            if s["left"] == 0:
                continue
            n = min(max(len(s["prompt"]) - s["computed"], 1), self.chunk)
            need = -(-(s["computed"] + n) // self.limits.block_size)
            new_blocks = s["blocks"][s["given"] : need]
            if s["computed"] == 0:
                new = NewRequestData(request_id, s["prompt"], s["params"], new_blocks, 0, eos_token_id=0)
                out.scheduled_new_requests.append(new)
            else:
                cached.request_ids.append(request_id)
                cached.new_block_ids.append(new_blocks or None)
                cached.num_computed_tokens.append(s["computed"])
            s["given"] = need
            s["computed"] += n
            if s["computed"] >= len(s["prompt"]):
                s["left"] -= 1
                if s["left"] == 0:
                    self.finished.add(request_id)
            out.num_scheduled_tokens[request_id] = n
        out.scheduled_cached_requests = cached
        out.total_num_scheduled_tokens = sum(out.num_scheduled_tokens.values())
        return out

    def run(self, depth: int = 1, max_steps: int = 1000) -> dict[str, list[int]]:
        for _ in range(max_steps):
            plan = self.planner.build(self.schedule())
            if plan is not None:
                self.in_flight.append(self.runner.execute(plan))
                self.observe(plan)
            if self.in_flight and (plan is None or len(self.in_flight) == depth):
                for request_id, token in self.in_flight.pop(0).wait().sampled_token_ids.items():
                    self.state[request_id]["out"].append(token)
            if plan is None and not self.in_flight:
                break
        return {request_id: s["out"] for request_id, s in self.state.items()}
