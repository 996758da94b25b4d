"""From logits to token ids, inside the step's program.

Order as in vLLM (SEMANTICS 2.9): the processors, then greedy rows take the argmax; others: temperature, min_p, top_k,
top_p, draw. A draw depends on the row's logits, parameters and output index only, bit for bit.
"""

from jaxvllm.sampling.custom import LogitsProcessor, load_logits_processors
from jaxvllm.sampling.logprobs import position_logprobs
from jaxvllm.sampling.noise import gumbel_noise
from jaxvllm.sampling.processors import process_logits
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.sampler import sample, sample_plainly
from jaxvllm.sampling.thresholds import kept_tokens

__all__ = [
    "LogitsProcessor",
    "SamplingRows",
    "gumbel_noise",
    "kept_tokens",
    "load_logits_processors",
    "position_logprobs",
    "process_logits",
    "sample",
    "sample_plainly",
]
