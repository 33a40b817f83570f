"""The tokenizer of a GGUF file.

A file that holds the tokenizer.json of its checkpoint (key `tokenizer.huggingface.json` of the format) has exactly that
tokenizer. One of byte-level BPE (`tokenizer.ggml.model` is "gpt2") is built from its tokens and merges, if it is known
how its texts are split into words (`SPLITS`). With others, llama.cpp encodes and decodes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slipstream.errors import LoadError
from slipstream.models.folder_tokenizer import FolderTokenizer
from slipstream.models.gguf_header import CONTROL, USER_DEFINED, GgufHeader, read_header
from slipstream.models.gguf_shape import token_id, token_texts, tokens_of_type
from slipstream.models.llamacpp_library import LlamaModel

WHOLE = "tokenizer.huggingface.json"
"""Key of the checkpoint's tokenizer.json."""

TEMPLATE = "tokenizer.chat_template"

ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""Special tokens: our name -> that of GGUF."""


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, Seq[str]] = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "starcoder": [r"\p{N}", _GPT2],
    "llama-bpe": [_WORDS % r"\p{N}{1,3}"],
    "qwen2": [_WORDS % r"\p{N}"],
}
"""`tokenizer.ggml.pre` -> expressions whose matches are words, applied one after another: what a text is split into
before its bytes are joined by merges (llama-vocab.cpp of github.com/ggml-org/llama.cpp)."""


class AddedToken(NamedTuple):
    """A token that was added to the vocabulary; special: it is not text."""

    content: str
    special: bool


def gguf_tokenizer(source: str | Path) -> FolderTokenizer | GgufTokenizer | None:
    """The tokenizer of a file, None if it has none. Raises LoadError for one that cannot be read."""
    header = read_header(source)
    if not header.has_tokenizer:
        return None
    if WHOLE in header.metadata:
        return _whole(header)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2" and header.metadata.get("tokenizer.ggml.pre") in SPLITS:
        return _folder_tokenizer(header, _byte_level(header))
    return GgufTokenizer(LlamaModel(source, vocab_only=True))


def _byte_level(header: GgufHeader) -> Tokenizer:
    """Byte-level BPE from the tokens and merges of a file."""
    texts, metadata = token_texts(header), header.metadata
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    try:
        backend = Tokenizer(models.BPE({text: i for i, text in texts.items()}, merges))
    except Exception as fault:  # the library raises bare Exception
        raise LoadError(
            f"the tokenizer of {header.path.name} cannot be built: {fault}", fix="convert the model again"
        ) from fault
    words = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[str(metadata["tokenizer.ggml.pre"])]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_of])
    backend.decoder = decoders.ByteLevel()
    for kind in (CONTROL, USER_DEFINED):
        ids = sorted(tokens_of_type(header, kind))
        backend.add_tokens([tokenizers.AddedToken(texts[i], normalized=False, special=kind == CONTROL) for i in ids])
    first = token_id(header, "bos")
    if metadata.get("tokenizer.ggml.add_bos_token") and first is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{texts[first]} $A",
            pair=f"{texts[first]} $A {texts[first]} $B",
            special_tokens=[(texts[first], first)],
        )
    return backend


def _whole(header: GgufHeader) -> FolderTokenizer:
    text = str(header.metadata[WHOLE])
    try:
        backend = Tokenizer.from_str(text)
    except Exception as fault:  # the library raises bare Exception
        raise LoadError(
            f"the tokenizer in {header.path.name} cannot be read: {fault}", fix="convert the model again"
        ) from fault
    return _folder_tokenizer(header, backend)


def _folder_tokenizer(header: GgufHeader, backend: Tokenizer) -> FolderTokenizer:
    backend.no_truncation()
    backend.no_padding()
    special, template = special_tokens(header), header.metadata.get(TEMPLATE)

    def load() -> Any:
        from transformers import PreTrainedTokenizerFast

        text = backend.to_str()
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), chat_template=template, **special)

    return FolderTokenizer(backend, special, template, load)


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """ "bos_token" -> "<s>", ... for the special tokens that a file names."""
    texts = token_texts(header)
    ids = {f"{ours}_token": token_id(header, theirs) for ours, theirs in ROLES.items()}
    return {name: texts[i] for name, i in ids.items() if i is not None and i in texts}


class GgufTokenizer:
    """What is asked of a tokenizer of transformers, by llama.cpp. Special tokens in a text are read as such, as
    transformers does."""

    def __init__(self, model: LlamaModel):
        self._model, self._lib = model, model.library
        header = model.header
        self.chat_template: str | None = header.metadata.get(TEMPLATE)
        self._texts, self._special = token_texts(header), special_tokens(header)
        self._ids = {text: i for i, text in self._texts.items()}
        self._control = tokens_of_type(header, CONTROL)
        self.all_special_ids = sorted(self._control)
        self._added = tokens_of_type(header, USER_DEFINED)
        for name in (f"{role}_token" for role in ROLES):
            text = self._special.get(name)
            setattr(self, name, text)
            setattr(self, f"{name}_id", None if text is None else self._ids[text])

    def __len__(self) -> int:
        return len(self._texts)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return dict(self._ids)

    @cached_property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Id -> added token."""
        ids = sorted(self._control | self._added)
        return {i: AddedToken(self._texts[i], i in self._control) for i in ids if i in self._texts}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        data = text.encode()
        room = len(data) + 8
        for _ in range(2):  # a text has at most as many tokens as bytes, mostly
            ids = (ctypes.c_int32 * room)()
            count = self._lib.llama_tokenize(self._model.vocab, data, len(data), ids, room, add_special_tokens, True)
            if count >= 0:
                return list(ids[:count])
            room = -count
        raise LoadError(f"llama.cpp cannot encode a text of {len(data)} bytes", fix="pass token ids")

    def decode(
        self,
        token_ids: int | Seq[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Text of ids. Spaces are not cleaned up."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        if skip_special_tokens:  # before: a special token would keep the space of the first word
            ids = [token for token in ids if token not in self._control]
        given = (ctypes.c_int32 * len(ids))(*ids)
        room = 16 * len(ids) + 64
        for _ in range(2):
            out = ctypes.create_string_buffer(room)
            count = self._lib.llama_detokenize(
                self._model.vocab, given, len(ids), out, room, False, not skip_special_tokens
            )
            if count >= 0:
                return out.raw[:count].decode("utf-8", errors="replace")
            room = -count
        raise LoadError(f"llama.cpp cannot decode {len(ids)} tokens", fix="pass a tokenizer: LLM(..., tokenizer=...)")

    def convert_tokens_to_ids(self, tokens: str | Seq[str]) -> Any:
        """The id of a token, or of each; that of the unknown token, or None, if there is no such token."""
        unknown = self._ids.get(self._special.get("unk_token", ""))
        if isinstance(tokens, str):
            return self._ids.get(tokens, unknown)
        return [self._ids.get(token, unknown) for token in tokens]

    def apply_chat_template(
        self, conversation: Any, tokenize: bool = True, add_generation_prompt: bool = False, **names: Any
    ) -> Any:
        """Text of a conversation (tokenize=False), or its ids. names: what else the template reads."""
        from slipstream.models.chat_template import render

        if not self.chat_template:
            raise LoadError("the GGUF file has no chat template", fix="give a plain prompt")
        text = render(self.chat_template, conversation, add_generation_prompt, **self._special | names)
        return self.encode(text, add_special_tokens=False) if tokenize else text
