from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.engine.conftest import CHAT_TEMPLATE, write_model
from tests.engine.tokenizers_fixture import k_bytes
from tests.server.process import Server, running_server

BOS = 264
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}|{{ c.function.arguments | tojson }}>{% endfor %}"
    "\n{% endfor %}\x03"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("k_bytes"))


@pytest.fixture(scope="session")
def bos_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K-bytes with <s>=264, which the tokenizer puts in front; the chat template writes it too."""
    folder = write_model(tmp_path_factory.mktemp("k_bytes_bos"), config={"vocab_size": 265})
    tokenizer: Tokenizer = k_bytes()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = (folder / "tokenizer_config.json").read_text()
    config = config.replace('"chat_template": "', '"bos_token": "<s>", "chat_template": "<s>')
    (folder / "tokenizer_config.json").write_text(config)
    assert "<s>" + CHAT_TEMPLATE[:10] in config
    return folder


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    """T-succ: the next token is the last one + 1."""
    with running_server(model_folder, "successor", "--served-model-name", "m", "second-name") as server:
        yield server


@pytest.fixture(scope="session")
def slow_server(model_folder: Path) -> Iterator[Server]:
    """T-succ with 5 ms a step."""
    options = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--disable-uvicorn-access-log")
    with running_server(model_folder, "slow_5ms", *options) as server:
        yield server


@pytest.fixture(scope="session")
def parrot(model_folder: Path) -> Iterator[Server]:
    """It says what stands between the bytes 1 and 2 of the prompt, in calls of tools too; byte 3 ends the prompt."""
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", TOOLS_TEMPLATE)
    with running_server(model_folder, "parrot", *options) as server:
        yield server
