"""Chat templates and tokenizer folders come out as in transformers, which is not imported for the usual ones."""

import inspect
import json
from pathlib import Path

import jinja2
import pytest
import transformers
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from jaxvllm.chat import TRANSFORMERS_ARGUMENTS
from jaxvllm.chat_template import can_render, render
from jaxvllm.server.chat_prompt import _RESERVED
from jaxvllm.tokenizer import Tokenizer
from tests.engine.tokenizers_fixture import k_bytes

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "héllo\n", "name": None},
    {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [{"id": 3, "args": {"b": [1.5, True], "a": "é<"}}],
    },
    {"role": "tool", "content": "7"},
    {"role": "user", "content": "  so?  "},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n    {% if loop.first %}\n  [{{ m.role }}]{% endif %}\n"
    "{{ m['content'] | trim }}\n{% endfor %}\n{% if add_generation_prompt %}go{% endif %}",
    "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2, sort_keys=True) }}{% endfor %}{{ tools | tojson }}",
    "{% set ns = namespace(n=0, self=2) %}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.self }}{{ 'name' in m }}{% if ns.n > 3 %}{% break %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{{ m.thinking }}|"
    "{{ m.reasoning_content }}{% endfor %}",
    "{{ documents is none }}{{ eos_token is defined }}{{ extra }}{{ dict(a=extra) }}{{ dict.fromkeys([1]) }}",
    "{% macro f(x) -%} <{{ x }}> {%- endmacro %}{{ f(messages[-1].content) }}{{ strftime_now('%Y') }}",
]
REFUSED = [
    "{{ raise_exception('no: ' ~ messages|length) }}",
    "{% if %}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ namespace(_x=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ dict.__class__ }}",
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", TEMPLATES)
def test_template_renders_as_transformers_renders_it(template, tools):
    variables = {"bos_token": "<s>", "extra": ["x", None, 2.5]}
    messages = [{k: v for k, v in m.items() if v is not None} for m in MESSAGES]  # as its apply_chat_template does
    expected, _ = render_jinja_template([messages], tools, None, template, add_generation_prompt=True, **variables)
    assert render(template, MESSAGES, tools=tools, add_generation_prompt=True, variables=variables) == expected[0]


def test_documents_are_rendered_as_transformers_renders_them():
    template = "{% for d in documents or [] %}{{ d.title }}: {{ d | tojson }}{% endfor %}{{ documents is none }}"
    documents = [{"title": "é", "text": "x"}, {"title": "2", "n": [1]}]
    expected, _ = render_jinja_template([MESSAGES], None, documents, template)
    variables = {"documents": documents}
    assert render(template, MESSAGES, tools=None, add_generation_prompt=False, variables=variables) == expected[0]


@pytest.mark.parametrize("template", REFUSED)
def test_template_that_transformers_refuses_is_refused(template):
    errors = []
    for call in (
        lambda: render(template, MESSAGES, tools=None, add_generation_prompt=False, variables={}),
        lambda: render_jinja_template([MESSAGES], None, None, template),
    ):
        try:
            errors.append(("text", call()))
        except jinja2.TemplateError as error:
            errors.append((type(error), None))
    assert errors[0][0] == errors[1][0] or errors[0][0] != "text"


@pytest.mark.parametrize(
    ("messages", "variables"),
    [([], {}), ([{"role": object()}], {}), ([{"role": "user"}], {"padding": True}), ([{1: "user"}], {})],
)
def test_what_is_not_plain_is_left_to_transformers(messages, variables):
    assert not can_render(messages, None, variables)


def test_what_transformers_takes_for_an_argument_of_its_own_is_no_variable_of_a_template():
    named = set(inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
    assert named <= _RESERVED
    ours = {"self", "tools", "documents", "chat_template", "tokenize"}
    ours |= {"add_generation_prompt", "continue_final_message"}
    assert named - ours <= TRANSFORMERS_ARGUMENTS


def write_folder(folder: Path, config: dict, special_tokens_map: dict | None, jinja: str | None) -> None:
    tokenizer = k_bytes()
    tokenizer.add_special_tokens([AddedToken("<bos>", lstrip=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special_tokens_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)


BOS = {"content": "<bos>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ image_token }}<tag>"
FOLDERS = {
    "plain": (True, {"eos_token": "<eos>", "chat_template": TEMPLATE, "add_bos_token": True}, None, None),
    "token as a dict": (True, {"bos_token": BOS | {"__type": "AddedToken"}, "chat_template": TEMPLATE}, None, None),
    "template in a file": (True, {"eos_token": "<eos>", "chat_template": "no"}, None, TEMPLATE),
    "special_tokens_map": (True, {"chat_template": TEMPLATE}, {"eos_token": "<eos>", "bos_token": BOS}, None),
    "map is old": (True, {"added_tokens_decoder": {"264": BOS}, "eos_token": "<eos>"}, {"bos_token": "<x>"}, TEMPLATE),
    "extra tokens": (True, {"additional_special_tokens": ["<bos>"], "pad_token": "<eos>"}, None, TEMPLATE),
    "token that is not special yet": (False, {"eos_token": "<tag>"}, None, TEMPLATE),
    "token that is missing": (False, {"eos_token": "</s>"}, None, TEMPLATE),
    "added token that differs": (False, {"added_tokens_decoder": {"264": BOS | {"lstrip": False}}}, None, TEMPLATE),
    "image token that is missing": (False, {"image_token": "<img>"}, None, TEMPLATE),
    "several templates": (False, {"chat_template": [{"name": "default", "template": TEMPLATE}]}, None, None),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_reads_as_transformers_reads_it(tmp_path, monkeypatch, name):
    is_simple, *files = FOLDERS[name]
    write_folder(tmp_path, *files)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    if is_simple:
        monkeypatch.setattr("jaxvllm.tokenizer._load_hf_folder", lambda folder: pytest.fail("imported transformers"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "<bos>stone <bos><eos> on<tag>s</s><img>"
    assert tokenizer.encode(text) == reference.encode(text)
    ids = reference.encode(text)
    for skip in (True, False):
        expected = reference.backend_tokenizer.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (reference.eos_token_id, reference.bos_token_id)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == reference.apply_chat_template(messages, tokenize=False)
