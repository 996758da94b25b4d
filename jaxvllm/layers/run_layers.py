"""One loop over the decoder layers, unrolled or scanned, up to the last one's attention; and what lies behind that."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvllm.layers.layer_context import Attended, Hidden, LayerInputs, Products
from pallas_kernels import Backend, LayerSlice, has_product_kernels, make_arrivals, prefers_matmul_kernel


def default_unroll() -> bool:
    """Whether run_layers unrolls where nobody chose: everywhere but on a CPU."""
    return jax.default_backend() != "cpu"


def run_layers(
    layers: nnx.Module,
    x: jax.Array,
    kv_cache: jax.Array,
    inputs: LayerInputs,
    kind_of_layer: tuple[int, ...],
    *,
    unroll: bool,
) -> tuple[Attended, jax.Array]:
    """Run all layers in order; unrolled, the last one up to its attention: few tokens may need what lies behind that.

    Unrolled is for GPUs: kernels take the stacked weights whole, slices by constant numbers fuse into what XLA makes,
    and the step becomes one CUDA graph; an inner jit with the layer number as an argument lowers each kind of layer
    once. The scan is for CPUs: a second of compile instead of ten, and no copy of the slices. It goes through all of
    the last layer, as a second copy of a layer's end would take half of that second. The cache is a carry, never xs
    and ys: those copy a layer a step.

    Args:
      layers: one module whose weights are stacked by layer. Its attend(Hidden, kv_cache, LayerContext) gives what
        attention makes of the layer's input, [T, N * H], and the cache; its finish(heads, residual, Products) takes
        that and the layer's input and gives Hidden, each token by itself. It may have `first_stages()`, a product that
        it begins with and that the layer before may end with, and `last_stages()`, those that are computed together
        with it then.
      x: [T, D].
      kv_cache: see pallas_kernels.rope_and_write_kv; consumed.
      kind_of_layer: index into the kinds of `inputs`, one a layer.

    Returns: what finish_layers goes on from, for T tokens, and kv_cache after the last layer.
    """
    graphdef, weights = _split(layers)
    run = _run_unrolled if unroll else _run_scanned
    return run(graphdef, weights, x, kv_cache, inputs, kind_of_layer)


def finish_layers(layers: nnx.Module, attended: Attended, *, backend: Backend) -> jax.Array:
    """What the last layer gives for tokens of which run_layers left this; in the order of `attended`.

    Args:
      layers: as in run_layers.
      attended: of any R tokens.
      backend: of the products; in a step whose tokens these all are, that step's.

    Returns: [R, D].
    """
    if attended.heads is None:
        return attended.residual
    graphdef, weights = _split(layers)
    number = jnp.array(jax.tree.leaves(weights)[0].shape[0] - 1, jnp.int32)
    # That of a step that runs ahead is told of a layer -1, so that it is lowered with the others.
    following = jnp.array(-1, jnp.int32) if _runs_ahead(graphdef, weights, attended.residual, backend) else None
    hidden = _finish(graphdef, weights, attended, make_arrivals(backend), number, following, backend=backend)
    # And if its second result were unused, it would be lowered apart all the same: that takes seconds.
    return jax.lax.optimization_barrier(hidden).x


def _split(layers: nnx.Module) -> tuple[Any, dict]:
    graphdef, state = nnx.split(layers)
    return graphdef, nnx.to_pure_dict(state)


def _run_scanned(
    graphdef: Any, weights: dict, x: jax.Array, kv_cache: jax.Array, inputs: LayerInputs, kind_of_layer: tuple[int, ...]
) -> tuple[Attended, jax.Array]:
    """See run_layers."""
    is_uniform = len(set(kind_of_layer)) == 1

    def step(carry: tuple[jax.Array, jax.Array], per_layer: tuple) -> tuple[tuple[jax.Array, jax.Array], None]:
        (x, kv_cache), (of_layer, number, kind) = carry, per_layer
        layer = nnx.merge(graphdef, of_layer)
        context = inputs.at(number, kind_of_layer[0] if is_uniform else kind)
        heads, kv_cache = layer.attend(Hidden(x), kv_cache, context)
        return (layer.finish(heads, x, context.products).x, kv_cache), None

    numbers, kinds = jnp.arange(len(kind_of_layer), dtype=jnp.int32), jnp.array(kind_of_layer, jnp.int32)
    (x, kv_cache), _ = jax.lax.scan(step, (x, kv_cache), (weights, numbers, kinds))
    return Attended(None, x), kv_cache


def _run_unrolled(
    graphdef: Any, weights: dict, x: jax.Array, kv_cache: jax.Array, inputs: LayerInputs, kind_of_layer: tuple[int, ...]
) -> tuple[Attended, jax.Array]:
    """See run_layers."""
    backend = inputs.metadata.backend
    # Constants: an element of an array would be one more kernel a layer.
    numbers = [jnp.array(i, jnp.int32) for i in range(len(kind_of_layer))]
    runs_ahead = _runs_ahead(graphdef, weights, x, backend)
    hidden = Hidden(x)
    if runs_ahead:
        # The first layer finds its product done, so that it is lowered with the others.
        first = _layer_of(graphdef, weights, numbers[0])
        hidden = Hidden(x, inputs.products().project(x, first.first_stages()))
    attended, kv_cache = _attend(graphdef, weights, hidden, kv_cache, inputs, numbers[0], kind=kind_of_layer[0])
    for number, following, kind in zip(numbers, numbers[1:], kind_of_layer[1:], strict=False):
        ahead = following if runs_ahead else None
        hidden = _finish(graphdef, weights, attended, inputs.arrivals, number, ahead, backend=backend)
        attended, kv_cache = _attend(graphdef, weights, hidden, kv_cache, inputs, following, kind=kind)
    return attended, kv_cache


@partial(jax.jit, static_argnames=("graphdef", "kind"))
def _attend(
    graphdef: Any,
    weights: dict,
    hidden: Hidden,
    kv_cache: jax.Array,
    inputs: LayerInputs,
    number: jax.Array,
    *,
    kind: int,
) -> tuple[Attended, jax.Array]:
    """Layer `number` up to its attention."""
    heads, kv_cache = _layer_of(graphdef, weights, number).attend(hidden, kv_cache, inputs.at(number, kind))
    return Attended(heads, hidden.x), kv_cache


@partial(jax.jit, static_argnames=("graphdef", "backend"))
def _finish(
    graphdef: Any,
    weights: dict,
    attended: Attended,
    arrivals: jax.Array | None,
    number: jax.Array,
    following: jax.Array | None,
    *,
    backend: Backend,
) -> Hidden:
    """The rest of layer `number`, and the first product of layer `following` if it is given."""
    next_layer = None if following is None else _layer_of(graphdef, weights, following)
    products = Products(backend, arrivals, next_layer)
    return _layer_of(graphdef, weights, number).finish(attended.heads, attended.residual, products)


def _layer_of(graphdef: Any, weights: dict, number: jax.Array) -> Any:
    return nnx.merge(graphdef, jax.tree.map(lambda stack: LayerSlice(stack, number), weights))


def _runs_ahead(graphdef: Any, weights: dict, x: jax.Array, backend: Backend) -> bool:
    """Whether kernels take a layer's last products and the next one's first in one go."""
    layer = _layer_of(graphdef, weights, jnp.array(0, jnp.int32))
    if not has_product_kernels(len(x)) or not hasattr(layer, "first_stages"):
        return False
    stages = (*layer.last_stages(), *layer.first_stages())
    attended = jax.ShapeDtypeStruct((len(x), stages[0].weight.shape[-1]), x.dtype)
    return prefers_matmul_kernel(attended, stages, backend)
