"""Tokenizer: text to ids and back, chat templates; from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jaxvllm.gguf_tokenizer import build_tokenizer, special_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FOLDER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """One model's tokenizer.

    Attributes:
      hf: the transformers tokenizer, what Engine.get_tokenizer() hands out.
      backend: the Rust tokenizer under it, what the incremental detokenizer needs.
    """

    def __init__(self, hf: PreTrainedTokenizerFast, origin: str) -> None:
        self.hf = hf
        self.backend: tokenizers.Tokenizer = hf.backend_tokenizer
        self._origin = origin
        # Some tokenizer.json files carry the settings of a training run: they would cut prompts without a word.
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder.

        tokenizer.json is taken as it is; transformers' per-model classes, which rebuild parts of it, only serve
        folders that have none.

        Raises: ValueError if there is none or it cannot be read.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # 1 s: only who has a tokenizer pays

        if not any((folder / name).exists() for name in _FOLDER_FILES):
            raise ValueError(
                f"{folder}: no tokenizer found (looked for {', '.join(_FOLDER_FILES)}); add the files, name another "
                "folder with tokenizer=..., or set skip_tokenizer_init=True and give token ids"
            )
        loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").exists() else AutoTokenizer
        try:
            hf = loader.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # The Rust side raises plain Exception for a broken tokenizer.json.
            raise ValueError(f"{folder}: the tokenizer cannot be read ({error}); download its files again") from error
        if not hf.is_fast:
            raise ValueError(f"{folder}: {type(hf).__name__} has no fast version; add a tokenizer.json to the folder")
        return cls(hf, str(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], origin: str) -> Tokenizer:
        """Build the tokenizer from a GGUF file's metadata.

        Raises: ValueError if its kind is not supported.
        """
        from transformers import PreTrainedTokenizerFast

        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        hf = PreTrainedTokenizerFast(
            tokenizer_object=build_tokenizer(metadata, origin),
            chat_template=metadata.get("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            **{key: special_token(metadata, name) for key, name in names.items()},
        )
        return cls(hf, origin)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id that encode() puts in front if the model wants one."""
        return self._special_id(self.hf.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The primary end id."""
        return self._special_id(self.hf.eos_token)

    def _special_id(self, token: object) -> int | None:
        """The id of a special token's text; None without one, or if the vocabulary lacks it."""
        return None if token is None else self.backend.token_to_id(str(token))

    @property
    def has_chat_template(self) -> bool:
        """Whether apply_chat_template() works without a template of the caller's."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. Special tokens that are spelled out in the text become their ids, as in vLLM.

        Args:
          add_special_tokens: put bos (and eos) where the model's files ask for them.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

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

        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                f"{self._origin}: the model has no chat template; give chat_template=..., or use generate() with a "
                "plain prompt"
            )
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_kwargs,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return text
