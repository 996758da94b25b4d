"""load_params: checkpoint tensors into the declared parameters, stacked by layer and merged as declared."""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec
from jaxvllm.weights.checkpoint import Checkpoint, TensorInfo

logger = logging.getLogger(__name__)

Put = Callable[[np.ndarray, ParamSpec], jax.Array]

# Stored by older exporters, computed here. Everything else that no parameter asks for is an error.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?position_ids")
# Of attention in 8 bits, whose scores are computed in 16 here; or of a cache in 8 bits where it is kept in more.
_SCALES = re.compile(r".*\.(q|k|v|kv|prob)_scale|.*\.[kv]_proj\.output_scale")
_HEAD = "lm_head.weight"
_EMBEDDING_SUFFIX = "embed_tokens.weight"
_MAX_LISTED = 8
_NUM_READERS = 8


def load_params(
    specs: Mapping[str, ParamSpec], checkpoint: Checkpoint, *, dtype: np.dtype | None = None, put: Put | None = None
) -> dict[str, jax.Array]:
    """Read every declared parameter; one of them at a time is in host memory, and up to 8 tensors on their way to it.

    Args:
      specs: parameter name -> declaration. With tied embeddings it declares no lm_head, and a stored one is ignored.
      checkpoint: the weights; each tensor is read once.
      dtype: of all parameters; None takes each declaration's own.
      put: moves a finished array to the device(s); the default puts it on the default device.

    Returns: parameter name -> array of the declared shape.
    Raises: ValueError that names every missing, unexpected and mis-shaped tensor; nothing is read in that case.
    """
    stored = checkpoint.tensors()
    names = _resolve_names(specs, stored)
    _check(specs, stored, names, checkpoint)
    _log_defaults(specs, names, checkpoint)
    put = put or (lambda array, spec: jax.device_put(array))
    params = {}
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        for name, spec in specs.items():
            wanted = np.dtype(dtype if dtype is not None else spec.dtype)
            params[name] = put(_assemble(spec, checkpoint, names, wanted, pool), spec)
            # The transfer reads the host array: wait, so that two of them are never alive.
            params[name].block_until_ready()
    return params


def _sources(spec: ParamSpec) -> Iterator[tuple[int | None, str, CheckpointTensor]]:
    """(layer, tensor name, source) of each part of a parameter, layer by layer."""
    layers = [None] if spec.num_layers is None else range(spec.num_layers)
    for layer in layers:
        for source in spec.sources:
            yield layer, source.name.format(layer=layer), source


def _resolve_names(specs: Mapping[str, ParamSpec], stored: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Declared tensor name -> name in the checkpoint, for those that have one.

    Checkpoints saved from the base model lack the "model." in front; tied models may store the head alone.
    """
    wanted = {
        name: [other.format(layer=layer) for other in source.other_names]
        for spec in specs.values()
        for layer, name, source in _sources(spec)
    }
    names = {}
    for name, others in wanted.items():
        candidates = [form for each in (name, *others) for form in (each, each.removeprefix("model."))]
        if name.endswith(_EMBEDDING_SUFFIX) and _HEAD not in wanted:
            candidates.append(_HEAD)
        found = next((candidate for candidate in candidates if candidate in stored), None)
        if found is not None:
            names[name] = found
    return names


def _check(
    specs: Mapping[str, ParamSpec], stored: Mapping[str, TensorInfo], names: Mapping[str, str], checkpoint: Checkpoint
) -> None:
    """Compare what is declared with what is stored."""
    missing: list[str] = []
    misshaped: list[str] = []
    for spec in specs.values():
        for _, name, source in _sources(spec):
            if name not in names:
                missing += [name] if source.default is None else []
            elif not _fits(stored[names[name]].shape, source.shape):
                misshaped.append(f"{name} is {list(stored[names[name]].shape)}, expected {list(source.shape)}")
    ignored = set(names.values()) | ({_HEAD} if _HEAD not in missing else set())
    extra = [name for name in stored if name not in ignored and not _HARMLESS.fullmatch(name)]
    extra = [name for name in extra if not _SCALES.fullmatch(name)]
    problems = []
    if missing:
        problems.append(f"missing: {_listed(missing)}" + _remedy_for_missing(missing))
    if misshaped:
        problems.append(f"wrong shape: {_listed(misshaped)}")
    if extra:
        problems.append(f"not part of this model: {_listed(extra)}")
    if problems:
        raise ValueError(
            f"{checkpoint.path}: the weights do not fit the model that the config describes; "
            + "; ".join(problems)
            + ". Check that config and weights belong together, or download both again"
        )


def _fits(stored: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Whether the shapes are the same; a scalar may be stored as [1]."""
    return stored == declared or (declared == () and math.prod(stored) == 1)


def _log_defaults(specs: Mapping[str, ParamSpec], names: Mapping[str, str], checkpoint: Checkpoint) -> None:
    absent = [name for spec in specs.values() for _, name, source in _sources(spec) if name not in names]
    if absent:
        logger.warning(
            "%s: no %s: the KV cache's scales are 1 there, accuracy may suffer", checkpoint.path, _listed(absent)
        )


def _remedy_for_missing(missing: list[str]) -> str:
    if missing == [_HEAD]:
        return ' (if the model shares it with its embedding, set "tie_word_embeddings": true in the config)'
    return ""


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(sorted(items)[:_MAX_LISTED]) + more


def _assemble(
    spec: ParamSpec, checkpoint: Checkpoint, names: Mapping[str, str], dtype: np.dtype, pool: ThreadPoolExecutor
) -> np.ndarray:
    """Fill one parameter in host memory, several tensors at a time."""
    array = np.empty(spec.shape, dtype)
    parts: dict[str, list[tuple[int | None, CheckpointTensor]]] = {}
    for layer, name, source in _sources(spec):
        parts.setdefault(name, []).append((layer, source))

    def fill(name: str) -> int:
        """Read one tensor, put it where it belongs; returns how many elements it filled."""
        tensor = checkpoint.read(names[name]) if name in names else None
        filled = 0
        for layer, source in parts[name]:
            # The ellipsis keeps a view where the index picks a single element.
            target = (array if layer is None else array[layer])[source.index][...]
            part = source.convert(np.asarray(source.default) if tensor is None else tensor)
            # NumPy would broadcast a part that is too small, and the rest would be right by luck only.
            if target.shape != part.shape:
                raise ValueError(f"{name}: converted to {part.shape}, declared to fill {target.shape}")
            if target.dtype == part.dtype:  # Plain integers: a copy of a custom dtype may hold the GIL.
                target, part = (x.view(f"u{x.itemsize}") for x in (target, part))
            target[...] = part
            filled += part.size
        return filled

    if sum(pool.map(fill, parts)) != array.size:
        raise ValueError(f"the declared sources {[s.name for s in spec.sources]} do not cover {spec.shape} exactly")
    return array
