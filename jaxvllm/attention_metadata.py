"""What the attention layers of one step need to know about its requests, passed as an argument of the program.

vLLM keeps this in a forward context that layers look up; here it is a pytree, unpacked in layers/attention.py only.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax

from pallas_kernels import AttentionWork, Backend, Kind, make_attention_work


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class AttentionMetadata:
    """Rows are requests: decode rows first, then prefill rows, then pads. See pallas_kernels.paged_attention."""

    slot_mapping: jax.Array  # i32[T] where each token's key and value go; pads 0
    block_tables: jax.Array  # i32[R, max_blocks] blocks of each row; unused entries 0
    seq_lens: jax.Array  # i32[R] keys visible to the row's last token; pads 0
    query_start_loc: jax.Array  # i32[R + 1] first token of each row; pads repeat num_tokens
    num_decodes: jax.Array  # i32[] leading rows with one token
    num_reqs: jax.Array  # i32[] real rows
    num_tokens: jax.Array  # i32[] real tokens
    kind: Kind = field(metadata={"static": True})
    backend: Backend = field(metadata={"static": True})
    work: AttentionWork | None = None  # from make_attention_work, once a step; None for the reference

    def with_work(
        self, num_heads: int, kv_cache: jax.Array, windows: tuple[int | None, ...] = (None,)
    ) -> "AttentionMetadata":
        """The same with the kernels' work lists, cut on the device: the plan knows lengths but no heads.

        Args:
          num_heads: of the model, or of its part on one device.
          kv_cache: read for its shape and dtype.
          windows: the distinct sliding windows of the layers, None for those that see all.
        """
        work = make_attention_work(
            self.seq_lens,
            self.query_start_loc,
            self.num_decodes,
            self.num_reqs,
            num_tokens=len(self.slot_mapping),
            num_heads=num_heads,
            num_kv_heads=kv_cache.shape[3],
            head_dim=kv_cache.shape[5],
            block_size=kv_cache.shape[4],
            cache_dtype=kv_cache.dtype,
            windows=windows,
            kind=self.kind,
            backend=self.backend,
        )
        return replace(self, work=work)
