"""Drive checked schedulers with random operations and print how often each kind of operation ran.

    python scripts/fuzz_scheduler.py --ops 1000000 --seed 0

Every operation checks references, free list, prefix cache, slots and outputs (scheduler.verify). A failure names the
seed of its episode: `--seed SEED --ops 1` runs that episode alone.
"""

import argparse
import logging
import random
import time
from collections import Counter

from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.verify import EOS_TOKEN_ID, VOCAB_SIZE, CheckedScheduler

OPS_PER_EPISODE = 400
WEIGHTS = {
    "add": 10,
    "add_children": 2,
    "add_salted": 3,
    "add_impossible": 2,
    "abort": 3,
    "abort_unknown": 2,
    "reset_prefix_cache": 2,
    "schedule": 40,
    "update": 36,
}


class Episode:
    """One scheduler with a random configuration and a tiny pool, driven by random operations until it is drained."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 7])
        num_blocks = rng.randint(4, 24)
        max_num_seqs = rng.randint(1, 6)
        max_model_len = rng.choice([16, 37, 64])
        is_chunked = rng.random() < 0.85
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.choice([max_num_seqs, 8, 13, 40]) if is_chunked else max_model_len,
            max_model_len=max_model_len,
            policy=rng.choice(["fcfs", "priority"]),
            enable_chunked_prefill=is_chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 5]),
            reserve_full_isl=rng.random() < 0.3,
            async_scheduling=rng.random() < 0.6,
        )
        self.cache_config = CacheConfig(block_size, num_blocks, rng.random() < 0.85)
        self.checked = CheckedScheduler(self.config, self.cache_config)
        if self.config.async_scheduling:
            self.checked.max_in_flight = 2 + seed % 2
        self.num_slots = (num_blocks - 1) * block_size
        self.templates = [self._random_tokens(40) for _ in range(3)]
        self.counts: Counter[str] = Counter()
        self.num_added = 0

    def run(self) -> Counter[str]:
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        for _ in range(OPS_PER_EPISODE):
            kind = self.rng.choices(kinds, weights)[0]
            if getattr(self, f"_{kind}")():
                self.counts[kind] += 1
        self.checked.drain()
        assert self.checked.scheduler.reset_prefix_cache()
        stats = self.checked.scheduler.make_stats()
        self.counts["(pre-emption)"] = stats.num_preemptions
        self.counts["(prefix hit tokens)"] = stats.prefix_cache_hits
        return self.counts

    def _random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB_SIZE) for _ in range(count)]

    def _max_prompt(self) -> int:
        return min(self.config.max_model_len, self.num_slots) - 1

    def _add_request(self, prompt: list[int], salt: str | None = None) -> None:
        rng = self.rng
        room = min(self.config.max_model_len, self.num_slots + 1) - len(prompt)
        max_tokens = rng.choice([1, 2, 5, 20, None])
        request = Request(
            f"r{self.num_added}",
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, min(3, room, max_tokens or room)]),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=[5] if rng.random() < 0.2 else None,
            ),
            eos_token_id=EOS_TOKEN_ID,
            arrival_time=float(self.num_added if rng.random() < 0.8 else rng.randrange(self.num_added + 1)),
            priority=rng.randrange(3),
            cache_salt=salt,
        )
        self.num_added += 1
        self.checked.add(request)

    def _random_prompt(self) -> list[int]:
        shared = self.rng.choice(self.templates)[: self.rng.randint(0, 40)]
        prompt = shared + self._random_tokens(self.rng.randint(0, 8))
        return prompt[: self._max_prompt()] or [self.rng.randrange(3, VOCAB_SIZE)]

    def _is_crowded(self) -> bool:
        return len(self.checked.scheduler.requests) >= 12

    def _add(self) -> bool:
        if self._is_crowded():
            return False
        self._add_request(self._random_prompt())
        return True

    def _add_children(self) -> bool:
        if self._is_crowded():
            return False
        prompt = self._random_prompt()
        for _ in range(self.rng.randint(2, 4)):
            self._add_request(prompt)
        return True

    def _add_salted(self) -> bool:
        if self._is_crowded():
            return False
        self._add_request(self._random_prompt(), salt=self.rng.choice(["team-a", "team-b"]))
        return True

    def _add_impossible(self) -> bool:
        try:
            self._add_request(self._random_tokens(self._max_prompt() + 1))
        except ValueError:
            self.checked.check()
            return True
        raise AssertionError("a prompt that can never fit was taken in")

    def _abort(self) -> bool:
        live = list(self.checked.scheduler.requests)
        if not live:
            return False
        self.checked.abort(self.rng.choices(live, k=self.rng.randint(1, 2)))
        return True

    def _abort_unknown(self) -> bool:
        self.checked.abort([f"r{self.rng.randrange(self.num_added + 1)}x", "nobody"])
        return True

    def _reset_prefix_cache(self) -> bool:
        holds_nothing = not self.checked.scheduler.running
        assert self.checked.scheduler.reset_prefix_cache() == holds_nothing
        self.checked.check()
        return True

    def _schedule(self) -> bool:
        if len(self.checked.in_flight) == self.checked.max_in_flight:
            return False
        self.checked.schedule()
        return True

    def _update(self) -> bool:
        if not self.checked.in_flight:
            return False
        self.counts["(late update)"] += len(self.checked.in_flight) > 1
        self.checked.update()
        return True


def fuzz(num_ops: int, seed: int) -> Counter[str]:
    """Run whole episodes until num_ops operations have run; returns how often each kind ran."""
    counts: Counter[str] = Counter()
    while sum(count for kind, count in counts.items() if kind in WEIGHTS) < num_ops:
        try:
            counts += Episode(seed).run()
        except Exception as error:
            error.add_note(f"episode seed {seed}")
            raise
        seed += 1
    return counts


def print_histogram(counts: Counter[str], seconds: float) -> None:
    """Print each kind of operation with its share, and pre-emptions as a share of the schedules."""
    num_ops = sum(counts[kind] for kind in WEIGHTS)
    for kind in WEIGHTS:
        share = counts[kind] / num_ops
        print(f"{kind:22}{counts[kind]:>10,}{share:>8.1%}  {'#' * round(share * 100)}")
    preempted = counts["(pre-emption)"]
    print(f"{'pre-emptions':22}{preempted:>10,}{preempted / counts['schedule']:>8.1%}  of schedules")
    late = counts["(late update)"]
    print(f"{'late updates':22}{late:>10,}{late / num_ops:>8.1%}  after the next schedule")
    print(f"{'prefix hit tokens':22}{counts['(prefix hit tokens)']:>10,}")
    print(f"{num_ops:,} operations, all checks passed, {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # tiny pools are filled on purpose, thousands of times
    start = time.perf_counter()
    counts = fuzz(args.ops, args.seed)
    print_histogram(counts, time.perf_counter() - start)


if __name__ == "__main__":
    main()
