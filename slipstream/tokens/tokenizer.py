"""`Tokenizer`: what Slipstream needs of a tokenizer. The tokenizers of transformers have it, and our own."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The template of conversations; None or "" if there is none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> Any:
        """The text of token ids, a string; the annotation of transformers allows lists of strings, too."""
        ...

    def apply_chat_template(
        self, conversation: object, *, tokenize: bool = True, add_generation_prompt: bool = False, **names: object
    ) -> Any:
        """The text of a conversation, a list of messages, if `tokenize` is False. names: what else the template
        reads."""
        ...
