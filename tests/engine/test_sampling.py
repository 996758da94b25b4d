from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.sampling import draw as draw_module
from jaxvllm.sampling import gumbel_noise, kept_tokens
from scheduler.records import RecordField
from scheduler.sampling_params import SamplingParams
from tests.engine.sampling_rows import make_rows, process_and_sample, repeat_row

V = 257


def reference(logits: np.ndarray, p: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Kept tokens and probabilities in float64, by sorting: temperature, min_p, top_k, top_p; ties at a cut stay."""
    x = logits.astype(np.float64) / np.float64(np.float32(p.temperature))
    probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    kept = probs >= np.float64(np.float32(p.min_p)) * probs.max()
    if 0 < p.top_k < len(x):
        kept &= x >= np.sort(x)[-p.top_k]
    if p.top_p < 1:
        share = np.where(kept, probs, 0) / probs[kept].sum()
        above = np.array([share[x > value].sum() for value in x])
        kept &= above < np.float64(np.float32(p.top_p))
    return kept, np.where(kept, probs, 0) / probs[kept].sum()


def mixed_params() -> list[SamplingParams]:
    rng = np.random.default_rng(1)
    edge = [
        {"top_k": V + 5}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"min_p": 0.2, "top_k": 3, "top_p": 0.99},
        {"temperature": 0.01}, {"temperature": 0.0}, {"top_p": 0.9999}, {"top_k": V}, {"top_k": V - 1},
    ]  # fmt: skip
    random = [
        {
            "temperature": float(rng.uniform(0.3, 2)),
            "top_k": int(rng.integers(0, 60)),
            "top_p": float(rng.uniform(0.05, 1)),
            "min_p": float(rng.choice([0, rng.uniform(0, 0.3)])),
        }
        for _ in range(30)
    ]
    return [SamplingParams(seed=i, **p) for i, p in enumerate(edge + random)]


def mixed_logits(num_rows: int, quantum: float) -> np.ndarray:
    logits = np.random.default_rng(2).normal(0, 3, (num_rows, V)) - 2
    return (np.round(logits / quantum) * quantum if quantum else logits).astype(np.float32)


@pytest.mark.parametrize("quantum", [0.0, 0.5], ids=["distinct", "tied"])
def test_the_filters_keep_what_sorting_in_float64_keeps(quantum):
    params = mixed_params()
    logits = mixed_logits(len(params), quantum)
    rows = make_rows(params)
    temperature = rows.floats(RecordField.TEMPERATURE)
    scaled = logits / np.where(temperature <= 0, 1, temperature)[:, None].astype(np.float32)
    kept = np.asarray(jax.jit(kept_tokens)(jnp.asarray(scaled), rows))
    for i, p in enumerate(params):
        if not p.is_greedy:
            assert np.array_equal(kept[i], reference(logits[i], p)[0]), p
    assert kept[0].all() and kept[8].all() and (quantum or kept[9].sum() == V - 1)
    assert np.array_equal(kept[1], logits[1] == logits[1].max()) and np.array_equal(
        kept[2], logits[2] == logits[2].max()
    )


def test_a_long_tail_of_unlikely_tokens_still_counts_in_top_p():
    logits = np.full(2**17, -19.0, np.float32)  # 131072 tokens that together weigh 7e-4 of the first
    logits[7] = 0.0
    for top_p, whole in ((0.999, False), (0.9999, True)):
        kept = jax.jit(kept_tokens)(jnp.asarray(logits)[None], make_rows([SamplingParams(top_p=top_p)]))
        assert int(kept.sum()) == (2**17 if whole else 1)


def test_draws_have_the_probabilities_of_the_kept_tokens():
    logits = np.array([1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 1.5, 1.0, -1.0, 0.7, 0.1], np.float32)
    num_draws = 6000
    draw = jax.jit(lambda logits, rows: process_and_sample(logits, rows)[0])
    for p in ({}, {"temperature": 0.6, "top_k": 6}, {"top_p": 0.8, "min_p": 0.05, "temperature": 1.7}):
        params = SamplingParams(seed=12345, **p)
        rows = repeat_row(params, num_draws)
        ids = np.asarray(draw(jnp.broadcast_to(logits, (num_draws, len(logits))), rows))
        _, probs = reference(logits, params)
        counts = np.bincount(ids, minlength=len(logits))
        assert (counts[probs == 0] == 0).all()
        expected = probs[probs > 0] * num_draws
        chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum()
        assert chi_square < 30, (p, chi_square)  # at most 10 degrees of freedom: exceeded once in 1000 sets of draws


@pytest.mark.parametrize("num_groups", [128, 2], ids=["all tokens", "best groups"])
def test_a_row_s_token_is_the_same_in_100_random_batches(num_groups, monkeypatch):
    """Same logits, history, parameters, seed and output index: other requests, row and bucket do not matter."""
    monkeypatch.setattr(draw_module, "NUM_GROUPS", num_groups)
    rng = np.random.default_rng(5)
    params = [*mixed_params(), *(SamplingParams(seed=90 + i, repetition_penalty=1.3, top_k=9) for i in range(4))]
    params += [SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={3: 5.0}, logprobs=2)]
    n = len(params)
    logits = mixed_logits(n, 0.5)
    histories = [(rng.integers(0, V, 10).tolist(), rng.integers(0, V, i % 7).tolist()) for i in range(n)]
    logits[::5] = logits[::5][:, ::-1]
    draw = jax.jit(lambda logits, rows: process_and_sample(logits, rows)[0])
    whole = make_rows(params, histories=histories)
    expected = np.asarray(draw(jnp.asarray(logits), whole))
    for size, num_mixes in ((n, 50), (5, 50)):
        for _ in range(num_mixes):
            chosen = rng.permutation(n)[:size]
            pick = partial(jnp.take, indices=jnp.asarray(chosen), axis=0)
            needs = rng.random(size) < 0.8
            rows = replace(
                whole, records=pick(whole.records), seq_lens=pick(whole.seq_lens), rows=pick(whole.rows),
                needs_sample=jnp.asarray(needs),
            )  # fmt: skip
            got = np.asarray(draw(jnp.asarray(logits[chosen]), rows))
            assert np.array_equal(got[needs], expected[chosen][needs]), (size, chosen)


def test_noise_changes_with_either_word_of_the_seed_and_with_the_index():
    seeds = [5, 6, 5 + 2**32, -5, 2**63 + 5]
    draw = jax.jit(lambda rows, n: gumbel_noise(rows, jnp.arange(n)), static_argnums=1)
    noise = np.asarray(draw(make_rows([SamplingParams(seed=s) for s in seeds]), 31))
    later = np.asarray(draw(make_rows([SamplingParams(seed=s) for s in seeds], 1), 31))
    assert len(np.unique(np.concatenate([noise, later])[:, 0])) == 10 and np.isfinite(noise).all()


def test_eos_and_stop_ids_are_masked_until_min_tokens_for_greedy_and_random_rows():
    logits = np.zeros((4, V), np.float32)
    logits[:, [3, 5, 8, 11]] = [40.0, 30.0, 20.0, 10.0]
    greedy = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[5, 300, 8])
    random = SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=[5], ignore_eos=True)
    params = [greedy, random, greedy, SamplingParams(temperature=0.0)]
    ids, _ = process_and_sample(jnp.asarray(logits), make_rows(params, [1, 0, 2, 0], eos=3))
    assert ids.tolist() == [11, 8, 3, 3]
