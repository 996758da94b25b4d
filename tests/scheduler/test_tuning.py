"""Tuned buckets: the best there are, within the budget, covering every legal step."""

from itertools import combinations

import numpy as np
import pytest

from scheduler.buckets import BucketKey, StepShape, powers_of_two
from scheduler.cost_model import CostModel, StepSample, fit
from scheduler.tuning import TuningOptions, _choose, tune


def cost_table(ms_per_row: float = 0.001) -> CostModel:
    table = {BucketKey("decode", T, T): 1.1 + 0.004 * T for T in (8, 64, 256)}
    for T in (64, 512, 4096):
        for R in {min(T, 16), min(T, 256)}:
            table[BucketKey("mixed", T, R)] = 0.9 + 0.003 * T + ms_per_row * R
    return CostModel(table)


def steps_of(seed: int, max_reqs: int = 256) -> dict[StepShape, int]:
    rng = np.random.default_rng(seed)
    steps = {}
    for _ in range(300):
        num_reqs = int(rng.integers(1, max_reqs + 1))
        steps[StepShape("decode", num_reqs, num_reqs)] = int(rng.integers(1, 50))
        num_tokens = int(np.clip(rng.lognormal(6.5, 0.8), num_reqs, 4096))
        steps[StepShape("mixed", num_tokens, num_reqs)] = int(rng.integers(1, 9))
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_the_buckets_chosen_cost_hardly_more_than_the_best_choice_there_is(seed: int):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 60, (14, 2))  # T and R of 14 candidates; the last one holds everything
    sizes[-1] = 60
    demands = rng.integers(1, 60, (40, 2))
    holds = (sizes >= demands[:, None]).all(axis=2)
    charges = np.where(holds, 5 + sizes[:, 0] + 0.3 * sizes[:, 1], np.inf) * rng.integers(1, 9, (40, 1))
    for budget in (1, 2, 4, 6):
        chosen = _choose(charges, budget, always=13)
        assert chosen[0] == 13 and len(set(chosen)) == len(chosen) <= budget
        total = charges[:, chosen].min(axis=1).sum()
        others = combinations(range(13), budget - 1)
        assert total <= 1.02 * min(charges[:, [13, *other]].min(axis=1).sum() for other in others)


@pytest.mark.parametrize("budget", [2, 3, 5, 13, 24])
def test_a_tuned_policy_keeps_to_its_budget_and_covers_every_legal_step(budget):
    policy = tune(steps_of(1), cost_table(), 256, 4096, TuningOptions(max_programs=budget))
    assert 2 <= len(policy.keys()) <= budget
    for num_tokens in (1, 2, 31, 33, 255, 257, 1000, 4095, 4096):
        for num_reqs in {1, min(num_tokens, 17), min(num_tokens, 256)}:
            key = policy.select("mixed", num_tokens, num_reqs)
            assert num_tokens <= key.T and num_reqs <= key.R
        if num_tokens <= 256:
            assert num_tokens <= policy.select("decode", num_tokens, num_tokens).T


@pytest.mark.parametrize("ms_per_row", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("max_reqs", [12, 256])
def test_a_tuned_policy_costs_less_than_powers_of_two_with_as_many_programs(ms_per_row, max_reqs):
    steps, cost = steps_of(2, max_reqs), cost_table(ms_per_row)

    def total(policy) -> float:
        return sum(cost.step_ms(policy.select(*step), 0) * count for step, count in steps.items())

    base = powers_of_two(256, 4096, min_decode_size=8, min_mixed_size=64)
    tuned = tune(steps, cost, 256, 4096, TuningOptions(max_programs=len(base.keys())))
    assert total(tuned) < 0.95 * total(base)
    every = [step for step, count in steps.items() for _ in range(count)]
    assert tuned.padding_waste(every).tokens < 0.7 * base.padding_waste(every).tokens


def test_more_programs_never_cost_more():
    steps, cost = steps_of(3), cost_table()
    totals = []
    for budget in (4, 8, 16, 32):
        policy = tune(steps, cost, 256, 4096, TuningOptions(max_programs=budget, prior_share=0.0))
        totals.append(sum(cost.step_ms(policy.select(*step), 0) * count for step, count in steps.items()))
    assert totals == sorted(totals, reverse=True)


def test_few_rows_are_used_where_rows_are_dear_and_not_where_they_are_free():
    steps = {step: n for step, n in steps_of(4, max_reqs=10).items() if step.kind == "mixed"}
    rows = {ms: {R for _, R in tune(steps, cost_table(ms), 256, 4096).mixed_sizes if R < 64} for ms in (0.0, 0.02)}
    assert rows[0.02] == {16} and len(rows[0.0]) <= len(rows[0.02])


def test_no_state_that_the_trace_does_not_have_costs_many_times_more_than_it_must():
    """As a burst of requests would bring: with everything left to the largest bucket, its steps would take 12 times as
    long."""
    steps = {StepShape("mixed", 1000 + n, 5): 50 for n in range(20)} | {StepShape("decode", 5, 5): 1000}
    cost = cost_table()

    def worst(prior_share: float) -> float:
        policy = tune(steps, cost, 256, 4096, TuningOptions(max_programs=16, prior_share=prior_share))
        ratios = []
        for num_tokens in (40, 100, 250, 300, 700, 1500, 3000):
            for num_reqs in (n for n in (1, 20, 60, 130, 250) if n <= num_tokens):
                best = cost.step_ms(BucketKey("mixed", num_tokens, num_reqs), 0)
                ratios.append(cost.step_ms(policy.select("mixed", num_tokens, num_reqs), 0) / best)
            if num_tokens <= 256:
                best = cost.step_ms(BucketKey("decode", num_tokens, num_tokens), 0)
                ratios.append(cost.step_ms(policy.select("decode", num_tokens, num_tokens), 0) / best)
        return max(ratios)

    assert worst(0.0) > 5
    assert worst(0.03) < 2.5


def test_decode_steps_share_mixed_buckets_where_that_saves_a_program():
    steps = {StepShape("decode", 9, 9): 1000, StepShape("decode", 250, 250): 1, StepShape("mixed", 256, 256): 100}
    policy = tune(steps, cost_table(), 256, 4096, TuningOptions(max_programs=3, prior_share=0.0))
    assert policy.decode_sizes == (16,) and policy.select("decode", 250, 250) == BucketKey("mixed", 256, 256)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="max_programs=1 must be at least 2"):
        tune(steps_of(1), cost_table(), 256, 4096, TuningOptions(max_programs=1))
    with pytest.raises(ValueError, match="no steps"):
        tune({}, cost_table(), 256, 4096)


def test_the_cost_of_rows_is_told_from_the_cost_of_tokens():
    keys = [BucketKey("mixed", T, R) for T in (64, 512, 2048) for R in (16, 64)]
    cost = fit(StepSample(key, 0, 1 + 0.002 * key.T + 0.01 * key.R) for key in keys)
    assert cost.step_ms(BucketKey("mixed", 1000, 32), 0) == pytest.approx(1 + 2.0 + 0.32)
    assert cost.step_ms(BucketKey("mixed", 512, 64), 0) == pytest.approx(1 + 1.024 + 0.64)


def test_the_cost_of_rows_is_found_between_the_tokens_of_two_other_buckets():
    few = [BucketKey("mixed", T, 16) for T in (64, 256, 1024)]
    many = [BucketKey("mixed", T, 128) for T in (300, 700)]
    cost = fit(StepSample(key, 0, 1 + 0.002 * key.T + 0.01 * key.R) for key in [*few, *many])
    assert cost.step_ms(BucketKey("mixed", 500, 64), 0) == pytest.approx(1 + 1.0 + 0.64)
