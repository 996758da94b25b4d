"""OPT: learned positions, LayerNorm, biases, a plain ReLU feed-forward."""

from typing import Any

import jax
from flax import nnx

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.layers.attention import Attention
from jaxvllm.layers.embedding import Embedding
from jaxvllm.layers.layer_context import Attended, Hidden, LayerContext, LayerInputs, LayerKinds, Products
from jaxvllm.layers.linear import Linear, OutputProjection, QKVProjection
from jaxvllm.layers.mlp import activation
from jaxvllm.layers.norm import LayerNorm
from jaxvllm.layers.parameter import stack_layers
from jaxvllm.layers.run_layers import default_unroll, finish_layers, run_layers
from jaxvllm.model_config import ModelConfig
from pallas_kernels import Backend

_PREFIX = "model.decoder"
_LAYER_PREFIX = f"{_PREFIX}.layers.{{layer}}"
# The first rows of the position table stand for padding.
_POSITION_OFFSET = 2


def _norm_options(config: ModelConfig) -> dict[str, Any]:
    has_weights = config.hf.get("layer_norm_elementwise_affine", True)
    return {"eps": config.rms_norm_eps, "dtype": config.dtype, "has_weights": has_weights}


class OPTDecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a norm before it, or after the residual sum as in OPT-350m."""

    def __init__(self, config: ModelConfig, *, norm_before: bool):
        """`norm_before`: do_layer_norm_before of config.json."""
        self.norm_before = norm_before
        self.activation = activation(config.hidden_act)
        hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"{_LAYER_PREFIX}.self_attn"
        options = _norm_options(config)
        self.self_attn = Attention(
            config,
            prefix,
            QKVProjection(config, prefix),
            OutputProjection(config, f"{prefix}.out_proj", bias=config.attention_output_bias),
        )
        self.self_attn_layer_norm = LayerNorm(hidden, f"{_LAYER_PREFIX}.self_attn_layer_norm", **options)
        linear = {"dtype": config.dtype, "bias": config.mlp_bias}
        self.fc1 = Linear(hidden, ffn, f"{_LAYER_PREFIX}.fc1", axes=("ffn", None), **linear)
        self.fc2 = Linear(ffn, hidden, f"{_LAYER_PREFIX}.fc2", axes=(None, "ffn"), **linear)
        self.final_layer_norm = LayerNorm(hidden, f"{_LAYER_PREFIX}.final_layer_norm", **options)

    def attend(self, hidden: Hidden, kv_cache: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """See run_layers."""
        normed = self.self_attn_layer_norm(hidden.x) if self.norm_before else hidden.x
        return self.self_attn(context.products.project(normed, (self.self_attn.qkv_proj.stage(),)), kv_cache, context)

    def finish(self, heads: jax.Array, residual: jax.Array, products: Products) -> Hidden:
        """See run_layers."""
        o_proj = self.self_attn.o_proj.stage(adds_residual=True)
        x = products.project(heads, (o_proj,), residual)
        x = x if self.norm_before else self.self_attn_layer_norm(x)
        normed = self.final_layer_norm(x) if self.norm_before else x
        feed_forward = (self.fc1.stage(activation=self.activation), self.fc2.stage(adds_residual=True))
        x = products.project(normed, feed_forward, x)
        return Hidden(x if self.norm_before else self.final_layer_norm(x))


class OPTForCausalLM(nnx.Module):
    """Embeddings may be narrower than the layers (OPT-350m), with a projection on either side."""

    def __init__(self, config: ModelConfig, *, unroll_layers: bool | None = None):
        """Declare the weights of `config`; see CausalLM."""
        hf, hidden, dtype = config.hf, config.hidden_size, config.dtype
        self.unroll_layers = default_unroll() if unroll_layers is None else unroll_layers
        self.head_dim = config.head_dim
        self.layer_kinds = LayerKinds.from_config(config, has_rope=False)
        width = hf.get("word_embed_proj_dim") or hidden
        norm_before = hf.get("do_layer_norm_before", True)
        self.embed_tokens = Embedding(config.vocab_size, width, f"{_PREFIX}.embed_tokens.weight", dtype=dtype)
        self.embed_positions = Embedding(
            config.max_position_embeddings + _POSITION_OFFSET,
            hidden,
            f"{_PREFIX}.embed_positions.weight",
            dtype=dtype,
            axes=(None, None),
        )
        projection = {"axes": (None, None), "dtype": dtype}
        is_projected = width != hidden
        self.project_in = Linear(width, hidden, f"{_PREFIX}.project_in", **projection) if is_projected else None
        self.layers = stack_layers(OPTDecoderLayer(config, norm_before=norm_before), config.num_layers)
        has_last_norm = norm_before and not hf.get("_remove_final_layer_norm", False)
        last_norm = LayerNorm(hidden, f"{_PREFIX}.final_layer_norm", **_norm_options(config))
        self.final_layer_norm = last_norm if has_last_norm else None
        self.project_out = Linear(hidden, width, f"{_PREFIX}.project_out", **projection) if is_projected else None
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(config.vocab_size, width, "lm_head.weight", dtype=dtype)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct sliding windows of the layers, None for those that see all."""
        return self.layer_kinds.windows

    def __call__(
        self, input_ids: jax.Array, positions: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[Attended, jax.Array]:
        """See CausalLM."""
        hidden = self.embed_tokens(input_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + self.embed_positions(positions + _POSITION_OFFSET)
        inputs = LayerInputs.make(self.layer_kinds, self.head_dim, positions, metadata)
        kinds = self.layer_kinds.of_layer
        return run_layers(self.layers, hidden, kv_cache, inputs, kinds, unroll=self.unroll_layers)

    def compute_logits(self, attended: Attended, backend: Backend = "reference") -> jax.Array:
        """See CausalLM."""
        hidden = finish_layers(self.layers, attended, backend=backend)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return (self.lm_head or self.embed_tokens).logits(hidden)
