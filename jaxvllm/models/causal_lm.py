"""What decoder-only models share: embedding, a stack of layers, a last norm, logits."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvllm.attention_metadata import AttentionMetadata
from jaxvllm.layers.embedding import Embedding
from jaxvllm.layers.layer_context import Attended, LayerInputs, LayerKinds
from jaxvllm.layers.norm import RMSNorm
from jaxvllm.layers.parameter import stack_layers
from jaxvllm.layers.run_layers import default_unroll, finish_layers, run_layers
from jaxvllm.model_config import ModelConfig
from pallas_kernels import Backend


class CausalLM(nnx.Module):
    """A decoder-only model with rotary positions; families differ in the layer, the norm and the options.

    The weights are declared when it is built and have no values: see layers.parameter.bind.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: nnx.Module,
        *,
        unit_offset_norm: bool = False,
        embedding_scale: float | None = None,
        logit_soft_cap: float | None = None,
        unroll_layers: bool | None = None,
    ):
        """Declare the weights.

        Args:
          layer: one decoder layer, not stacked; its checkpoint names have "{layer}" for the number.
          unit_offset_norm: the norm after the last layer is Gemma's; see RMSNorm.
          embedding_scale: factor on the embeddings, in the model's dtype.
          logit_soft_cap: logits become cap * tanh(logits / cap).
          unroll_layers: see run_layers; None unrolls unless JAX runs on a CPU.
        """
        self.unroll_layers = default_unroll() if unroll_layers is None else unroll_layers
        self.head_dim = config.head_dim
        self.layer_kinds = LayerKinds.from_config(config)
        self.embedding_scale = embedding_scale
        self.logit_soft_cap = logit_soft_cap
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(vocab, hidden, "model.embed_tokens.weight", dtype=config.dtype)
        self.layers = stack_layers(layer, config.num_layers)
        self.norm = RMSNorm(
            hidden, "model.norm.weight", eps=config.rms_norm_eps, dtype=config.dtype, unit_offset=unit_offset_norm
        )
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(vocab, hidden, "lm_head.weight", dtype=config.dtype)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct sliding windows of the layers, None for those that see all."""
        return self.layer_kinds.windows

    def __call__(
        self, input_ids: jax.Array, positions: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[Attended, jax.Array]:
        """Run the step's tokens through all layers up to the last one's attention.

        Args:
          input_ids, positions: i32[T]; pads hold 0.
          kv_cache: see pallas_kernels.rope_and_write_kv; consumed.

        Returns: what compute_logits goes on from, for T tokens, and the cache with the step's keys and values.
        """
        hidden = self.embed_tokens(input_ids)
        if self.embedding_scale is not None:
            hidden = hidden * jnp.asarray(self.embedding_scale, hidden.dtype)
        inputs = LayerInputs.make(self.layer_kinds, self.head_dim, positions, metadata)
        kinds = self.layer_kinds.of_layer
        return run_layers(self.layers, hidden, kv_cache, inputs, kinds, unroll=self.unroll_layers)

    def compute_logits(self, attended: Attended, backend: Backend = "reference") -> jax.Array:
        """The rest of the last layer and the logits: for few of a step's tokens, if few are wanted.

        Args:
          attended: of R tokens.
          backend: see finish_layers.

        Returns: f32[R, V].
        """
        hidden = finish_layers(self.layers, attended, backend=backend)
        logits = (self.lm_head or self.embed_tokens).logits(self.norm(hidden))
        if self.logit_soft_cap is not None:
            logits = self.logit_soft_cap * jnp.tanh(logits / self.logit_soft_cap)
        return logits
