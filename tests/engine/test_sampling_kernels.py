"""The sampler's GPU kernels, run by the interpreter, against what XLA makes of the same on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.sampling import draw, draw_kernel, position_logprobs, sample
from scheduler.logprob_columns import read_logprobs
from scheduler.sampling_params import SamplingParams
from tests.engine.sampling_rows import make_rows
from tests.engine.test_sampling import mixed_params

INTERPRET = "mosaic_gpu_interpret"


def rounded(rng: np.random.Generator, num_rows: int, vocab: int) -> jax.Array:
    """Logits with many ties in every other row."""
    logits = rng.normal(0, 3, (num_rows, vocab))
    logits[::2] = np.round(logits[::2] * 2) / 2
    return jnp.asarray(logits, jnp.float32)


@pytest.mark.parametrize("vocab", [67, 8257, 30011], ids=str)
def test_tokens_are_those_of_xla(vocab):
    """Fewer tokens than the best groups hold, two groups more, and many more with a last group that is short."""
    params = mixed_params() + [
        SamplingParams(**p, seed=90 + i)  # pyright: ignore[reportArgumentType]
        for i, p in enumerate(
            [{}, {"temperature": 0.1}, {"top_k": 127}, {"top_k": 128}, {"top_k": 1000, "top_p": 0.9}, {"top_p": 0.99}]
        )
    ]
    logits = rounded(np.random.default_rng(vocab), len(params), vocab)
    logits = logits.at[3].set(-jnp.inf).at[3, 5].set(1.0).at[-1, ::2].set(-jnp.inf)
    rows = make_rows(params, output_index=np.arange(len(params)) % 5)
    got = jax.jit(partial(draw_kernel.choose, interpret=True))(logits, rows)
    assert np.array_equal(got, jax.jit(draw.choose)(logits, rows))


def test_a_row_without_hope_gives_an_id_that_exists():
    logits = jnp.full((4, 67), -jnp.inf).at[1:3].set(jnp.nan)
    rows = make_rows([SamplingParams(temperature=t) for t in (0.0, 0.0, 1.0, 1.0)])
    ids = np.asarray(draw_kernel.choose(logits, rows, interpret=True))
    assert ((ids >= 0) & (ids < 67)).all() and ids[0] == ids[3] == 0


@pytest.mark.parametrize("vocab", [5003], ids=str)
def test_logprobs_are_those_of_xla(vocab):
    rng = np.random.default_rng(vocab)
    logits = rounded(rng, 7, vocab)
    targets, wanted = jnp.asarray(rng.integers(0, vocab, 7)), np.array([1, 3, 21, 21, 6, 2, 1])
    packed = [
        np.asarray(position_logprobs(logits, targets, jnp.asarray(wanted), backend))
        for backend in ("reference", INTERPRET)
    ]
    for row, count in enumerate(wanted.tolist()):
        expected, got = (read_logprobs(array[row], count) for array in packed)
        assert (got.token_ids, got.rank) == (expected.token_ids, expected.rank)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-6)


def test_listed_logprobs_are_those_of_xla():
    listed = [[4, 66, 0], None, list(range(60, 20, -1))]
    params = [SamplingParams(temperature=0.0, logprob_token_ids=ids, logprobs=None if ids else 3) for ids in listed]
    logits, rows = rounded(np.random.default_rng(1), 3, 67), make_rows(params)
    run = jax.jit(sample, static_argnums=3)
    expected, got = (np.asarray(run(logits, logits, rows, backend)[1]) for backend in ("reference", INTERPRET))
    for row, ids in enumerate(listed):
        a, b = (read_logprobs(array[row], 1 + len(ids or [0] * 3), ids) for array in (expected, got))
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-6)


def test_on_a_gpu_the_sampler_has_no_condition_and_no_loop_outside_its_kernels():
    """XLA prepares every branch each time a program runs, so conditions cost the host time."""
    logits = jnp.zeros((5, 30011))
    rows = make_rows([SamplingParams(temperature=0.5)] * 5)
    lowered = jax.jit(sample, static_argnums=3).trace(logits, logits, rows, "mosaic_gpu")
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 2
    assert not any(word in text for word in ("stablehlo.case", "stablehlo.if", "stablehlo.while", "stablehlo.sort"))
