"""Failures that users of other engines reported about sampling, on the sampler alone; named by case id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.sampling import kept_tokens, process_logits
from scheduler.records import RecordField
from scheduler.sampling_params import SamplingParams
from tests.engine.sampling_rows import make_rows, process_and_sample, repeat_row


@pytest.fixture(scope="module")
def draw():
    return jax.jit(lambda logits, rows: process_and_sample(logits, rows)[0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_c03_no_temperature_overflows(dtype, draw):
    logits = jnp.asarray([1.25, 3.5, 9.75, -2.0], dtype).astype(jnp.float32)
    params = [
        SamplingParams(temperature=t, seed=i) for i, t in enumerate((0, 1e-45, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2))
    ]
    assert draw(jnp.broadcast_to(logits, (8, 4)), make_rows(params)).tolist() == [2] * 8


def test_c05_limits_of_the_filters(draw):
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    num_draws = 20_000
    every = jnp.broadcast_to(logits, (num_draws, 4))
    for top_k in (9999999, 0, -1):
        ids = draw(every, repeat_row(SamplingParams(seed=3, top_k=top_k), num_draws))
        counts, expected = np.bincount(ids, minlength=4), np.exp(logits) * num_draws
        assert (np.abs(counts - expected) < 3 * np.sqrt(expected * (1 - np.exp(logits)))).all(), top_k
    narrow = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}]
    for p in narrow:
        assert not draw(every, repeat_row(SamplingParams(seed=3, **p), num_draws)).any()
    for bad in ({"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_c05_without_top_k_any_of_50000_tokens_may_come(draw):
    ids = np.asarray(draw(jnp.zeros((7, 50_000)), make_rows([SamplingParams(seed=i) for i in range(7)])))
    assert len(set(ids.tolist())) == 7 and ids.max() > 1024


@pytest.mark.parametrize(
    ("logits", "params", "expected"),
    [
        (np.log([0.36, 0.32, 0.2, 0.12]), {"top_k": 2, "top_p": 0.5}, [0]),
        ([2.0, 1.2, 0.1], {"temperature": 0.4, "top_p": 0.75}, [0]),
        ([2.0, 1.2, 0.1], {"temperature": 0.4, "min_p": 0.2}, [0]),
        (np.log([0.5, 0.25, 0.25]), {"top_p": 0.5}, [0]),
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 2}, [0, 1, 2]),
    ],
)
def test_c06_temperature_comes_first_and_top_k_before_top_p(logits, params, expected):
    rows = make_rows([SamplingParams(**params)])
    scaled = jnp.asarray(logits, jnp.float32)[None] / rows.floats(RecordField.TEMPERATURE)[:, None]
    assert np.flatnonzero(jax.jit(kept_tokens)(scaled, rows)[0]).tolist() == expected


def test_c07_prompt_and_output_tokens_count_where_they_should():
    penalties = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    params = [penalties, penalties, SamplingParams(temperature=0.0)]
    # 7 lies behind each history: what is read beyond it would count.
    rows = make_rows(params, histories=[([0, 1], [3, 3]), ([0, 1], []), ([0, 1], [3, 3])])
    logits = jnp.asarray([[2, -1, 0.5, 3, 0, 0, 0, 1]] * 3, jnp.float32)
    got = np.asarray(jax.jit(process_logits)(logits, rows))
    np.testing.assert_allclose(got[0, :4], [4 / 3, -1.5, 0.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(got[1, :4], [4 / 3, -1.5, 0.5, 3.0], rtol=1e-6)
    assert np.array_equal(got[2], logits[2]) and (got[:, 7] == 1).all()
