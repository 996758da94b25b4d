"""What the attention layers of one step need to know about its requests, passed as an argument of the program.

vLLM keeps this in a forward context that layers look up; here it is a pytree, unpacked in layers/attention.py only.
"""

from dataclasses import dataclass, field
from functools import partial

import jax

from pallas_kernels import AttentionWork, Backend, Kind


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
