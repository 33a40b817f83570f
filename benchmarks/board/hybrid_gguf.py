"""Convert the hybrid of the board to GGUF with llama.cpp's own converter, in float32.

python -m benchmarks.board.hybrid_gguf SOURCE CHECKPOINT FILE

SOURCE is llama.cpp's source tree, with its converter and the version of the package gguf that belongs to it. The hybrid
has no tokenizer, but llama-server wants one: each of its tokens is a character.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.board.models import VOCAB

TOKENS = ["<end>", "Ċ", *(chr(ord("!") + i) for i in range(VOCAB - 2))]
"""Ċ is how byte-level tokenizers spell a line feed."""


def main(source: str, checkpoint: str, file: str) -> None:
    sys.path[:0] = [source, f"{source}/gguf-py"]
    gguf, qwen = importlib.import_module("gguf"), importlib.import_module("conversion.qwen")

    def set_vocab(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("gpt-2")
        self.gguf_writer.add_token_list(TOKENS)
        self.gguf_writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (VOCAB - 1))
        self.gguf_writer.add_token_merges(["a b"])
        self.gguf_writer.add_eos_token_id(0)
        self.gguf_writer.add_add_bos_token(False)

    model = qwen.Qwen3_5TextModel
    model.set_vocab, model.no_mtp = set_vocab, True
    model._QWEN35_DEFAULT_MROPE_SECTION = [1, 1, 0, 0]  # of pictures; the usual ones need heads of 64 numbers
    model(Path(checkpoint), gguf.LlamaFileType.ALL_F32, Path(file)).write()


if __name__ == "__main__":
    main(*sys.argv[1:])
