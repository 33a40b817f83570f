"""Turns `--data` into token streams: tokenised with the target's tokenizer and split by document.

Every source becomes one pair of streams in the run's data folder (see `packing.TokenStream`; `N`: index of the source):

    train-N.bin, heldout-N.bin    the two splits; a source that is already a stream is split without tokenising
    data.json                     describes the sources; a run with other data in the same folder is refused

A hash of a document's name and text decides its split, so the split does not depend on the other documents. If too
little text falls into the held-out split, the end of the last document is held out as well.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.core.strict import JsonObject
from slipstream.errors import DataError, TrainingError
from slipstream.measure.provenance import digest
from slipstream.tokens.tokenizer import Tokenizer
from slipstream.training.documents import Document, Turn, check_documents, files_of, place_of_text, read_documents
from slipstream.training.packing import Marked, TokenStream, write_masked
from slipstream.training.resume_state import write_json


@dataclass(frozen=True)
class DocumentEncoder:
    """Encodes documents with the target's tokenizer. Special tokens in plain text are encoded as text.

    tokenizer  a transformers tokenizer; None if the target has none (then only .bin streams can be used).
    eos        id that ends a document, or None.
    """

    tokenizer: Any
    eos: int | None

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[Document, Marked]]:
        """Yield each document with its ids and answer mask. Raises DataError for chats without a chat template."""
        iterator = iter(documents)
        while batch := list(itertools.islice(iterator, 64)):
            pieces = [self._cut(d) for d in batch]
            ids = dict[bool, Iterator[list[int]]]()
            for special in (False, True):
                texts = [text for parts, templated in pieces for text, _ in parts if templated == special]
                ids[special] = iter(self._encode(texts, special) if texts else [])
            for document, (parts, templated) in zip(batch, pieces, strict=True):
                encoded = [(next(ids[templated]), answer) for _, answer in parts]
                mask = [answer for new, answer in encoded for _ in new] if any(a for _, a in encoded) else None
                yield document, ([token for new, _ in encoded for token in new], mask)

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=not special, verbose=False)
        return encoded["input_ids"]  # type: ignore[no-any-return]

    def _cut(self, document: Document) -> tuple[list[tuple[str, bool]], bool]:
        """Cut a document into parts: (list of (text, whether it is an answer), whether the chat template made it)."""
        chats, turns = bool(getattr(self.tokenizer, "chat_template", None)), document.turns
        if document.answer is not None and chats:
            turns = ({"role": "user", "content": document.text}, {"role": "assistant", "content": document.answer})
        elif document.answer is not None:
            return [(document.text, False), (document.answer, True)], False
        elif not turns:
            return [(document.text, False)], False
        if not chats:
            raise DataError(
                f"{document.key} is a conversation, but the target has no chat template",
                why="without a template, the prompt format of the target is unknown",
                fix='write it as {"prompt": ..., "response": ...} or {"text": ...}',
            )
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        cuts = [(count, opening) for i in answers for count, opening in ((i, True), (i + 1, False))]
        if turns[-1]["role"] != "assistant":
            cuts.append((len(turns), False))
        pieces: list[tuple[str, bool]] = []
        shown = ""
        for count, opening in cuts:  # `count` turns, with or without the beginning of the next answer
            text = self._render(document.key, turns[:count], opening)
            if not text.startswith(shown):
                raise DataError(
                    f"{document.key}: the chat template changes earlier turns of a conversation when a turn follows",
                    why="it is unknown which tokens belong to the answers",
                    fix="split the conversation into single exchanges",
                )
            pieces.append((text[len(shown) :], count - 1 in answers and not opening))
            shown = text
        return pieces, True

    def _render(self, key: str, turns: Seq[Turn], opening: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=opening)
        except Exception as fault:  # a template can raise any exception
            raise DataError(f"{key}: the chat template refuses it ({fault})", fix="correct the messages") from fault
        return text  # type: ignore[no-any-return]


def check_data(data: Iterable[str], tokenizer: Tokenizer | None) -> None:
    """Refuse sources that do not exist, are empty, or are not text, before any work is done. Raises DataError."""
    if not (names := list(data)):
        raise DataError("no training data was given", fix="give --data, such as a folder of text files")
    for name in names:
        check_documents(name)
    for name in names:
        if name.endswith(".bin"):
            continue
        if tokenizer is None:
            raise DataError(
                f"training data {name!r} is text, but the target has no tokenizer",
                fix="put tokenizer.json into the folder of its weights, or give a .bin file of token ids",
            )
        # Reads all documents, to check that they are text.
        if not sum(bool(d.text or d.turns) for d in read_documents(name)):
            raise DataError(f"training data {name!r} contains no text", fix="give a file with text")


@dataclass(frozen=True)
class TrainingData:
    """The streams of a run: a training and a held-out stream for each source. about: contents of data.json."""

    train: list[TokenStream]
    heldout: list[TokenStream]
    about: JsonObject


def prepare_data(
    folder: Path,
    data: Iterable[str],
    encoder: DocumentEncoder,
    vocab_size: int,
    length: int,
    heldout: float = 0.03,
    say: Callable[[str], None] = lambda text: None,
) -> TrainingData:
    """Tokenise the sources, unless an earlier call has done so, and open the streams.

    length   tokens per window; every source must fill at least one window of each split.
    heldout  share of the documents to hold out.

    Raises DataError, and TrainingError if `folder` holds streams made from other data."""
    names = list(data)
    about: JsonObject = {"sources": [_describe(n) for n in names], "vocab_size": vocab_size, "heldout": heldout}
    record = folder / "data.json"
    if record.is_file():
        recorded = json.loads(record.read_text())
        _check_unchanged(folder, recorded, about)
        about = recorded
    else:
        for number, name in enumerate(names):
            text = not name.endswith(".bin")  # documents of a stream end with their own EOS
            if text:
                say(f"tokenising {name}")
            splits = _split(_read_documents(name, encoder, vocab_size), heldout, length)
            folder.mkdir(parents=True, exist_ok=True)  # created only now, so that refused data leaves no folder
            for split, marked in splits.items():
                plain = ((list(map(int, ids)), mask) for ids, mask in marked)
                write_masked(folder / f"{split}-{number}.bin", plain, encoder.eos if text else None, vocab_size)
        write_json(record, about)
    opened: dict[str, list[TokenStream]] = {"train": [], "heldout": []}
    for split, streams in opened.items():
        for number, name in enumerate(names):
            stream = open_stream(folder / f"{split}-{number}.bin", length)
            if len(stream.tokens) <= length:
                raise DataError(
                    f"training data {name!r} is too short: {len(stream.tokens)} tokens in its {split} split, "
                    f"but a window needs {length + 1}",
                    fix="give more text, or a smaller --length",
                )
            streams.append(stream)
    return TrainingData(opened["train"], opened["heldout"], about)


def open_stream(path: Path, length: int) -> TokenStream:
    """Open a stream. Its windows begin at document starts if the median document is shorter than a window."""
    stream = TokenStream.open(path, whole=False)
    if len(stream.starts) > 1 and float(np.median(np.diff(stream.starts))) < length:
        stream.whole = True
    return stream


def _describe(name: str) -> JsonObject:
    """Return name, size and digest of a source. The digest depends only on contents, not on paths, so that a run can be
    moved together with its data."""
    files = list(files_of(Path(name)))
    return {"name": name, "bytes": sum(file.stat().st_size for file in files), "digest": digest(files)}


def _check_unchanged(folder: Path, recorded: JsonObject, now: JsonObject) -> None:
    """Raise TrainingError if the streams of a folder were made from other contents; names of sources may differ."""

    def facts(about: JsonObject, names: bool = False) -> JsonObject:
        sources = [f"{s['name'] if names else ''} ({s.get('digest')})" for s in about["sources"]]
        return about | {"sources": ", ".join(sources)}

    if changed := [key for key in now if facts(recorded).get(key) != facts(now)[key]]:
        before, after = (facts(about, names=True).get(changed[0]) for about in (recorded, now))
        raise TrainingError(
            f"{folder} was made from other data: {', '.join(changed)} differ ({before} before, {after} now)",
            why="a run must continue with the same data",
            fix="choose another --out, or remove this folder",
        )


def _read_documents(name: str, encoder: DocumentEncoder, vocab_size: int) -> Iterator[tuple[float, Marked]]:
    """Yield (place, (ids, mask)) of each document of a source. place: in [0, 1); the largest are held out."""
    if not name.endswith(".bin"):
        for document, marked in encoder.encode(read_documents(name)):
            yield document.place, marked
        return
    stream = TokenStream.open(Path(name), whole=False)
    if len(stream.tokens) and int(stream.tokens.max()) >= vocab_size:
        raise DataError(
            f"{name!r} contains id {int(stream.tokens.max())}, but the target's vocabulary is 0..{vocab_size - 1}",
            why="the stream was made with another tokenizer",
            fix="give the text instead of the token stream",
        )
    for i, (ids, mask) in enumerate(stream.documents()):
        yield place_of_text(f"{i}:{ids[:256]}"), (ids, mask)


def _split(documents: Iterable[tuple[float, Marked]], share: float, length: int) -> dict[str, list[Marked]]:
    """Return the documents by split. Held-out documents shorter than a window get the end of the last document."""
    splits: dict[str, list[Marked]] = {"train": [], "heldout": []}
    for place, (ids, mask) in documents:
        if ids:
            packed: Any = np.asarray(ids, dtype=np.int32)  # a list of ints takes nine times as much memory
            splits["heldout" if place >= 1 - share else "train"].append((packed, mask))
    heldout, train = (sum(len(ids) for ids, _ in splits[split]) for split in ("heldout", "train"))
    if heldout + train <= 2 * length + 2:
        raise DataError(
            f"the training data has only {heldout + train} tokens",
            why=f"training needs at least one window of {length + 1} tokens, and evaluation another",
            fix="give more text, or a smaller --length",
        )
    need = 0 if heldout > length else max(length + 1 - heldout, int(share * (heldout + train)))
    while need > 0 and splits["train"]:
        ids, mask = splits["train"].pop()
        cut = max(0, len(ids) - need)
        if cut:
            splits["train"].append((ids[:cut], None if mask is None else mask[:cut]))
        splits["heldout"].append((ids[cut:], None if mask is None else mask[cut:]))
        need -= len(ids) - cut
    return splits
