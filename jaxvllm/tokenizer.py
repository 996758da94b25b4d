"""Tokenizer: text to ids and back, chat templates; from a Hugging Face folder or a GGUF file.

transformers is imported only where it does more than `tokenizers` and Jinja do: its import costs seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jaxvllm.gguf_tokenizer import build_tokenizer, special_token
from scheduler.field_checks import as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FOLDER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# What the code in a template may raise, mostly for messages that its author did not think of: content that is None.
_TEMPLATE_DEFECTS = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
# Settings of tokenizer_config.json with which transformers changes what tokenizer.json says.
_CHANGING_SETTINGS = ("fast_tokenizer_files", "fix_mistral_regex", "split_special_tokens", "tokenizer_truncation")


class Tokenizer:
    """One model's tokenizer.

    Attributes:
      backend: the Rust tokenizer, what the incremental detokenizer needs.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
        load_hf: Callable[[], PreTrainedTokenizerFast],
        origin: str,
    ) -> None:
        """Wrap a backend.

        Args:
          special_tokens: text of bos_token, eos_token, ... by name, those that the model has.
          chat_template: the model's own; a dict has several by name.
          load_hf: makes the same tokenizer of transformers.
          origin: the folder or file, for messages.
        """
        self.backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        self._load_hf = load_hf
        self._origin = origin
        _remove_limits(backend)

    @cached_property
    def hf(self) -> PreTrainedTokenizerFast:
        """The transformers tokenizer, what Engine.get_tokenizer() hands out."""
        hf = self._load_hf()
        _remove_limits(hf.backend_tokenizer)
        return hf

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder.

        tokenizer.json is taken as it is; transformers' per-model classes, which rebuild parts of it, only serve
        folders that have none.

        Raises: ValueError if there is none or it cannot be read.
        """
        if not any((folder / name).exists() for name in _FOLDER_FILES):
            raise ValueError(
                f"{folder}: no tokenizer found (looked for {', '.join(_FOLDER_FILES)}); add the files, name another "
                "folder with tokenizer=..., or set skip_tokenizer_init=True and give token ids"
            )
        try:
            read = _read_complete(folder)
        except Exception as error:  # The Rust side raises plain Exception for a broken tokenizer.json.
            raise _unreadable(folder, error) from error
        if read is None:
            return cls._from_hf(_load_hf_folder(folder), str(folder))
        return cls(*read, lambda: _load_hf_folder(folder), str(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], origin: str) -> Tokenizer:
        """Build the tokenizer from a GGUF file's metadata.

        Raises: ValueError if its kind is not supported.
        """
        backend = build_tokenizer(metadata, origin)
        found = {key: special_token(metadata, name) for key, name in _GGUF_NAMES.items()}
        named = {key: token for key, token in found.items() if token is not None}
        template = metadata.get("tokenizer.chat_template")

        def load_hf() -> PreTrainedTokenizerFast:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast(
                tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **named
            )

        if not set(named.values()) <= _special_texts(backend):
            return cls._from_hf(load_hf(), origin)
        return cls(backend, named, template, load_hf, origin)

    @classmethod
    def _from_hf(cls, hf: PreTrainedTokenizerFast, origin: str) -> Tokenizer:
        """For a tokenizer that transformers has to complete."""
        return cls(hf.backend_tokenizer, hf.special_tokens_map, hf.chat_template, lambda: hf, origin)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id that encode() puts in front if the model wants one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The primary end id."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        """The id of a special token; None without one, or if the vocabulary lacks it."""
        token = self._special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether apply_chat_template() works without a template of the caller's."""
        return bool(self._chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. Special tokens that are spelled out in the text become their ids, as in vLLM.

        Args:
          add_special_tokens: put bos (and eos) where the model's files ask for them.

        Raises: ValueError for half of a surrogate pair, which is no character.
        """
        # One text of a batch, for encode() would keep every other thread from running: seconds with megabytes of text.
        try:
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            as_text("the text", text)  # says what is wrong
            raise

    @cached_property
    def max_chars_per_token(self) -> int | None:
        """A text of c characters has at least c divided by this tokens; None if nothing is certain."""
        return longest_token(self.backend)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; bytes that are no character yet show as U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """One conversation as the prompt text that the model was trained on.

        Encode it with add_special_tokens=False: the template writes bos itself.

        Raises: ValueError if there is no template or it refuses the messages.
        """
        from jinja2 import TemplateError

        from jaxvllm.chat_template import can_render, render

        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                f"{self._origin}: the model has no chat template; give chat_template=..., or use generate() with a "
                "plain prompt"
            )
        for tool in tools or ():
            if not isinstance(tool, Mapping):
                raise ValueError(f"tools must be a list of dicts that describe a function each, got {tool!r} in it.")
        plain = [dict(message) for message in messages]
        tool_list = [dict(tool) for tool in tools] if tools else None
        template = self._chat_template if chat_template is None else chat_template
        has_names = isinstance(self._chat_template, dict)  # chat_template may be one of them
        is_usual = not has_names and not continue_final_message and can_render(plain, tool_list, template_kwargs)
        try:
            if is_usual and isinstance(template, str):
                return render(
                    template,
                    plain,
                    tools=tool_list,
                    add_generation_prompt=add_generation_prompt,
                    variables={**self._special_tokens, **template_kwargs},
                )
            text = self.hf.apply_chat_template(
                plain,
                chat_template=chat_template,
                tools=tool_list,  # pyright: ignore[reportArgumentType]  # dicts, of any value
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_kwargs,
            )
        except (TemplateError, *_TEMPLATE_DEFECTS) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return text


def _read_complete(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None] | None:
    """(backend, special tokens, chat template) of a folder; None where transformers would add to tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.exists() or (folder / "additional_chat_templates").exists():
        return None
    config = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # else what this older file says is in the newer one
        config |= _read_object(folder / "special_tokens_map.json")
    if any(key in config for key in _CHANGING_SETTINGS):
        return None
    backend = tokenizers.Tokenizer.from_file(str(file))
    added = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    if any(int(i) not in added or not _is_same(token, added[int(i)]) for i, token in listed.items()):
        return None
    named = {key: _text(config[key]) for key in _NAMED_TOKENS if config.get(key) is not None}
    special = [
        _text(value) for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)
    ]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        tokens = config.get(key) or []
        special += [_text(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.exists() else config.get("chat_template")
    is_complete = (
        backend.padding is None and isinstance(template, str | None) and set(special) <= _special_texts(backend)
    )
    return (backend, {key: text for key, text in named.items() if text}, template) if is_complete else None


def _load_hf_folder(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").exists() else AutoTokenizer
    try:
        hf = loader.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # as above
        raise _unreadable(folder, error) from error
    if not hf.is_fast:
        raise ValueError(f"{folder}: {type(hf).__name__} has no fast version; add a tokenizer.json to the folder")
    return hf


def _unreadable(folder: Path, error: Exception) -> ValueError:
    return ValueError(f"{folder}: the tokenizer cannot be read ({error}); download its files again")


def _read_object(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def _text(token: Any) -> str | None:
    """The text of a token as these files write it; None for what is none."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


def _is_same(token: Any, added: tokenizers.AddedToken) -> bool:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return _text(token) == added.content and all(
        flag not in token or token[flag] == getattr(added, flag) for flag in flags
    )


def _special_texts(backend: tokenizers.Tokenizer) -> set[str | None]:
    return {token.content for token in backend.get_added_tokens_decoder().values() if token.special}


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token can stand for; None where a token may swallow any number.

    Only for tokenizers that can spell every text: one that knows no word for something fuses it into one token.
    """
    parts = json.loads(backend.to_str())
    model, added = parts["model"], parts["added_tokens"]
    spells_all = _mentions(parts["pre_tokenizer"], "ByteLevel") or model.get("byte_fallback", False)
    if model["type"] != "BPE" or not spells_all or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    shrink = _normalizer_shrink(parts["normalizer"])
    if shrink is None:
        return None
    return shrink * max(map(len, backend.get_vocab(with_added_tokens=True)))


def _normalizer_shrink(normalizer: dict[str, Any] | None) -> int | None:
    """The most characters that a normalizer makes into one; None where there is no such limit, or it is not known."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        factors = [_normalizer_shrink(part) for part in normalizer["normalizers"]]
        return None if None in factors else math.prod(factor for factor in factors if factor is not None)
    if kind in ("NFC", "NFKC"):
        return 4  # no character decomposes into more
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return max(1, len(pattern)) if pattern and normalizer["content"] else None
    return 1 if kind in ("Prepend", "NFD", "NFKD") else None


def _mentions(part: Any, kind: str) -> bool:
    """Whether a part of tokenizer.json is of a type, or holds one that is."""
    if isinstance(part, list):
        return any(_mentions(item, kind) for item in part)
    return isinstance(part, dict) and (part.get("type") == kind or any(_mentions(v, kind) for v in part.values()))


def _remove_limits(backend: tokenizers.Tokenizer) -> None:
    """Some tokenizer.json files carry the settings of a training run: they would cut prompts without a word."""
    backend.no_truncation()
    backend.no_padding()
