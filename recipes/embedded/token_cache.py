"""The token cache of the embedded models' training data, and the batches and held-out texts cut from it.

There are three kinds of documents ("raw" files, requests to "write" a function, requests to "edit" one) in two splits.
Each kind of each split is one stream (`slipstream.training.packing`):

    tokenizer.json, data.json                           the tokenizer, and the sources of the cache
    train-KIND.bin, heldout-KIND.bin (and .starts.npy)  token ids
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.embedded.corpus import SourceFile
from recipes.embedded.request_pairs import Pair, make_pairs
from recipes.embedded.tokenizer import ASSISTANT, END, EOS, USER, special_id, train_tokenizer
from slipstream.training.packing import Orders, TokenStream, write_stream

KINDS = ("raw", "write", "edit")
SPLITS = ("train", "heldout")


def pair_ids(tokenizer: Tokenizer, pairs: list[Pair]) -> Iterator[list[int]]:
    """Token ids of exchanges, as the chat template renders them. Special tokens in the text are encoded as text."""
    tokenizer.encode_special_tokens = True
    user, assistant, end = (special_id(tokenizer, t) for t in (USER, ASSISTANT, END))
    line = tokenizer.encode("\n").ids
    asked = tokenizer.encode_batch(["\n" + p.user for p in pairs])
    answered = tokenizer.encode_batch(["\n" + p.assistant for p in pairs])
    for a, b in zip(asked, answered, strict=True):
        yield [user, *a.ids, end, *line, assistant, *b.ids, end, *line]


def prepare(
    folder: Path, corpus: list[SourceFile], licences: dict[str, str], vocab_size: int, pre_tokenizer: str = "code"
) -> dict[str, Any]:
    """Train the tokenizer and write the cache. Returns the facts about the data for the model card.

    pre_tokenizer: as in `train_tokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [f for f in corpus if f.split == "train"]
    # Every fifth file is enough for 4096 merges and takes only seconds.
    sample = train[::5] if len(train) > 500 else train
    tokenizer = train_tokenizer((f.text for f in sample), vocab_size, pre_tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    eos = special_id(tokenizer, EOS)
    tokens: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        files = [f for f in corpus if f.split == split]
        pairs = [p for f in files for p in make_pairs(f)]
        # Neighbours in the stream share a window. Shuffle, so that a window does not come from a single package.
        order = np.random.default_rng(0).permutation(len(pairs))
        pairs = [pairs[i] for i in order]
        raw = (
            e.ids for i in range(0, len(files), 64) for e in tokenizer.encode_batch([f.text for f in files[i : i + 64]])
        )
        writes, edits = [p for p in pairs if p.kind == "write"], [p for p in pairs if p.kind != "write"]
        tokens[split] = {
            "raw": write_stream(folder / f"{split}-raw.bin", raw, eos),
            "write": write_stream(folder / f"{split}-write.bin", pair_ids(tokenizer, writes), eos),
            "edit": write_stream(folder / f"{split}-edit.bin", pair_ids(tokenizer, edits), eos),
        }
    origins: dict[str, dict[str, Any]] = {}
    for f in corpus:
        origin = origins.setdefault(
            f.package, {"version": f.version, "licence": licences.get(f.package, "?"), "files": 0, "characters": 0}
        )
        origin["files"] += 1
        origin["characters"] += len(f.text)
    about = {
        "files": {s: sum(f.split == s for f in corpus) for s in SPLITS},
        "tokens": tokens,
        "heldout_files": [f"{f.package}/{f.path}" for f in corpus if f.split == "heldout"],
        "packages": origins,
    }
    (folder / "data.json.tmp").write_text(json.dumps(about, indent=1) + "\n")
    os.replace(folder / "data.json.tmp", folder / "data.json")
    return about


@dataclass(frozen=True)
class Mix:
    """Shares of the rows of a batch by kind."""

    raw: float = 0.78
    write: float = 0.08
    edit: float = 0.14


class Batches(Orders):
    """Packed training batches of the recipe's three kinds."""

    def __init__(self, folder: Path, mix: Mix, seed: int) -> None:
        super().__init__(
            {k: TokenStream.open(folder / f"train-{k}.bin", whole=k != "raw") for k in KINDS}, asdict(mix), seed
        )

    def draw(self, step: int, rows: int, length: int) -> Tensor:
        """The batch of a step, `[rows, length + 1]`: inputs and, shifted by one, labels."""
        return torch.cat([self.streams[k].rows([i], length) for k, i in self.choose(step, rows, length)])


def answer_mask(tokens: Tensor, assistant: int, end: int) -> Tensor:
    """Positions inside an assistant's answer, its closing token included; tokens `[B, T]` -> bool `[B, T]`."""
    inside = torch.zeros_like(tokens, dtype=torch.bool)
    state = torch.zeros(tokens.shape[0], dtype=torch.bool)
    for t in range(tokens.shape[1]):
        inside[:, t] = state & (tokens[:, t] != assistant)
        state = (state | (tokens[:, t] == assistant)) & (tokens[:, t] != end)
    return inside


@dataclass
class HeldOut:
    """Fixed held-out batches: files, and edit pairs with the mask of the answers."""

    raw: Tensor  # [R, T+1]
    edit: Tensor  # [R, T+1]
    edit_mask: Tensor  # [R, T], true where the label belongs to an answer

    @classmethod
    def open(cls, folder: Path, rows: int, length: int, assistant: int, end: int) -> HeldOut:
        def pick(kind: str) -> Tensor:
            stream = TokenStream.open(folder / f"heldout-{kind}.bin", whole=kind != "raw")
            count = len(stream.windows(length))
            return stream.rows(np.random.default_rng(1).permutation(count)[:rows], length)

        edit = pick("edit")
        return cls(pick("raw"), edit, answer_mask(edit, assistant, end)[:, 1:])
