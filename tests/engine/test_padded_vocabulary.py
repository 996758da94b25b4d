"""Case C11 on two devices: what splitting the vocabulary pads is never drawn, listed or counted."""

from pathlib import Path

import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from tests.engine.dense import dense_logits, random_tensors, write_folder
from tests.tiny_config import T_TINY

PROMPT = list(range(40, 57))
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 256, "bucket_policy": "one_shape"}


def test_c11_two_devices_list_the_model_s_ids_and_no_pads(tmp_path: Path):
    """K-bytes has 264 ids; the rows beyond are zeros, whose logit beats the others, which are all negative.

    As in vLLM such an id may be drawn and has no text. What the engine itself would pad, the 268th row on two devices,
    would have the same logit: it would be drawn as often, and it would lower every logprob.
    """
    vocab_size = 267  # odd; tests/engine/test_reported_sampling.py has an even one on one device
    config = T_TINY | {"vocab_size": vocab_size}
    tensors = random_tensors(config)
    tensors["model.norm.weight"][:] = 1e-3
    probe = tensors | {"lm_head.weight": np.eye(vocab_size, config["hidden_size"], dtype=np.float32)}
    direction = np.sign(dense_logits(config, probe, PROMPT)[-1][: config["hidden_size"]])
    tensors["lm_head.weight"][:264] -= 5.0 * direction
    tensors["lm_head.weight"][264:] = 0
    with Engine(
        write_folder(tmp_path, config, tensors),
        device="cpu", tensor_parallel_size=2, max_logprobs=-1, kv_cache_memory_bytes=1 << 22, **SIZES,
    ) as engine:  # fmt: skip

        def run(**params):
            wanted = SamplingParams(**{"max_tokens": 3, "ignore_eos": True} | params)
            return engine.generate([PROMPT], wanted, use_tqdm=False)[0].outputs[0]

        greedy = run(temperature=0.0, logprobs=-1)
        hot = run(temperature=1.5, seed=3, max_tokens=200, logprobs=5)
    assert greedy.token_ids[0] == 264 and greedy.text == ""
    logits = dense_logits(config, tensors, PROMPT)[-1]
    assert logits[:264].max() < 0 == logits[264:].max()
    expected = logits - np.log(np.exp(logits).sum())
    assert sorted(greedy.logprobs[0]) == list(range(vocab_size))
    for token_id, entry in greedy.logprobs[0].items():
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-4)
    assert len(hot.token_ids) == 200 and max(hot.token_ids) < vocab_size
    assert max(token_id for position in hot.logprobs for token_id in position) < vocab_size
