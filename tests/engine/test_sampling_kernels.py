"""The sampler's GPU kernels, run by the interpreter or on a card, against what XLA makes of the same."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.sampling import SamplingRows, draw, draw_kernel, position_logprobs, process_logits, sample
from jaxvllm.sampling.row_kernel import group_stats
from scheduler.logprob_columns import read_logprobs
from scheduler.sampling_params import DerivedParams, SamplingParams
from tests.engine.sampling_rows import make_rows
from tests.engine.test_sampling import mixed_params
from tests.parity.test_sampling import EOS, V, random_request


@pytest.fixture(params=["mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def kernels(request):
    """The backend whose kernels run."""
    return request.param


def choose(kernels):
    interpret = kernels == "mosaic_gpu_interpret"

    def run(logits: jax.Array, rows: SamplingRows) -> jax.Array:
        (stats,) = group_stats((logits, draw_kernel.scales(rows)), interpret=interpret)
        return draw_kernel.choose(logits, stats, rows, interpret=interpret)

    return jax.jit(run)


def rounded(rng: np.random.Generator, num_rows: int, vocab: int) -> jax.Array:
    """Logits with many ties in every other row."""
    logits = rng.normal(0, 3, (num_rows, vocab))
    logits[::2] = np.round(logits[::2] * 2) / 2
    return jnp.asarray(logits, jnp.float32)


@pytest.mark.parametrize("vocab", [67, 8257, 30011], ids=str)
def test_tokens_are_those_of_xla(vocab, kernels, monkeypatch):
    """Fewer tokens than the best groups hold, two groups more, and many more with a last group that is short."""
    monkeypatch.setattr(draw, "NUM_GROUPS", vocab)  # XLA looks at all tokens
    params = mixed_params() + [
        SamplingParams(**p, seed=90 + i)  # pyright: ignore[reportArgumentType]
        for i, p in enumerate(
            [{}, {"temperature": 0.1}, {"top_k": 127}, {"top_k": 128}, {"top_k": 1000, "top_p": 0.9}, {"top_p": 0.99}]
        )
    ]
    logits = rounded(np.random.default_rng(vocab), len(params), vocab)
    logits = logits.at[3].set(-jnp.inf).at[3, 5].set(1.0).at[-1, ::2].set(-jnp.inf)
    rows = make_rows(params, output_index=np.arange(len(params)) % 5)
    assert np.array_equal(choose(kernels)(logits, rows), jax.jit(draw.choose)(logits, rows))


@pytest.mark.parametrize("vocab", [67, 8257], ids=str)
def test_a_row_that_leaves_nothing_to_draw_gives_an_id_that_exists(vocab, kernels):
    """Logits of -inf or NaN alone; infinite ones, as they come or once the temperature is applied: the first one."""
    hopeless = [SamplingParams(temperature=t, top_p=p) for t, p in ((0, 1), (0, 1), (1, 1), (1, 1), (1, 0.9))]
    fields = [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}, {"top_k": 200, "top_p": 0.9}]
    infinite = [SamplingParams(**f, temperature=0.01) for f in fields]  # pyright: ignore[reportArgumentType]
    logits = [jnp.full((5, vocab), -jnp.inf).at[1:3].set(jnp.nan).at[4].set(jnp.nan)]
    for large in (jnp.inf, 2e37):
        logits.append(jnp.zeros((5, vocab)).at[:, 3].set(1e37).at[:, jnp.array([41, 66])].set(large))
    rows = make_rows([*hopeless, *infinite, *infinite])
    for of_backend in (choose(kernels), jax.jit(draw.choose)):
        ids = np.asarray(of_backend(jnp.concatenate(logits), rows))
        assert ((ids >= 0) & (ids < vocab)).all() and ids[0] == ids[3] == 0
        assert ids[5:].tolist() == [41] * 10


@pytest.mark.parametrize("vocab", [5003], ids=str)
def test_logprobs_are_those_of_xla(vocab, kernels):
    rng = np.random.default_rng(vocab)
    logits = rounded(rng, 7, vocab)
    targets, wanted = jnp.asarray(rng.integers(0, vocab, 7)), np.array([1, 3, 21, 21, 6, 2, 1])
    packed = [
        np.asarray(position_logprobs(logits, targets, jnp.asarray(wanted), backend))
        for backend in ("reference", kernels)
    ]
    for row, count in enumerate(wanted.tolist()):
        expected, got = (read_logprobs(array[row], count) for array in packed)
        assert (got.token_ids, got.rank) == (expected.token_ids, expected.rank)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-6)


def test_listed_logprobs_are_those_of_xla(kernels):
    listed = [[4, 66, 0], None, list(range(60, 20, -1))]
    params = [SamplingParams(temperature=0.0, logprob_token_ids=ids, logprobs=None if ids else 3) for ids in listed]
    logits, rows = rounded(np.random.default_rng(1), 3, 67), make_rows(params)
    run = jax.jit(sample, static_argnums=3)
    expected, got = (np.asarray(run(logits, logits, rows, backend)[1]) for backend in ("reference", kernels))
    for row, ids in enumerate(listed):
        a, b = (read_logprobs(array[row], 1 + len(ids or [0] * 3), ids) for array in (expected, got))
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-6)


def think_request(rng: random.Random) -> tuple[SamplingParams, tuple[list[int], list[int]]]:
    """A thinking that may have been opened, closed, or be about to be closed by its budget."""
    params = SamplingParams(thinking_token_budget=rng.randrange(6), min_tokens=rng.randrange(2))
    params.derived = DerivedParams(think_start=[7, 8], think_end=[9, 10, 11])
    outputs = [rng.randrange(20, 30) for _ in range(rng.randrange(1500))]
    tail = [7, 8] + [rng.randrange(20, 30) for _ in range(rng.randrange(7))] + [9, 10, 11][: rng.randrange(4)]
    return params, ([7, 8, 9, 10, 11], outputs + tail)


def test_processed_logits_are_those_of_xla(kernels):
    """Every field that changes logits, rows whose token nobody wants, and one that asks for nothing."""
    vocab, num_random = (V, 8) if kernels == "mosaic_gpu_interpret" else (151_937, 170)
    rng, arrays = random.Random(6), np.random.default_rng(6)
    made = [random_request(rng) for _ in range(num_random)] + [think_request(rng) for _ in range(num_random // 2)]
    made += [(SamplingParams(), ([1, 2], [3]))]
    params, histories = zip(*made, strict=True)
    n = len(made)
    needs_sample = arrays.random(n) < 0.9
    needs_sample[-1] = True
    rows = make_rows(list(params), eos=EOS, histories=list(histories), needs_sample=needs_sample)
    rows = replace(rows, rows=jnp.where(rows.needs_sample, rows.rows, n + 2))  # as a pad's
    logits = rounded(arrays, n, vocab)
    process = jax.jit(process_logits, static_argnums=(2, 3))
    expected, got = (np.asarray(process(logits, rows, (), backend))[needs_sample] for backend in ("reference", kernels))
    assert np.array_equal(np.isfinite(got), np.isfinite(expected))
    finite = np.isfinite(got)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-6, atol=1e-6)
    assert (got == 1e30).any(), "some thinking was over its budget"
    assert np.array_equal(got[-1], logits[-1]), "a row that asks for nothing keeps its logits"


def test_on_a_gpu_the_sampler_has_no_condition_and_no_loop_outside_its_kernels():
    """XLA prepares every branch each time a program runs, so conditions cost the host time."""
    logits = jnp.zeros((5, 30011))
    rows = make_rows([SamplingParams(temperature=0.5, presence_penalty=1.0)] * 5)
    for function, num_kernels in (
        (lambda logits, rows: sample(logits, logits, rows, "mosaic_gpu"), 3),
        (lambda logits, rows: process_logits(logits, rows, (), "mosaic_gpu"), 1),
    ):
        text = jax.jit(function).trace(logits, rows).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == num_kernels
        assert not any(word in text for word in ("stablehlo.case", "stablehlo.if", "stablehlo.while", "stablehlo.sort"))
