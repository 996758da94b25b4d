"""Every model family against transformers: logits in float32 through the paged cache, however the tokens arrive."""

import numpy as np
import pytest

from tests.parity.tiny_models import TinyModel, tiny_model

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(11).integers(3, 131, 41).tolist()

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"hidden_size": 48, "head_dim": None}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "phi3": ("Phi3Config", {"sliding_window": 17, "hidden_size": 48, "head_dim": None}),
    "gemma2": ("Gemma2Config", {"sliding_window": 11, "query_pre_attn_scalar": 13}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 11, "query_pre_attn_scalar": 13, "sliding_window_pattern": 2}),
    "opt": ("OPTConfig", {"ffn_dim": 58, "word_embed_proj_dim": 42, "head_dim": None, "num_key_value_heads": None}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request) -> TinyModel:
    config_class, changes = FAMILIES[request.param]
    return tiny_model(config_class, **changes)


@pytest.fixture(scope="module")
def expected(tiny) -> np.ndarray:
    return tiny.expected_logits(PROMPT)


@pytest.fixture(scope="module")
def driver(tiny):
    return tiny.driver(num_blocks=97 + 13 * len(PROMPT))  # of all tests of a family: blocks are given back by none


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_whole_prefill(driver, expected):
    assert_close(driver.prefill(driver.add(PROMPT)), expected)


def test_chunked_prefill_at_every_chunk_size(driver, expected):
    for chunk in range(1, len(PROMPT)):
        assert_close(driver.prefill(driver.add(PROMPT), chunk=chunk), expected)


def test_decode_beside_prefill_and_alone(tiny, driver, expected):
    first, second = driver.add(PROMPT), driver.add(PROMPT[::-1])
    reverse = tiny.expected_logits(PROMPT[::-1])
    logits = [driver.step([(first, 7)])[0]]
    decode, prefill = driver.step([(first, 1), (second, 31)])
    logits.append(decode)
    assert_close(prefill, reverse[:31])
    for i in range(8, len(PROMPT)):
        rows = [(first, 1), (second, 1)] if i < 18 else [(first, 1)]
        got = driver.step(rows)
        logits.append(got[0])
        if i < 18:
            assert_close(got[1], reverse[31 + i - 8 :][:1])
    assert_close(np.concatenate(logits), expected)


def test_prefix_cache_hit(driver, expected):
    first = driver.add(PROMPT)
    driver.prefill(first, chunk=19)
    second = driver.add(PROMPT, shared_blocks=first.block_ids[:5])
    assert_close(driver.prefill(second), expected[5 * driver.block_size :])
    assert set(second.block_ids) & set(first.block_ids) == set(first.block_ids[:5])


def test_recomputed_after_preemption(tiny, driver, expected):
    sequence = driver.add(PROMPT)
    driver.step([(sequence, 29)])
    lost = list(sequence.block_ids)
    driver.preempt(sequence)
    other = driver.add(PROMPT[5:])
    assert_close(driver.prefill(other), tiny.expected_logits(PROMPT[5:]))
    assert set(lost) <= set(other.block_ids)
    assert_close(driver.prefill(sequence, chunk=23), expected)


def test_greedy_ids_over_64_tokens(tiny, driver):
    ids = tiny.greedy(PROMPT, 64)
    sequence = driver.add(PROMPT + ids)
    logits = [driver.step([(sequence, len(PROMPT))])[0][-1]]
    logits += [driver.step([(sequence, 1)])[0][0] for _ in ids[:-1]]
    top2 = np.sort(tiny.expected_logits(PROMPT + ids)[len(PROMPT) - 1 : -1], axis=-1)[:, -2:]
    is_clear = top2[:, 1] - top2[:, 0] > 2 * TOLERANCE
    assert is_clear.sum() >= 60, "the comparison must not be empty"
    np.testing.assert_array_equal(np.argmax(logits, axis=-1)[is_clear], np.array(ids)[is_clear])
