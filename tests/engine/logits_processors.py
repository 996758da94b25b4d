"""A custom logits processor, named as "module:attribute"."""

import jax
import jax.numpy as jnp

from jaxvllm.sampling import LogitsProcessor


def _add(logits: jax.Array, params: jax.Array) -> jax.Array:
    token_ids = params[:, 0].astype(jnp.int32)
    return logits.at[jnp.arange(len(logits)), token_ids].add(params[:, 1])


def _parse(value: dict) -> tuple[float, float]:
    if set(value) != {"token", "by"}:
        raise ValueError("give token and by")
    return value["token"], value["by"]


favour = LogitsProcessor("favour", _add, 2, _parse)
