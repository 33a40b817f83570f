"""`FolderTokenizer`: the tokenizer of a folder, read by the tokenizers library alone.

Importing transformers takes as long as everything else that a short request needs, and is not necessary for a folder
whose tokenizer.json is the complete tokenizer. transformers is used for folders with settings that `open_folder` does
not know.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slipstream.checkpoints.checkpoint import CONFIG, Checkpoint, read_once
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import reading

CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Values of tokenizer_class with which transformers uses tokenizer.json unchanged. Most other classes rebuild it."""

OTHER_CLASSES = (
    "mistral", "mistral3", "ministral3", "mixtral", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip
"""Model types for which transformers may choose or change the tokenizer, regardless of the folder."""

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Roles of special tokens, as transformers calls them."""
_NAMED = tuple(f"{role}_token" for role in ROLES)
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FURTHER = {
    "added_tokens_decoder", "add_prefix_space", "backend", "chat_template", "clean_up_tokenization_spaces", "is_local",
    "legacy", "local_files_only", "max_length", "model_input_names", "model_max_length", "name_or_path",
    "padding_side", "processor_class", "stride", "tokenizer_class", "truncation_side", "truncation_strategy",
}  # fmt: skip
"""Other settings of a tokenizer that are read here, or that change neither ids nor text."""

_ADDITIONS = ("added_tokens.json", "additional_chat_templates")
"""Files and folders beside tokenizer.json that only transformers reads."""

_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Attributes of an added token."""

LONG = 10_000
"""For texts of more characters, `encode_batch` is called, because `encode` would block other threads too long."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that transformers treats as one field, by copying its value to the others."""


class FolderTokenizer:
    """Encodes, decodes and applies the chat template as the folder's transformers tokenizer would.

    Every other method comes from the transformers tokenizer. It is loaded at the first such call and answers all calls
    from then on, so a change to it, such as an added token, takes effect in every method.

    special  text of each special token that the folder names, such as {"bos_token": "<s>"}.
    load     function that returns the transformers tokenizer.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special: Mapping[str, str],
        template: str | Mapping[str, str] | None,
        load: Callable[[], Any],
    ):
        self._backend, self._special, self._template, self._load = backend, special, template, load
        self._whole: Any = None

    @property
    def transformers(self) -> Any:
        if self._whole is None:
            self._whole = self._load()
        return self._whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # methods of protocols such as copy and pickle
            raise AttributeError(name)
        if self._whole is None and name.removesuffix("_id") in _NAMED:
            token = self._special.get(name.removesuffix("_id"))
            return self.convert_tokens_to_ids(token) if token is not None and name.endswith("_id") else token
        return getattr(self.transformers, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self.transformers, name, value)

    def __call__(self, *given: object, **named: object) -> Any:
        return self.transformers(*given, **named)

    def __reduce__(self) -> Any:
        """Copy or pickle the transformers tokenizer instead."""
        return copy, (self.transformers,)

    @property
    def backend_tokenizer(self) -> Tokenizer:
        return self._backend if self._whole is None else self._whole.backend_tokenizer

    def __len__(self) -> int:
        """Number of tokens, including added tokens."""
        return len(self._whole) if self._whole is not None else self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> Any:
        return self._template if self._whole is None else self._whole.chat_template

    def encode(self, text: object, add_special_tokens: bool = True, **more: object) -> list[int]:
        if self._whole is not None or more or type(text) is not str:
            return self.transformers.encode(text, add_special_tokens=add_special_tokens, **more)  # type: ignore[no-any-return]
        if len(text) > LONG:
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **more: Any,
    ) -> Any:
        plain = type(token_ids) is list and all(type(token) is int for token in token_ids)
        if self._whole is not None or more or clean_up_tokenization_spaces or not plain:
            more["clean_up_tokenization_spaces"] = clean_up_tokenization_spaces
            return self.transformers.decode(token_ids, skip_special_tokens=skip_special_tokens, **more)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: object) -> Any:
        """Return the id of a token; for a text that is no token, the id of the unknown token."""
        if self._whole is not None or type(tokens) is not str:
            return self.transformers.convert_tokens_to_ids(tokens)
        token_id = self._backend.token_to_id(tokens)
        if token_id is None and (unknown := self._special.get("unk_token")) is not None:
            token_id = self._backend.token_to_id(unknown)
        return token_id

    def apply_chat_template(self, conversation: Any, **named: Any) -> Any:
        """Return the text of a conversation (tokenize=False), or its ids."""
        if self._whole is None and named.get("tokenize") is False and _is_plain(conversation):
            from slipstream.tokens.chat_template import choose_template, names_read, render

            template = choose_template(self._template, named.get("tools") is not None)
            names = {name: value for name, value in named.items() if name not in ("tokenize", "add_generation_prompt")}
            read = names.keys() <= {"tools", *names_read(template)} - {"messages"}
            if template and read and _are_objects(names.get("tools", [])):
                return render(
                    template, conversation, named.get("add_generation_prompt", False), **{**self._special, **names}
                )
        return self.transformers.apply_chat_template(conversation, **named)


def _is_plain(conversation: Any) -> bool:
    """Return whether `conversation` is a list of messages that reach the template unchanged."""
    if not conversation or not _are_objects(conversation):
        return False
    return not any(name in _REASONING or value is None for message in conversation for name, value in message.items())


def _are_objects(value: object) -> bool:
    return type(value) is list and all(type(each) is dict for each in value)


def backend_of(tokenizer: object) -> Tokenizer | None:
    """Return the `tokenizers.Tokenizer` in a `FolderTokenizer` or transformers' fast tokenizer; None for others."""
    if not isinstance(tokenizer, FolderTokenizer):
        from transformers import PreTrainedTokenizerFast  # imported here: it takes long

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            return None
    return tokenizer.backend_tokenizer


@read_once
def backend_in(checkpoint: Checkpoint) -> Tokenizer | None:
    """Read the tokenizer.json of a folder; None if the folder has none. Raises LoadError for an invalid file."""
    file = checkpoint.place / "tokenizer.json"
    if not file.is_file():
        return None
    with reading(f"{file} cannot be read", "download or export it again"):
        return Tokenizer.from_file(str(file))


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


def open_folder(checkpoint: Checkpoint) -> FolderTokenizer | None:
    """Return the tokenizer of a folder; None if only transformers can read this folder.

    Raises LoadError for an invalid tokenizer.json or damaged settings, and OSError or UnicodeDecodeError for an
    unreadable chat template."""
    settings, folder = settings_of(checkpoint), checkpoint.place
    if settings.get("tokenizer_class") not in CLASSES or (backend := backend_in(checkpoint)) is None:
        return None
    model_type = checkpoint.json(CONFIG).get("model_type")
    if model_type in OTHER_CLASSES or any((folder / name).exists() for name in _ADDITIONS):
        return None
    if backend.padding is not None:
        settings.setdefault("pad_token", backend.padding["pad_token"])
    file = folder / "chat_template.jinja"  # takes precedence over the settings
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if not settings.keys() <= {*_NAMED, *_LISTS, *_FURTHER} or not isinstance(template, (str, type(None))):
        return None
    if settings.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        return None
    named = {name: content_of(settings[name]) for name in _NAMED if settings.get(name) is not None}
    if not _adds_nothing(backend, settings, named.values()):
        return None
    backend.no_truncation()
    backend.no_padding()
    special = {name: str(token) for name, token in named.items()}
    return FolderTokenizer(backend, special, template, partial(transformers_tokenizer, folder))


def _adds_nothing(backend: Tokenizer, settings: JsonMapping, named: Iterable[str | None]) -> bool:
    """Return whether all tokens that the folder names are already added tokens in its tokenizer.json. Otherwise
    transformers would add them to the vocabulary."""
    known = backend.get_added_tokens_decoder().values()
    lists = [settings.get(name) or [] for name in _LISTS]
    if not all(isinstance(each, list) for each in lists):
        return False
    wanted = [*named, *(content_of(token) for each in lists for token in each)]
    same = [{flag: getattr(token, flag) for flag in _FLAGS} for token in known]
    decoder = settings.get("added_tokens_decoder", {})
    return {token.content for token in known}.issuperset(wanted) and (
        isinstance(decoder, dict) and all(token in same for token in decoder.values())
    )


def settings_of(checkpoint: Checkpoint) -> JsonObject:
    """Return a folder's tokenizer settings, merged from several files as in transformers. Raises ConfigError."""
    settings = dict(checkpoint.json("tokenizer_config.json"))
    if "added_tokens_decoder" not in settings:
        settings |= checkpoint.json("special_tokens_map.json")
    return settings


def content_of(token: object) -> str | None:
    """Return a token's text from a configuration: a string, or an object with "content"; None for the rest."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
