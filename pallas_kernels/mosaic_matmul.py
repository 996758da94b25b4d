"""The Mosaic GPU backend of products, norms and gates: what it supports, and where it is faster than XLA."""

from typing import Any

import jax

from pallas_kernels import matmul_sizes, reference_matmul, row_kernels, row_matmul_sizes, tuning
from pallas_kernels.common import zero_arrivals
from pallas_kernels.layer_slice import LayerArray
from pallas_kernels.reference_matmul import Activation, MatmulStage
from pallas_kernels.tuning import matmul_config, row_matmul_config
from pallas_kernels.validation import Backend, is_interpreted


def rms_norm(x: jax.Array, weight: LayerArray, *, eps: float, unit_offset: bool, backend: Backend) -> jax.Array:
    """See ops.rms_norm."""
    reason = row_kernels.unsupported_norm(x.shape, x.dtype, unit_offset=unit_offset)
    if reason is not None:
        raise NotImplementedError(f"{backend} norm: no kernel for {reason}; use backend 'reference'")
    return row_kernels.rms_norm(x, weight, eps=eps, interpret=is_interpreted(backend))


def act_and_mul(gate_up: jax.Array, activation: Activation | None, *, backend: Backend) -> jax.Array:
    """See ops.act_and_mul."""
    reason = row_kernels.unsupported_activation(gate_up.shape, gate_up.dtype, activation)
    if reason is not None:
        raise NotImplementedError(f"{backend} activation: no kernel for {reason}; use backend 'reference'")
    return row_kernels.act_and_mul(gate_up, activation, interpret=is_interpreted(backend))


def make_arrivals(backend: Backend) -> jax.Array | None:
    """What matmul_stages counts in: once a step, for all layers. None for the reference."""
    return None if backend == "reference" else zero_arrivals()


def _has_norm_kernel(stage: MatmulStage, num_rows: int) -> bool:
    shape = (num_rows, stage.weight.shape[-1])
    is_served = row_kernels.unsupported_norm(shape, stage.weight.dtype, unit_offset=stage.unit_offset) is None
    return stage.norm_weight is not None and is_served


def _has_gate_kernel(stage: MatmulStage, num_rows: int) -> bool:
    shape = (num_rows, *stage.weight.shape[:-1])
    return stage.is_gated and row_kernels.unsupported_activation(shape, stage.weight.dtype, stage.activation) is None


def _have_row_kernels(stages: tuple[MatmulStage, ...], num_rows: int) -> bool:
    return any(_has_norm_kernel(stage, num_rows) or _has_gate_kernel(stage, num_rows) for stage in stages)


def has_product_kernels(num_rows: int) -> bool:
    """Whether products of so many rows are kernels and not XLA's, where the kernels serve them."""
    return num_rows <= tuning.MAX_PREFERRED_ROWS


def prefers_matmul_kernel(
    x: jax.Array | jax.ShapeDtypeStruct, stages: tuple[MatmulStage, ...], backend: Backend
) -> bool:
    """Whether matmul_stages of a backend can run these and was measured to be faster than what XLA makes of them."""
    if backend == "reference":
        return False
    if not has_product_kernels(x.shape[0]):
        return x.shape[0] >= tuning.MIN_PREFERRED_ROWS and _have_row_kernels(stages, x.shape[0])
    if _unsupported_products(x, stages) is not None:
        return False
    num_weights = sum(stage.weight.size for stage in stages)
    if x.shape[0] > matmul_sizes.FEW_ROWS:
        return len(stages) > 1 and num_weights <= tuning.MAX_PREFERRED_WEIGHTS_OF_ROWS
    return x.shape[-1] <= tuning.MAX_PREFERRED_INPUT and num_weights <= tuning.MAX_PREFERRED_WEIGHTS


def _unsupported_products(x: jax.Array | jax.ShapeDtypeStruct, stages: tuple[MatmulStage, ...]) -> str | None:
    """Why no kernel computes these products, in words."""
    sizes = matmul_sizes if x.shape[0] <= matmul_sizes.FEW_ROWS else row_matmul_sizes
    return sizes.unsupported_reason(x, stages)


def matmul_stages(
    x: jax.Array,
    stages: tuple[MatmulStage, ...],
    residual: jax.Array | None,
    arrivals: jax.Array,
    *,
    backend: Backend,
) -> tuple[jax.Array, ...]:
    """See ops.matmul_stages.

    Up to 256 rows one kernel, or one a stage where thread blocks cannot wait for each other. The products of more are
    XLA's, with kernels for the norms and gates around them where they have one.
    """
    from pallas_kernels import row_matmul, skinny_matmul

    reason = _unsupported_products(x, stages)
    if reason is not None:
        if len(x) > matmul_sizes.FEW_ROWS and _have_row_kernels(stages, len(x)):
            return _products_of_many_rows(x, stages, residual, backend)
        raise NotImplementedError(f"{backend} matmul: {reason}; use backend 'reference'")
    device = jax.devices()[0]
    # Where there is no GPU this compiles for one elsewhere.
    num_sms = getattr(device, "core_count", None) if device.platform == "gpu" else None
    interpret = is_interpreted(backend)
    is_few = len(x) == matmul_sizes.FEW_ROWS
    kernels, config_of = (skinny_matmul, matmul_config) if is_few else (row_matmul, row_matmul_config)
    config: Any = config_of(interpret=interpret, num_sms=num_sms)
    return kernels.matmul_stages(x, stages, residual, arrivals, config=config, interpret=interpret)


def _products_of_many_rows(
    x: jax.Array, stages: tuple[MatmulStage, ...], residual: jax.Array | None, backend: Backend
) -> tuple[jax.Array, ...]:
    interpret = is_interpreted(backend)

    def norm(x: jax.Array, stage: MatmulStage) -> jax.Array:
        if not _has_norm_kernel(stage, len(x)):
            return reference_matmul.norm(x, stage)
        assert stage.norm_weight is not None
        return row_kernels.rms_norm(x, stage.norm_weight, eps=stage.eps, interpret=interpret)

    def gate(gate_up: jax.Array, stage: MatmulStage) -> jax.Array:
        if not _has_gate_kernel(stage, len(gate_up)):
            return reference_matmul.gate(gate_up, stage)
        return row_kernels.act_and_mul(gate_up, stage.activation, interpret=interpret)

    return reference_matmul.matmul_stages(x, stages, residual, norm=norm, gate=gate)
