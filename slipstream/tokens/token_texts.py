"""`TokenTexts`: the bytes that each token of a tokenizer writes, and how the tokenizer splits text that follows other
text.

Tokenizers spell the same token differently: " the" is `Ġthe` in byte-level BPE, `▁the` in SentencePiece, and `the` in
WordPiece, where tokens that continue a word begin with `##`. So tokens of different tokenizers are compared by the
bytes that they write. A token may also write a part of a character: `<0xF0>` if a tokenizer falls back to bytes, `ð` in
byte-level BPE.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer

from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import PairError
from slipstream.tokens.folder_tokenizer import backend_of

SHARED_ROLES = ("bos", "eos")
"""Roles of special tokens that count as common to two tokenizers even if the tokens' texts differ."""

PROBES = (" The", " it's", " 42,", "\n  x", "  y")
"""Texts that a tokenizer must not change: with capitals, punctuation, line breaks and spaces."""

WORDS_REMEMBERED = 2**16


@dataclass(frozen=True)
class Spelling:
    """How the tokens of a vocabulary are spelled.

    byte_level  whether each character stands for a byte (as in GPT-2).
    space       character that stands for a space; "": no character does.
    byte_names  whether `<0x41>` is the byte 0x41.
    prefix      in WordPiece, prefix of tokens that continue a word; all other tokens begin with a space. Else None.
    """

    byte_level: bool = False
    space: str = ""
    byte_names: bool = False
    prefix: str | None = None

    def written(self, token: str) -> bytes:
        """Return the bytes that a token writes in the middle of a text."""
        if self.byte_level and all(char in BYTE_OF for char in token):
            return bytes(BYTE_OF[char] for char in token)
        if self.byte_names and is_byte_name(token):
            return bytes.fromhex(token[3:5])
        if self.prefix is not None:
            continues = self.prefix != "" and token.startswith(self.prefix)
            return (token[len(self.prefix) :] if continues else " " + token).encode()
        return (token.replace(self.space, " ") if self.space else token).encode()


def is_byte_name(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character in the alphabet of byte-level BPE. A printable byte is its own character; other
    bytes are characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


BYTE_OF = _bytes_of_characters()


def part_of_character(tokenizer: object, token: int) -> bytes | None:
    """Return the bytes of a token that writes a part of a character; None if the tokenizer does not show them."""
    backend = backend_of(tokenizer)
    name = None if backend is None else backend.id_to_token(token)
    return None if name is None else Spelling(byte_level=not is_byte_name(name), byte_names=True).written(name)


class TokenTexts:
    """The bytes of the tokens of a tokenizer. tokenizer: a fast tokenizer of transformers, or a `FolderTokenizer`. of:
    its model, for errors ("the draft model").

    written  for each id, the bytes that it writes; None for special and unknown tokens.
    special  ids of special tokens, by text.
    begin    ids that the tokenizer puts before every text, such as BOS.
    drops_space  whether decoding drops the space at the very beginning of a text.

    Raises PairError for tokenizers whose tokens cannot be read."""

    def __init__(self, tokenizer: Any, of: str):
        backend = backend_of(tokenizer)
        if backend is None:
            raise _unreadable(of, f"it is a {type(tokenizer).__name__}, not a fast tokenizer of transformers")
        described = json.loads(backend.to_str())
        model, decoders = described["model"], list(flat_parts(described["decoder"]))
        spelling = _spelling(decoders, of)
        added = backend.get_added_tokens_decoder()
        unknown = model.get("unk_token")
        if model.get("unk_id") is not None:  # Unigram has the index of the unknown token
            unknown = str(model["vocab"][model["unk_id"]][0])
        tokens = {id_: token for token, id_ in backend.get_vocab(with_added_tokens=True).items()}
        self.of = of
        self.written: list[bytes | None] = [None] * (1 + max(tokens, default=-1))
        for id_, token in tokens.items():
            if id_ in added:
                self.written[id_] = None if added[id_].special else added[id_].content.encode()
            elif token != unknown:
                self.written[id_] = spelling.written(token)
        self.special: Mapping[str, int] = {known.content: id_ for id_, known in added.items() if known.special}
        ids = {role: getattr(tokenizer, f"{role}_token_id") for role in SHARED_ROLES}
        self.roles = {role: id_ if isinstance(id_, int) else None for role, id_ in ids.items()}
        self.unknown = None if unknown is None else backend.token_to_id(unknown)
        self.drops_space = spelling.prefix is not None or any(_drops_space(decoder) for decoder in decoders)
        edited = _without_prefix(described)
        self._whole = _without_specials(described)
        self._middle = self._whole if edited == described else _without_specials(edited)
        word = next((data for data in self.id_of if data[:1] == b" " and data[1:].isalnum()), b"")
        if self.bytes_of(self.ids(word.decode())) != word:  # the tokenizer adds a prefix to each word, as in T5
            self._middle = self._whole
        around, specials = tokenizer.encode("x"), set(self.special.values())
        self.begin = tuple(around[: next((n for n, id_ in enumerate(around) if id_ not in specials), 0)])
        self.pieces = lru_cache(WORDS_REMEMBERED)(self._pieces)

    def ids(self, text: str, first: bool = False) -> list[int]:
        """Return the ids of a text that follows other text or, if `first`, begins a text."""
        return (self._whole if first else self._middle).encode(text, add_special_tokens=False).ids

    def _pieces(self, data: bytes, first: bool = False) -> tuple[int, ...]:
        """Return the ids of bytes, as `ids` does for text. The bytes need not be UTF-8: each byte of an incomplete
        character becomes a byte token, or is left out if the vocabulary has no token for this byte."""
        text, ids = data.decode("utf-8", "surrogateescape"), list[int]()
        for stray, run in groupby(text, lambda char: 0xDC80 <= ord(char) <= 0xDCFF):
            if stray:
                ids += [id_ for char in run if (id_ := self.id_of.get(bytes([ord(char) - 0xDC00]))) is not None]
            else:
                ids += self.ids("".join(run), first and not ids)
        return tuple(ids)

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The id of the token that writes these bytes. If several tokens write the same bytes, tokens such as `<0x41>`
        are ignored, because the tokenizer does not choose them for text."""
        ids: dict[bytes, int] = {}
        for id_, data in enumerate(self.written):
            if data and (data not in ids or is_byte_name(str(self._whole.id_to_token(ids[data])))):
                ids[data] = id_
        return ids

    def bytes_of(self, ids: list[int] | tuple[int, ...]) -> bytes:
        """Return the bytes that ids write; special and unknown ids write nothing."""
        return b"".join(self.text_of(id_) or b"" for id_ in ids)

    def text_of(self, id_: int) -> bytes | None:
        """Return the bytes that an id writes; None for special tokens, unknown ids and padding."""
        return self.written[id_] if id_ < len(self.written) else None

    def require_faithful(self) -> None:
        """Raise PairError if encoding and decoding change a text: capitals, spaces or line breaks are lost."""
        for probe in PROBES:
            ids = self.ids(probe)
            if self.unknown not in ids and (text := self.bytes_of(ids).decode("utf-8", "replace")) != probe:
                raise PairError(
                    f"the tokenizer of {self.of} does not preserve text: {probe!r} becomes {text!r}",
                    why="the draft model would read and write a different text from the target's",
                    fix="use a draft model whose tokenizer preserves text, or a drafter without a model: 'suffix'",
                )


def _unreadable(of: str, what: str) -> PairError:
    return PairError(
        f"the tokenizer of {of} cannot be compared with the other one: {what}",
        why="tokenizers are compared by the bytes of their tokens",
        fix="put a tokenizer.json next to the weights, or use a draft model with the target's tokenizer",
    )


def flat_parts(part: JsonMapping | None) -> Iterator[JsonObject]:
    """Yield the parts of a decoder, normalizer or pre-tokenizer, which may be a sequence of parts."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for name in ("decoders", "normalizers", "pretokenizers"):
            for each in part.get(name, ()):
                yield from flat_parts(each)
    else:
        yield part  # type: ignore[misc]


def _spelling(decoders: list[JsonObject], of: str) -> Spelling:
    kinds = {decoder["type"]: decoder for decoder in decoders}
    if "ByteLevel" in kinds:
        return Spelling(byte_level=True)
    if "WordPiece" in kinds:
        return Spelling(prefix=kinds["WordPiece"]["prefix"])
    if not kinds:
        return Spelling(prefix="")  # tokens are words, joined with spaces
    if not kinds.keys() <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise _unreadable(of, f"its decoder is {' and '.join(kinds)}")
    space = kinds["Metaspace"]["replacement"] if "Metaspace" in kinds else ""
    if "Replace" in kinds:
        replaced = kinds["Replace"]
        if replaced["content"] != " " or "String" not in replaced["pattern"]:
            raise _unreadable(of, f"its decoder replaces {replaced['pattern']} by {replaced['content']!r}")
        space = replaced["pattern"]["String"]
    return Spelling(space=space, byte_names="ByteFallback" in kinds)


def _drops_space(decoder: JsonMapping) -> bool:
    if decoder["type"] == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return bool(decoder["type"] == "Strip" and decoder["content"] == " " and decoder["start"] > 0)


def _without_specials(described: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer without the tokens that it puts around a text, padding and truncation."""
    return Tokenizer.from_str(json.dumps({**described, "post_processor": None, "padding": None, "truncation": None}))


def _without_prefix(described: JsonMapping) -> JsonObject:
    """Return the tokenizer's description, changed so that the tokenizer puts no space before a text."""
    edited = {**described, "pre_tokenizer": deepcopy(described["pre_tokenizer"])}
    for part in flat_parts(edited["pre_tokenizer"]):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    kept = [part for part in flat_parts(described["normalizer"]) if part["type"] != "Prepend"]
    if len(kept) < len(list(flat_parts(described["normalizer"]))):
        edited["normalizer"] = {"type": "Sequence", "normalizers": kept}
    return edited
