"""The sampler against PyTorch: the processing order, the filters and the draws, over random logits and histories."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxvllm.sampling import draw, kept_tokens, position_logprobs, process_logits, sample
from scheduler.logprob_columns import read_logprobs
from scheduler.records import RecordField
from scheduler.sampling_params import DerivedParams, SamplingParams
from tests.engine.sampling_rows import make_rows, repeat_row

V, NUM_ROWS, EOS = 509, 40, 17


def random_request(rng: random.Random) -> tuple[SamplingParams, tuple[list[int], list[int]]]:
    """Parameters of every kind, and a history that makes them matter: few distinct tokens, bad words half complete."""
    prompt = [rng.randrange(60) for _ in range(rng.randint(1, 700))]
    outputs = [rng.randrange(60) for _ in range(rng.choice([0, 1, rng.randint(2, 40), rng.randint(500, 1100)]))]

    def maybe(value, default):
        return value if rng.random() < 0.5 else default

    params = SamplingParams(
        seed=rng.randrange(2**40),
        temperature=maybe(rng.uniform(0.2, 2), rng.choice([0.0, 1.0])),
        top_k=maybe(rng.randint(1, 60), 0),
        top_p=maybe(rng.uniform(0.05, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-0.1, 0.1), 0.0),
        min_tokens=maybe(rng.randint(0, 60), 0),
        max_tokens=None,
        stop_token_ids=rng.sample(range(V), rng.randint(0, 20)),
        logit_bias=maybe({i: rng.uniform(-8, 8) for i in rng.sample(range(80), rng.randint(1, 40))}, None),
        allowed_token_ids=maybe(rng.sample(range(V), rng.randint(1, V)), None),
    )
    if rng.random() < 0.5:
        words = [[rng.randrange(60) for _ in range(rng.randint(1, 4))] for _ in range(20)]
        words += [[*outputs[len(outputs) - k :], rng.randrange(V)] for k in range(4) if k <= len(outputs)]
        params.derived = DerivedParams(bad_words=words)
    return params, (prompt, outputs)


def processed(logits: np.ndarray, p: SamplingParams, history: tuple[list[int], list[int]]) -> torch.Tensor:
    """f64[V] of one row, field by field in vLLM's order."""
    x = torch.tensor(logits, dtype=torch.float64)
    prompt, outputs = history
    if p.allowed_token_ids:
        is_allowed = torch.zeros(V, dtype=torch.bool)
        is_allowed[p.allowed_token_ids] = True
        x[~is_allowed] = -torch.inf
    for word in p.derived.bad_words if p.derived else ():
        prefix = word[:-1]
        if prefix == outputs[len(outputs) - len(prefix) :] and len(prefix) <= len(outputs):
            x[word[-1]] = -torch.inf
    if len(outputs) < p.min_tokens:
        x[[*(p.stop_token_ids or ()), EOS]] = -torch.inf
    for token_id, bias in (p.logit_bias or {}).items():
        x[token_id] += np.float32(bias)
    counts = torch.bincount(torch.tensor(outputs, dtype=torch.int64), minlength=V)
    seen = (torch.bincount(torch.tensor(prompt + outputs), minlength=V) > 0) if prompt + outputs else counts > 0
    penalty = float(np.float32(p.repetition_penalty))
    x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    x = x - float(np.float32(p.frequency_penalty)) * counts
    return x - float(np.float32(p.presence_penalty)) * (counts > 0)


def distribution(x: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What min_p, top_k and top_p leave of processed logits; the probabilities; which tokens lie on no cut."""
    probs = torch.softmax(x / float(np.float32(p.temperature)), 0)
    is_clear = torch.ones(V, dtype=torch.bool)
    bound = float(np.float32(p.min_p)) * probs.max()
    kept = probs >= bound
    is_clear &= (probs - bound).abs() > 1e-6
    if 0 < p.top_k < V:
        kth = probs.sort(descending=True).values[p.top_k - 1]
        is_clear &= ((probs - kth).abs() > 1e-6) | (probs == kth)
        kept &= probs >= kth
    if p.top_p < 1:
        share = torch.where(kept, probs, 0) / probs[kept].sum()
        above = torch.stack([share[share > value].sum() for value in share])
        top_p = float(np.float32(p.top_p))
        is_clear &= (above - top_p).abs() > 1e-6
        kept &= above < top_p
    return kept, torch.where(kept, probs, 0) / probs[kept].sum(), is_clear


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(3)
    made = [random_request(rng) for _ in range(NUM_ROWS)]
    logits = np.random.default_rng(4).normal(0, 3, (NUM_ROWS, V)).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 2) / 2  # ties
    params, histories = zip(*made, strict=True)
    return list(params), list(histories), logits


@pytest.fixture(scope="module", params=["reference", "mosaic_gpu_interpret"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def process(backend):
    return jax.jit(lambda logits, rows: process_logits(logits, rows, (), backend))


def test_processed_logits_probabilities_and_masks_are_pytorch_s(requests, process):
    params, histories, logits = requests
    rows = make_rows(params, eos=EOS, histories=histories)
    got = np.asarray(process(jnp.asarray(logits), rows))
    temperature = np.where(rows.is_greedy, 1, rows.floats(RecordField.TEMPERATURE))[:, None].astype(np.float32)
    kept = np.asarray(jax.jit(kept_tokens)(jnp.asarray(got / temperature), rows))
    num_compared = 0
    for i, p in enumerate(params):
        x = processed(logits[i], p, histories[i])
        finite = torch.isfinite(x).numpy()
        assert np.array_equal(np.isfinite(got[i]), finite), p
        np.testing.assert_allclose(got[i][finite], x.numpy()[finite], rtol=1e-5, atol=1e-5, err_msg=str(p))
        if p.is_greedy:
            assert got[i].argmax() == x.argmax()
            continue
        expected, probs, is_clear = distribution(x, p)
        is_clear = is_clear.numpy() & finite
        assert np.array_equal(kept[i][is_clear], expected.numpy()[is_clear]), p
        num_compared += is_clear.sum()
        if np.array_equal(kept[i] & finite, expected.numpy() & finite):
            weights = np.where(kept[i], np.exp(got[i] / temperature[i] - (got[i] / temperature[i]).max()), 0)
            np.testing.assert_allclose(weights / weights.sum(), probs.numpy(), atol=1e-5)
    assert num_compared > 3000


def test_greedy_ids_are_pytorch_s_and_a_row_without_wishes_is_bit_equal(requests, process, backend):
    params, histories, logits = requests
    plain = [SamplingParams(temperature=0.0)] * NUM_ROWS
    mixed = [a if i % 2 else b for i, (a, b) in enumerate(zip(params, plain, strict=True))]
    rows = make_rows(mixed, eos=EOS, histories=histories)
    got = process(jnp.asarray(logits), rows)
    assert np.array_equal(np.asarray(got)[::2].view(np.int32), logits[::2].view(np.int32))
    ids, _ = jax.jit(sample, static_argnums=3)(jnp.asarray(logits), got, rows, backend)
    for i, p in enumerate(mixed):
        if p.is_greedy:
            assert int(ids[i]) == int(processed(logits[i], p, histories[i]).argmax())


@pytest.mark.parametrize("num_groups", [128, 1], ids=["all tokens", "best groups"])
def test_frequencies_of_100000_draws_pass_a_chi_square_test(num_groups, monkeypatch):
    monkeypatch.setattr(draw, "NUM_GROUPS", num_groups)
    vocab, num_draws = 131, 100_000  # three groups
    logits = np.random.default_rng(8).normal(0, 1.5, vocab).astype(np.float32)
    logits[5] = logits[6]
    choose = jax.jit(lambda logits, rows: draw.choose(logits, rows))
    every = jnp.broadcast_to(logits, (num_draws, vocab))
    filters = {"top_k": 20}, {"top_p": 0.9, "temperature": 0.7}, {"min_p": 0.05, "top_k": 30, "top_p": 0.95}
    for p in ({"temperature": 1.3}, *filters):
        params = SamplingParams(seed=2024, **p)
        ids = np.asarray(choose(every, repeat_row(params, num_draws)))
        padded = torch.full((V,), -torch.inf, dtype=torch.float64)
        padded[:vocab] = torch.tensor(logits, dtype=torch.float64)
        probs = distribution(padded, params)[1].numpy()[:vocab]
        counts = np.bincount(ids, minlength=vocab)
        assert (counts[probs == 0] == 0).all()
        expected = probs[probs > 0] * num_draws
        chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum()
        freedom = len(expected) - 1
        assert chi_square < freedom + 3.1 * np.sqrt(2 * freedom) + 5, (p, chi_square, freedom)  # about once in 1000


@pytest.mark.parametrize("vocab", [67, 3001])
def test_logprobs_ranks_and_order_are_pytorch_s_log_softmax(vocab, backend):
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 4, (7, vocab)).astype(np.float32)
    logits[3] = np.round(logits[3])  # ties: the lowest id first
    targets = rng.integers(0, vocab, 7)
    logits[2], logits[2, [0, 5]], targets[2] = -np.inf, [1.0, 2.0], 0  # as a grammar leaves them: no token comes twice
    wanted = np.array([1, 3, 21, 21, 6, 2, 1])
    args = (jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(wanted))
    packed = np.asarray(position_logprobs(*args, backend=backend))
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 1).numpy()
    for i in range(7):
        got = read_logprobs(packed[i], int(wanted[i]))
        top = np.argsort(-logits[i], kind="stable")[: wanted[i] - 1]
        assert got.token_ids == [targets[i], *top]
        assert got.rank == (logits[i] >= logits[i][targets[i]]).sum()
        np.testing.assert_allclose(got.logprobs, expected[i][got.token_ids], atol=1e-5)
