"""Angles of rotary position embeddings; pallas_kernels rotates by them.

Einsum letters: T tokens  H head_dim
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angles per position, f32[rotated / 2], and the factor on cos and sin (1 except for longrope and yarn)."""
    rotated = int(head_dim * rope.partial_rotary_factor)
    theta = _dynamic_theta(rope, rotated) if rope.type == "dynamic" else rope.theta
    frequencies = theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    factor = 1.0
    if rope.type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.type == "yarn":
        frequencies, factor = _yarn(rope, frequencies, rotated)
    elif rope.type == "longrope":
        factor = _longrope_attention_factor(rope)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / np.asarray(rope.frequency_divisors)
    return frequencies.astype(np.float32), factor


def _dynamic_theta(rope: RopeConfig, rotated: int) -> float:
    """A base so much larger that the slowest frequency turns no further in the longest text than it was trained to.

    Source: "NTK-aware" scaling as transformers computes it for a text of that length.
    """
    growth = max(rope.longest_text / rope.original_max_position_embeddings, 1.0)
    return rope.theta * (rope.factor * growth - (rope.factor - 1)) ** (rotated / (rotated - 2))


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended (transformers' llama3)."""
    context = rope.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return frequencies * kept + frequencies / rope.factor * (1 - kept)


def _yarn(rope: RopeConfig, frequencies: np.ndarray, rotated: int) -> tuple[np.ndarray, float]:
    """Frequencies that turn often within the original context are kept, rare ones interpolated.

    Source: YaRN, https://arxiv.org/abs/2309.00071, with the attention factor as transformers computes it.
    """

    def dimension_with(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = np.clip((np.arange(rotated // 2) - low) / (high - low or 0.001), 0, 1)
    return frequencies * (1 - ramp) + frequencies / rope.factor * ramp, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(factor: float, mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.factor, rope.mscale) / scale(rope.factor, rope.mscale_all_dim)
    return scale(rope.factor)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """Source: LongRoPE, https://arxiv.org/abs/2402.13753, as transformers computes it."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def rope_tables(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[T, rotated / 2], of each token's position, i32[T]."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
