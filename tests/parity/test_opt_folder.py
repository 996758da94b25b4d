"""facebook/opt-125m, the example of the project's beginning: a folder of that name, as the hub has it, just runs."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from jaxvllm import Engine, SamplingParams
from tests.engine.tokenizers_fixture import byte_letters

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
END = 2


@pytest.fixture(scope="module")
def opt(tmp_path_factory) -> tuple[Path, transformers.PreTrainedModel]:
    """A working directory with facebook/opt-125m in it (float16 in pytorch_model.bin alone), and the same in torch."""
    root = tmp_path_factory.mktemp("opt")
    folder = root / "facebook" / "opt-125m"
    folder.mkdir(parents=True)
    torch.manual_seed(3)
    config = transformers.OPTConfig(
        vocab_size=264, hidden_size=48, word_embed_proj_dim=48, ffn_dim=58, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.half()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    # What the hub's file says, and no more: tied embeddings, for one, are OPT's default.
    said = ("vocab_size", "hidden_size", "word_embed_proj_dim", "ffn_dim", "num_hidden_layers", "num_attention_heads")
    stored = {name: getattr(config, name) for name in said} | {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu", "bos_token_id": END,
        "eos_token_id": END, "pad_token_id": 1, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
        "max_position_embeddings": 64, "torch_dtype": "float16", "prefix": "</s>",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stored))
    vocab = [*SPECIAL, *byte_letters(), "He", "ll"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (folder / "merges.txt").write_text("#version: 0.2\nH e\nl l\n")
    tokenizer_config = {"errors": "replace", "add_prefix_space": False, "add_bos_token": True}
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | names))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    return root, model.float()


def test_a_folder_named_facebook_opt_125m_gives_the_greedy_ids_of_transformers(opt, monkeypatch):
    root, model = opt
    monkeypatch.chdir(root)
    with Engine("facebook/opt-125m", device="cpu") as engine:
        [sampled] = engine.generate("Hello")
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        [output] = engine.generate("Hello", greedy, use_tqdm=False)
    prompt = [END, 4 + 256, 4 + 257, 4 + ord("o")]
    assert sampled.prompt_token_ids == output.prompt_token_ids == prompt
    assert 1 <= len(sampled.outputs[0].token_ids) <= 16 and sampled.finished
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=-1)
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
