"""The tokenizer of a GGUF file.

A file that holds the tokenizer.json of its checkpoint has exactly that tokenizer. One of byte-level BPE ("gpt2") is
built from its tokens and merges, if it is known how its texts are split into words (`SPLITS`). For other files
llama.cpp encodes and decodes; how texts are split it knows by name only, so its programs may encode a text differently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence as Seq
from functools import cached_property, partial
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slipstream.checkpoints import gguf_header
from slipstream.checkpoints.gguf_config import same_token
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.gguf_keys import WHOLE
from slipstream.checkpoints.llamacpp_library import LlamaModel
from slipstream.errors import LoadError
from slipstream.tokens.chat_template import chosen_template, render
from slipstream.tokens.folder_tokenizer import ROLES, FolderTokenizer

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, Seq[str]] = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "starcoder": [r"\p{N}", _GPT2],
    "llama-bpe": [_WORDS % r"\p{N}{1,3}"],
    "qwen2": [_WORDS % r"\p{N}"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
"""`tokenizer.ggml.pre` -> expressions whose matches are words, applied one after another: what a text is split into
before its bytes are joined by merges (llama-vocab.cpp of github.com/ggml-org/llama.cpp)."""

_WHOLE_WORDS = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
"""Kinds whose words are looked up before merges are applied, and whose texts begin with BOS unless the file says no."""
_ALIKE = {
    "llama-bpe": f"{_WHOLE_WORDS} dbrx smaug-bpe chatglm-bpe glm4 glm5",
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum modern-bert jina-v1-en jina-es jina-de roberta-bpe mpt olmo jais trillion "
    "granite-docling exaone4",
    "starcoder": "refact command-r codeshell exaone minerva-7b mellum2",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
}
SAME_SPLIT = {name: name for name in SPLITS} | {name: each for each, names in _ALIKE.items() for name in names.split()}
"""`tokenizer.ggml.pre` -> the name in `SPLITS` that splits a text in the same way."""
_COMMA = 11
"""What llama.cpp adds for BOS or EOS where a file names none: the comma of GPT-2."""


def gguf_tokenizer(header: GgufHeader) -> FolderTokenizer | GgufTokenizer | None:
    """The tokenizer of a file, None if it has none. Raises LoadError for one that cannot be read."""
    if not header.has_tokenizer:
        return None
    metadata = header.metadata
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre") or "default"
    if WHOLE not in metadata and not (kind == "gpt2" and split in SAME_SPLIT):
        try:
            return GgufTokenizer(LlamaModel(header, vocab_only=True))
        except LoadError as fault:
            what = f"the tokenizer of {header.path.name} ({kind}, {split}) is read by llama.cpp: {fault.what}"
            raise type(fault)(what, why=fault.why, fix=fault.fix) from fault
    try:
        backend = Tokenizer.from_str(str(metadata[WHOLE])) if WHOLE in metadata else _byte_level(header)
    except Exception as fault:  # the library raises bare Exception
        raise LoadError(
            f"the tokenizer in {header.path.name} cannot be read: {fault}", fix="convert the model again"
        ) from fault
    return _folder_tokenizer(header, backend)


def _byte_level(header: GgufHeader) -> Tokenizer:
    if (why := same_token(header)) is not None:
        raise ValueError(why)
    texts, metadata = header.token_texts, header.metadata
    split = metadata.get("tokenizer.ggml.pre") or "default"
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    whole = split in f"{_WHOLE_WORDS} glm4 glm5".split()
    backend = Tokenizer(models.BPE({text: i for i, text in texts.items()}, merges, ignore_merges=whole))
    words = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[SAME_SPLIT[split]]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_of])
    backend.decoder = decoders.ByteLevel()
    for kind in (gguf_header.CONTROL, gguf_header.UNKNOWN, gguf_header.USER_DEFINED):
        special, ids = kind != gguf_header.USER_DEFINED, sorted(header.tokens_of(kind))
        backend.add_tokens([AddedToken(texts[i], normalized=False, special=special) for i in ids])
    around = {"bos": split in _WHOLE_WORDS.split(), "eos": False}
    used = [role for role, given in around.items() if metadata.get(f"tokenizer.ggml.add_{role}_token", given)]
    ids_of = {role: i if (i := header.token_id(role)) in texts else _COMMA for role in used}
    if used:
        single = [*used[: "bos" in used], "$A", *used["bos" in used :]]
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *("$B" if part == "$A" else part for part in single)],
            special_tokens=[{"id": role, "ids": [i], "tokens": [texts[i]]} for role, i in ids_of.items()],
        )
    return backend


def _folder_tokenizer(header: GgufHeader, backend: Tokenizer) -> FolderTokenizer:
    backend.no_truncation()
    backend.no_padding()
    special, template = special_tokens(header), header.templates

    def load() -> Any:
        from transformers import PreTrainedTokenizerFast

        text = backend.to_str()
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), chat_template=template, **special)

    return FolderTokenizer(backend, special, template, load)


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """ "bos_token" -> "<s>", ... for the special tokens that a file names."""
    ids = {f"{role}_token": header.token_id(role) for role in ROLES}
    return {name: header.token_texts[i] for name, i in ids.items() if i is not None and i in header.token_texts}


class GgufTokenizer:
    """What is asked of a transformers tokenizer, by llama.cpp. As there, special tokens in a text are read as such."""

    def __init__(self, model: LlamaModel):
        self._model, self._lib = model, model.library
        header = model.header
        self.chat_template = header.templates
        self._texts, self._special = header.token_texts, special_tokens(header)
        self._ids = {text: i for i, text in self._texts.items()}
        self._control = header.tokens_of(gguf_header.CONTROL)
        for name in (f"{role}_token" for role in ROLES):
            text = self._special.get(name)
            setattr(self, name, text)
            setattr(self, f"{name}_id", None if text is None else self._ids[text])

    def __len__(self) -> int:
        return len(self._texts)

    @cached_property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        ids = sorted(self._model.header.tokens_of(gguf_header.CONTROL, gguf_header.USER_DEFINED) & self._texts.keys())
        return {i: AddedToken(self._texts[i], special=i in self._control) for i in ids}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, vocab = text.encode(), self._model.vocab
        call = partial(self._lib.llama_tokenize, vocab, data, len(data))
        ids: list[int] = _filled(ctypes.c_int32, call, (add_special_tokens, True), len(data) + 8)
        return ids

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
        ids = [token for token in ids if 0 <= token < self._model.vocab_size]  # any other would end the process
        vocab, lib, shown = self._model.vocab, self._lib, not skip_special_tokens
        if lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_BPE:  # of these, llama_detokenize cleans up spaces
            each = [partial(lib.llama_token_to_piece, vocab, token) for token in ids]
            text = b"".join(_filled(ctypes.c_char, call, (0, shown), 64) for call in each)
        else:
            given = (ctypes.c_int32 * len(ids))(*ids)
            call = partial(lib.llama_detokenize, vocab, given, len(ids))
            text = _filled(ctypes.c_char, call, (False, shown), 16 * len(ids) + 64)
        return text.decode("utf-8", errors="replace")

    def convert_tokens_to_ids(self, tokens: str | Seq[str]) -> Any:
        """The id of a token, or of each; that of the unknown token, or None, if there is no such token."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return self._ids.get(tokens, self._ids.get(self._special.get("unk_token", "")))

    def apply_chat_template(
        self, conversation: Any, tokenize: bool = True, add_generation_prompt: bool = False, **names: Any
    ) -> Any:
        """Text of a conversation (tokenize=False), or its ids. names: what else the template reads."""
        template = chosen_template(self.chat_template, bool(names.get("tools")))
        if not template:
            raise LoadError("the GGUF file has no chat template", fix="give a plain prompt")
        text = render(template, conversation, add_generation_prompt, **self._special | names)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _filled(kind: Any, call: Callable[..., int], more: tuple[Any, ...], room: int) -> Any:
    """What a function of llama.cpp puts into an array. It returns how much that is, or minus how much it would be."""
    for _ in range(2):
        out = (kind * room)()
        if (count := call(out, room, *more)) >= 0:
            return out[:count]
        room = -count
    raise LoadError("llama.cpp cannot encode or decode a text", fix="pass token ids, or a tokenizer to LLM")
