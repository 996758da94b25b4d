"""load_params: checkpoint tensors into the declared parameters, stacked by layer and merged as declared."""

import math
import re
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec
from jaxvllm.weights.checkpoint import Checkpoint, TensorInfo

Put = Callable[[np.ndarray, ParamSpec], jax.Array]

# Stored by older exporters, computed here. Everything else that no parameter asks for is an error.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?position_ids")
_HEAD = "lm_head.weight"
_EMBEDDING_SUFFIX = "embed_tokens.weight"
_MAX_LISTED = 8


def load_params(
    specs: Mapping[str, ParamSpec], checkpoint: Checkpoint, *, dtype: np.dtype | None = None, put: Put | None = None
) -> dict[str, jax.Array]:
    """Read every declared parameter; one of them at a time is in host memory.

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
    put = put or (lambda array, spec: jax.device_put(array))
    params = {}
    for name, spec in specs.items():
        array = _assemble(spec, checkpoint, names, np.dtype(dtype if dtype is not None else spec.dtype))
        params[name] = put(array, spec)
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
    wanted = {name for spec in specs.values() for _, name, _ in _sources(spec)}
    names = {}
    for name in wanted:
        candidates = [name, name.removeprefix("model.")]
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
                missing.append(name)
            elif stored[names[name]].shape != source.shape:
                misshaped.append(f"{name} is {list(stored[names[name]].shape)}, expected {list(source.shape)}")
    ignored = set(names.values()) | ({_HEAD} if _HEAD not in missing else set())
    extra = [name for name in stored if name not in ignored and not _HARMLESS.fullmatch(name)]
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


def _remedy_for_missing(missing: list[str]) -> str:
    if missing == [_HEAD]:
        return ' (if the model shares it with its embedding, set "tie_word_embeddings": true in the config)'
    return ""


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(sorted(items)[:_MAX_LISTED]) + more


def _assemble(spec: ParamSpec, checkpoint: Checkpoint, names: Mapping[str, str], dtype: np.dtype) -> np.ndarray:
    """Fill one parameter in host memory."""
    array = np.empty(spec.shape, dtype)
    filled = 0
    last_name, tensor = "", np.empty(0)
    for layer, name, source in sorted(_sources(spec), key=lambda part: part[1]):
        if name != last_name:  # A fused tensor fills several parts; sorting brings them together.
            last_name, tensor = name, checkpoint.read(names[name])
        target = array if layer is None else array[layer]
        part = source.convert(tensor)
        # NumPy would broadcast a part that is too small, and the rest would be right by luck only.
        if target[source.index].shape != part.shape:
            raise ValueError(f"{name}: converted to {part.shape}, declared to fill {target[source.index].shape}")
        target[source.index] = part
        filled += part.size
    if filled != math.prod(spec.shape):
        raise ValueError(f"declaration of {spec.shape} from {[s.name for s in spec.sources]} covers {filled} elements")
    return array
