import json
from pathlib import Path

import pytest

from tests.engine.tokenizers_fixture import k_bytes
from tests.tiny_config import T_TINY

LLAMA = T_TINY | {"max_position_embeddings": 1024}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def write_model(
    folder: Path, *, config: dict | None = None, generation_config: dict | None = None, eos="<eos>"
) -> Path:
    """A model folder without weights: what the front end reads of a model."""
    (folder / "config.json").write_text(json.dumps(LLAMA | (config or {})))
    k_bytes().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    if eos is not None:
        tokenizer_config["eos_token"] = eos
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("k_bytes"))
