"""Gives a trained model another tokenizer, as the start of further training.

The layers stay as they are. The embedding of each new token is the mean of those of the old tokens that write the same
text, so a token that both tokenizers have keeps its own (Gee et al. 2022, "Fast vocabulary transfer", EMNLP).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from slipstream.tokens.text import load_tokenizer
from slipstream.tokens.token_texts import TokenTexts

EMBEDDING = "model.embed_tokens.weight"


def transplanted(source: Path, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Tensor]:
    """The float32 weights of the checkpoint `source`, whose embeddings are tied, for the tokens of `tokenizer`. Ids
    beyond them, up to `vocab_size`, get zeros."""
    from transformers import PreTrainedTokenizerFast

    old: Any = TokenTexts(load_tokenizer(source), "the model to start from")
    new = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "the new model")
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    table = weights[EMBEDDING]  # [V, d]
    named = {id_: name for name, id_ in new.special.items()}
    rows = table.new_zeros(vocab_size, table.shape[1])
    for id_, written in enumerate(new.written):
        pieces = old.pieces(written) if written is not None else (old.special[named[id_]],)
        rows[id_] = table[list(pieces)].mean(0)
    return weights | {EMBEDDING: rows}
