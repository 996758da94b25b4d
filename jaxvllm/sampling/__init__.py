"""From logits to token ids, in programs that follow a step's (jaxvllm.step).

Order as in vLLM (vllm/v1/sample/sampler.py): the processors, then greedy rows take the argmax; others: temperature,
min_p, top_k, top_p, draw. A draw depends on the row's logits, parameters and output index only, bit for bit.
"""

from jaxvllm.sampling.custom import LogitsProcessor, load_logits_processors
from jaxvllm.sampling.draw import greedy
from jaxvllm.sampling.noise import gumbel_noise
from jaxvllm.sampling.processors import mask_grammar
from jaxvllm.sampling.rows import SamplingRows
from jaxvllm.sampling.sampler import position_logprobs, process_logits, sample
from jaxvllm.sampling.thresholds import kept_tokens

__all__ = [
    "LogitsProcessor",
    "SamplingRows",
    "greedy",
    "gumbel_noise",
    "kept_tokens",
    "load_logits_processors",
    "mask_grammar",
    "position_logprobs",
    "process_logits",
    "sample",
]
