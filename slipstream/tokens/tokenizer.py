"""`Tokenizer`: the interface that Slipstream needs. Transformers' tokenizers and ours implement it."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The chat template; None or "" if there is none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> Any:
        """Return the text of token ids as a string. (The return type is Any because transformers' annotation also
        allows lists of strings.)"""
        ...

    def apply_chat_template(
        self, conversation: object, *, tokenize: bool = True, add_generation_prompt: bool = False, **names: object
    ) -> Any:
        """Return the text of a list of messages, if `tokenize` is False. names: variables of the template."""
        ...
