"""What structured requests cost the others in the batch.

    python scripts/bench_structured_output.py --host                 # any machine: the loop beside a pretended device
    python scripts/bench_structured_output.py --out scripts/results/h200/structured_output.json          # one GPU
    python scripts/bench_structured_output.py --phases               # one GPU: where the loop's time goes

256 requests; of them 0, 1, 16 or all follow a JSON schema. The vocabulary has the size of Qwen3's and is made up:
byte-level BPE with random merges of letters. --host times EngineCore itself (grammars, masks, scheduler, planner, two
steps in flight) with a device whose steps take what --step-times say, and that "samples" texts drawn beforehand.
Without --host the real engine serves qwen3-0.6b with dummy weights, and every structured text is checked to be the
beginning of what SCHEMA allows.
"""

import argparse
import json
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import records
import workloads
from llguidance import LLMatcher
from pretended_device import PretendedStep
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxvllm import Engine, RequestOutput, SamplingParams, StructuredOutputsParams
from jaxvllm.config import EngineConfig, MemoryConfig, ModelLoadConfig
from jaxvllm.core import EngineCore, make_executor
from jaxvllm.core_messages import EngineCoreRequest
from jaxvllm.core_process import SWITCH_INTERVAL_S
from jaxvllm.dispatcher import DispatchedStep, Dispatcher
from jaxvllm.engine_args import EngineArgs
from jaxvllm.metrics import Counter, Gauge
from jaxvllm.structured_output.grammar import to_llguidance
from jaxvllm.structured_output.manager import make_grammar_tokenizer
from jaxvllm.tokenizer import Tokenizer as ModelTokenizer
from scheduler.batch import BatchLimits
from scheduler.buckets import powers_of_two
from scheduler.config import SchedulerConfig
from scheduler.outputs import EngineCoreOutputs, SchedulerOutput
from scheduler.plan import Planner, StepPlan
from scheduler.scheduler import PIPELINED_GRAMMARS

NUM_REQUESTS = 256
NUM_STRUCTURED = (0, 1, 16, 256)
RESULTS = Path(__file__).parent / "results" / "h200"
# What the pretended device's programs behind a step take: guesses by what calls of 8 masks took on an H200.
MASKS_DISPATCH_S, MASKS_BYTES_PER_S, SAMPLE_DISPATCH_S, SAMPLE_S = 0.15e-3, 8e9, 0.1e-3, 0.1e-3
VOCAB_SIZE = 151936
EOS = 151645
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "count": {"type": "integer"},
            "kind": {"enum": ["alpha", "beta", "gamma"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
    "minItems": 200,
}


def write_tokenizer(folder: Path) -> Path:
    """Put a tokenizer of VOCAB_SIZE ids into a model folder."""
    rng = random.Random(0)
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: i for i, letter in enumerate(sorted(letters))}
    common = [letter for letter in vocab if letter.isascii()] + ["\u0120"] * 20  # the space
    words, merges = list(common), []
    while len(vocab) < EOS:
        left, right = rng.choice(words), rng.choice(common)
        if left + right not in vocab and len(left) < 12:
            vocab[left + right] = len(vocab)
            words.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def sampling(index: int, num_structured: int, max_tokens: int, temperature: float = 1.0) -> SamplingParams:
    """Structured requests are spread over the batch."""
    is_structured = index * num_structured // NUM_REQUESTS != (index + 1) * num_structured // NUM_REQUESTS
    constraint = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True) if is_structured else None
    return SamplingParams(
        temperature=temperature,
        seed=index,
        max_tokens=max_tokens,
        ignore_eos=not is_structured,
        structured_outputs=constraint,
    )


def draw_texts(folder: Path, num_tokens: int) -> list[list[int]]:
    """The beginning of a random text that follows SCHEMA, for each request."""
    tokenizer = make_grammar_tokenizer(ModelTokenizer.from_folder(folder), [EOS], VOCAB_SIZE)
    params = sampling(0, NUM_REQUESTS, 1).structured_outputs
    assert params is not None
    start = LLMatcher(tokenizer.llguidance, to_llguidance(params, tokenizer.special_texts), log_level=0)
    rng, texts = random.Random(0), []
    for _ in range(NUM_REQUESTS):
        matcher, text = start.deep_copy(), []
        for _ in range(num_tokens):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            word = int(rng.choice(np.flatnonzero(mask)))
            text.append(word * 32 + rng.choice([b for b in range(32) if int(mask[word]) >> b & 1]))
            assert matcher.consume_token(text[-1])
        texts.append(text)
    return texts


def read_step_times(path: Path) -> tuple[list[int], list[float]]:
    """Rows and seconds of decode steps, at the smallest context of each number of rows that was measured."""
    seconds: dict[int, float] = {}
    for sample in json.loads(path.read_text())["samples"]:
        if sample["kind"] == "decode":
            seconds.setdefault(sample["R"], sample["ms"] / 1e3)
    return sorted(seconds), [seconds[rows] for rows in sorted(seconds)]


class PretendedDevice:
    """An Executor whose steps take step_times, one after the other; plans and masks are made, as the real one does."""

    def __init__(self, config: EngineConfig, args: argparse.Namespace, texts: list[list[int]]) -> None:
        limits = config.scheduler.max_num_seqs, config.scheduler.max_model_len, config.memory.block_size
        self.bucket_policy = powers_of_two(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
        self._planner = Planner(BatchLimits(*limits, VOCAB_SIZE), self.bucket_policy, seed=0)
        self._step_times, self._dispatch_s = read_step_times(args.step_times), args.dispatch_ms / 1e3
        self._dispatcher, self._is_free_at = Dispatcher(), 0.0
        self._texts, self._num_sampled = texts, [0] * NUM_REQUESTS

    def initialize(self, meanwhile: Callable[[], None]) -> int:
        return NUM_REQUESTS * 64

    def execute(self, scheduler_output: SchedulerOutput) -> DispatchedStep | None:
        for new in scheduler_output.scheduled_new_requests:
            self._num_sampled[int(new.request_id)] = 0
        plan = self._planner.build(scheduler_output)
        return None if plan is None else self._dispatcher.submit(lambda: self._dispatch(plan))

    def _dispatch(self, plan: StepPlan) -> PretendedStep:
        time.sleep(self._dispatch_s)
        step_s = float(np.interp(plan.key.R, *self._step_times))
        self._is_free_at = max(self._is_free_at, time.monotonic()) + step_s
        if plan.masks is not None:
            for _, buffer in plan.masks.buffers():
                time.sleep(MASKS_DISPATCH_S + buffer.nbytes / MASKS_BYTES_PER_S)
            time.sleep(SAMPLE_DISPATCH_S)
            self._is_free_at = max(self._is_free_at, time.monotonic()) + SAMPLE_S
        tokens = {}
        for request_id, needs_sample in zip(plan.request_ids, plan.needs_sample.tolist(), strict=True):
            if needs_sample:
                index = int(request_id)
                tokens[request_id] = self._texts[index][self._num_sampled[index]]
                self._num_sampled[index] += 1
        return PretendedStep(self._is_free_at, tokens)

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        self._dispatcher.shutdown()


class Phases:
    """Where the loop's time goes: milliseconds of each phase a step, apart for steps with and without a grammar."""

    def __init__(self, core: EngineCore) -> None:
        self.reset()
        self._time(core._grammar_manager(), "begin_step")
        self._time(core._grammar_manager(), "end_step")
        self._time(core._scheduler, "schedule")
        self._time(core._scheduler, "update_from_output")
        self._time(core._executor, "execute")
        self._time(core._clock, "wait")
        self._watch_programs(core._executor)

    def reset(self) -> None:
        """Forget what was noted."""
        self._ms: dict[str, float] = {}
        self._steps: dict[str, list[dict[str, float]]] = {"with a grammar": [], "without": []}
        self._has_grammar = False

    def step(self, core: EngineCore) -> EngineCoreOutputs | None:
        """Run core.step and note its phases."""
        self._ms, self._has_grammar = {}, False
        start = time.perf_counter()
        outputs = core.step()
        self._ms["all"] = (time.perf_counter() - start) * 1e3
        self._steps["with a grammar" if self._has_grammar else "without"].append(self._ms)
        return outputs

    def table(self) -> dict[str, dict[str, float]]:
        """The means, and how many steps there were of either kind."""
        rows = {}
        for kind, steps in self._steps.items():
            names = dict.fromkeys(name for step in steps for name in step)
            means = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
            rows[kind] = {"steps": len(steps)} | {name: round(ms, 3) for name, ms in means.items()}
        return rows

    def _time(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self._ms[name] = self._ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3
            self._has_grammar |= name == "schedule" and bool(result.grammars)
            return result

        setattr(owner, name, timed)

    def _watch_programs(self, executor: Any) -> None:
        """The calls of programs, by name, where a device runs them."""
        if isinstance(executor, PretendedDevice):
            return
        get = executor.runner.programs.get

        def watched(key: Any) -> Any:
            program = get(key)

            def call(*args: Any) -> Any:
                start = time.perf_counter()
                result = program(*args)
                name = f"call {key if isinstance(key, str) else type(key).__name__}"
                self._ms[name] = self._ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3
                return result

            return call

        executor.runner.programs.get = watched


def pretended_core(folder: Path, args: argparse.Namespace, texts: list[list[int]]) -> EngineCore:
    """An engine core without a device."""
    config = EngineConfig(
        model=ModelLoadConfig(model=str(folder)),
        scheduler=SchedulerConfig(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=16384, max_model_len=1024),
        memory=MemoryConfig(num_blocks=NUM_REQUESTS * 64),
    )
    return EngineCore(config, PretendedDevice(config, args, texts))


def real_core(engine_args: EngineArgs) -> EngineCore:
    """The engine core of the device, in this process."""
    config = engine_args.create_engine_config(workloads.MODELS["qwen3-0.6b"]["max_position_embeddings"])
    with config.applied_core_environment():
        return EngineCore(config, make_executor(config))


def run_core(core: EngineCore, phases: Phases, num_structured: int, num_tokens: int) -> dict[str, Any]:
    """Milliseconds a step of the loop, of its own CPU time, and by phase."""
    params = [sampling(index, num_structured, num_tokens, temperature=0.0) for index in range(NUM_REQUESTS)]
    for index in range(NUM_REQUESTS):
        core.add_request(EngineCoreRequest(str(index), array("i", [1 + index] * 40), params[index], eos_token_id=EOS))
    counts = dict.fromkeys(map(str, range(NUM_REQUESTS)), 0)
    while min(counts.values()) < 8:  # compiled, and everybody decodes
        outputs = core.step()
        for request_id in outputs.request_ids if outputs else ():
            counts[request_id] += 1
    phases.reset()
    structured = {str(i) for i, given in enumerate(params) if given.structured_outputs}
    times = time.perf_counter(), time.thread_time(), time.process_time()
    num_steps, num_given, num_structured_given = 0, 0, 0
    while num_steps < num_tokens // 2:
        outputs = phases.step(core)
        num_steps += outputs is not None
        if outputs:
            num_given += len(outputs.request_ids)
            num_structured_given += sum(i in structured for i in outputs.request_ids)
    now = time.perf_counter(), time.thread_time(), time.process_time()
    wall_ms, loop_cpu_ms, cpu_ms = ((end - start) * 1e3 for end, start in zip(now, times, strict=True))
    core.abort_requests(list(counts))
    while core.has_work():
        core.step()
    num_others = NUM_REQUESTS - num_structured
    return {
        "num_structured": num_structured,
        "ms_per_token": wall_ms / (num_given / NUM_REQUESTS),
        "ms_per_token_of_others": num_others and wall_ms / ((num_given - num_structured_given) / num_others),
        "ms_per_structured_token": num_structured and wall_ms / (num_structured_given / num_structured),
        "step_ms": wall_ms / num_steps,
        "loop_cpu_ms": loop_cpu_ms / num_steps,
        "cpu_us_per_token": cpu_ms / num_given * 1e3,
        "phases_ms": phases.table(),
    }


def run_engine(engine: Engine, num_structured: int, num_tokens: int, temperature: float) -> float:
    """Milliseconds a token of the requests without a grammar; of all, where each has one.

    Few structured requests take part in every other step, so they get half as many tokens, and all end together.
    """
    prompts = [{"prompt_token_ids": [1 + index] * 100} for index in range(NUM_REQUESTS)]
    params = [sampling(index, num_structured, num_tokens, temperature) for index in range(NUM_REQUESTS)]
    others = [i for i, given in enumerate(params) if given.structured_outputs is None]
    if len(others) > (1 - PIPELINED_GRAMMARS) * NUM_REQUESTS:
        for i in set(range(NUM_REQUESTS)) - set(others):
            params[i].max_tokens = num_tokens // 2
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for output, given in zip(outputs, params, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "length", completion  # SCHEMA wants more items than fit
        if given.structured_outputs is not None:
            assert completion.text and '[{"name":"'.startswith(completion.text[:10]), completion.text
    return float(np.mean([_ms_a_token(outputs[i]) for i in others or range(NUM_REQUESTS)]))


def time_engine(engine: Engine, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """All numbers of structured requests in turns, so that what drifts is in each alike; the first round is not timed.

    One request among many costs some per cent, and two runs of the same batch differ by as much.
    """
    results: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        times: dict[int, list[float]] = {n: [] for n in NUM_STRUCTURED}
        for _ in range(rounds + 1):
            for n in NUM_STRUCTURED:
                times[n].append(run_engine(engine, n, num_tokens, temperature))
        for n, of_all in times.items():
            row = {"temperature": temperature, "num_structured": n, "ms_per_token": float(np.median(of_all[1:]))}
            results.append(row | {"all_ms_per_token": of_all[1:]})
    return results


def _ms_a_token(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None
    return (metrics.last_token_ts - metrics.first_token_ts) * 1e3 / (len(output.outputs[0].token_ids) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="pretend a device")
    parser.add_argument("--phases", action="store_true", help="the real device, in this process: phases of the loop")
    default = RESULTS / "step_times_qwen3-0.6b.json"
    parser.add_argument("--step-times", type=Path, default=default, help="what steps of the pretended device take")
    parser.add_argument("--dispatch-ms", type=float, default=1.0, help="what dispatching such a step takes the host")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each batch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    folder = write_tokenizer(workloads.write_config("qwen3-0.6b"))
    print(f"tokenizer made after {time.perf_counter() - start:.1f} s", flush=True)
    results: list[dict[str, Any]] = []
    engine_args = EngineArgs(
        str(folder), load_format="dummy", dtype="bfloat16", max_model_len=16384, gpu_memory_utilization=0.85
    )  # the limits of bench_throughput.py: a machine on which that has run has the programs
    if args.host or args.phases:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        core = (
            pretended_core(folder, args, draw_texts(folder, args.num_tokens)) if args.host else real_core(engine_args)
        )
        phases = Phases(core)
        for n in NUM_STRUCTURED:
            results.append(run_core(core, phases, n, args.num_tokens))
            print(f"{time.perf_counter() - start:.1f} s: {results[-1]}", flush=True)
        core.shutdown()
    else:
        engine = Engine(**vars(engine_args))
        print(f"engine ready after {time.perf_counter() - start:.1f} s", flush=True)
        results = time_engine(engine, args.num_tokens, args.rounds)
        metrics = {m.name: m.value for m in engine.get_metrics() if isinstance(m, Counter | Gauge)}
        assert metrics["jaxvllm:late_compiles"] == 0, "something compiled while serving"
        engine.shutdown()
    for index, row in enumerate(results):
        without = results[index - NUM_STRUCTURED.index(int(row["num_structured"]))]
        row["slowdown"] = row["ms_per_token"] / without["ms_per_token"] - 1
        print(json.dumps({name: round(value, 4) for name, value in row.items() if isinstance(value, float | int)}))
    if args.out:
        records.write(args.out, {"num_tokens": args.num_tokens, "results": results})


if __name__ == "__main__":
    main()
