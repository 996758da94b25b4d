"""RopeConfig: base and scaling of rotary position embeddings, from both spellings of a config file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

RopeType = Literal["default", "dynamic", "linear", "llama3", "longrope", "yarn"]

# What each kind of scaling cannot do without.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
# Of Gemma3's sliding-attention layers, where the file does not say.
_LOCAL_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding.

    Attributes:
      theta: base of the frequencies.
      type: how long contexts are reached.
      factor: of dynamic, linear, llama3 and yarn; longrope's is what its attention factor follows from.
      low_freq_factor, high_freq_factor: llama3's bands.
      original_max_position_embeddings: tokens that the model was first trained on; dynamic, llama3, longrope and yarn.
      longest_text: dynamic's tokens of the longest text, see `within`; 0 for what the model was trained on.
      attention_factor: longrope's and yarn's factor on cos and sin; None: as transformers computes it.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn's, meaning as in transformers.
      partial_rotary_factor: share of head_dim that rotates.
      frequency_divisors: one divisor a frequency (head_dim / 2 of them), applied after the scaling; None for none.
        GGUF files carry llama3 scaling in this form. Of longrope they are those of short contexts, see `within`.
      long_divisors: longrope's for more than the original context.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    longest_text: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    frequency_divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None

    def within(self, max_model_len: int) -> "RopeConfig":
        """What an engine rotates by whose texts have at most so many tokens.

        dynamic and longrope have other frequencies for long texts. The engine's limit decides for all texts, since keys
        in the cache cannot change; transformers changes over with the length of each text. vLLM does so for longrope,
        and takes dynamic's limit to be the longest that its factor stands for, which is what max_model_len is unless
        it is set.
        """
        if self.type == "dynamic":
            return replace(self, longest_text=max_model_len)
        if self.type != "longrope" or max_model_len <= self.original_max_position_embeddings:
            return self
        return replace(self, frequency_divisors=self.long_divisors)

    def check_divisors(self, head_dim: int, origin: str) -> None:
        """Raises: ValueError unless there is one divisor a frequency."""
        num_frequencies = int(head_dim * self.partial_rotary_factor) // 2
        for divisors in (self.frequency_divisors, self.long_divisors):
            if divisors is not None and len(divisors) != num_frequencies:
                raise ValueError(f"{origin}: rope has {len(divisors)} divisors for {num_frequencies} frequencies")


def read_ropes(
    hf: Mapping[str, Any], *, default_theta: float, max_position_embeddings: int, can_be_partial: bool, origin: str
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of full-attention and of sliding-attention layers.

    transformers 5 writes everything under "rope_parameters", nested by layer type where they differ; before it was
    "rope_theta" beside "rope_scaling", whose kind was spelled "type" or "rope_type". What is in "rope_parameters" wins.

    Args:
      can_be_partial: whether a part of the head may rotate. transformers ignores "partial_rotary_factor" elsewhere
        where nothing is scaled, and fails where something is.

    Raises: ValueError for an unknown kind of scaling, a missing part of it, two kinds, or one of a part of the head.
    """
    scaling, parameters = (_dict(hf, key, origin) for key in ("rope_scaling", "rope_parameters"))
    is_nested = any(isinstance(value, Mapping) for value in parameters.values())
    full = dict(parameters.get("full_attention") or {}) if is_nested else parameters
    local = dict(parameters.get("sliding_attention") or {}) if is_nested else {}
    if scaling and _kind(full, default=_kind(scaling)) != _kind(scaling):
        # Who adds "rope_scaling" by hand, as model cards say, would else not get it, nor be told.
        raise ValueError(
            f'{origin}: "rope_scaling" says {_kind(scaling)!r} and "rope_parameters" says {_kind(full)!r}; '
            'move what is meant to "rope_parameters" and leave "rope_scaling" out'
        )
    top_level = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    values = {"rope_theta": default_theta, **top_level, **scaling, **full}
    if hf.get("original_max_position_embeddings") is not None:
        # Beside the scaling this one wins over the scaling's own, in transformers and in vLLM.
        values["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    local_base = {"rope_theta": hf.get("rope_local_base_freq") or _LOCAL_THETA}
    return (
        _rope(values, max_position_embeddings, can_be_partial, origin),
        _rope({**local_base, **local}, max_position_embeddings, can_be_partial, origin),
    )


def _dict(hf: Mapping[str, Any], key: str, origin: str) -> dict[str, Any]:
    value = hf.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f'{origin}: field "{key}" must be an object or null, got {value!r}; correct the file')
    return {k: v for k, v in (value or {}).items() if v is not None}


def _kind(values: Mapping[str, Any], *, default: str = "default") -> str:
    """The kind of scaling under either spelling. Early files of Phi-3 call theirs "su" or "yarn": its factors tell."""
    kind = values.get("rope_type", values.get("type", default))
    return "longrope" if kind in ("su", "yarn") and "short_factor" in values else kind


def _rope(values: Mapping[str, Any], max_position_embeddings: int, can_be_partial: bool, origin: str) -> RopeConfig:
    kind = _kind(values)
    if kind not in _REQUIRED:
        raise ValueError(f"{origin}: rope scaling {kind!r} is not supported; supported are {', '.join(_REQUIRED)}")
    for key in _REQUIRED[kind]:
        if values.get(key) is None:
            raise ValueError(f'{origin}: rope scaling "{kind}" needs "{key}"; add it beside "rope_type"')

    def number(key: str, default: float) -> float:
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f'{origin}: rope field "{key}" must be a number, got {value!r}; correct the file')
        return float(value)

    def optional(key: str) -> float | None:
        return None if values.get(key) is None else number(key, 0.0)

    def numbers(key: str) -> tuple[float, ...] | None:
        listed = values.get(key)
        if listed is None:
            return None
        if not isinstance(listed, list | tuple) or not all(isinstance(v, int | float) for v in listed):
            raise ValueError(
                f'{origin}: rope field "{key}" must be a list of numbers, got {listed!r}; correct the file'
            )
        return tuple(float(value) for value in listed)

    partial_rotary_factor = number("partial_rotary_factor", 1.0)
    if partial_rotary_factor != 1.0 and not can_be_partial:
        if kind != "default":
            raise ValueError(
                f'{origin}: "partial_rotary_factor" ({partial_rotary_factor}) with rope scaling "{kind}" is not '
                "supported for this model, whose heads rotate as a whole; leave it out"
            )
        partial_rotary_factor = 1.0
    # transformers and vLLM read no other limit for dynamic.
    context = None if kind == "dynamic" else optional("original_max_position_embeddings")
    is_long = kind == "longrope"
    return RopeConfig(
        theta=number("rope_theta", 10000.0),
        type=cast("RopeType", kind),
        factor=number("factor", max_position_embeddings / context if is_long and context else 1.0),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        original_max_position_embeddings=max_position_embeddings if context is None else int(context),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
        partial_rotary_factor=partial_rotary_factor,
        frequency_divisors=numbers("short_factor" if is_long else "frequency_divisors"),
        long_divisors=numbers("long_factor") if is_long else None,
    )
