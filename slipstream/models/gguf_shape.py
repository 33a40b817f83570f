"""The shape and the tokens of a GGUF model, as far as others ask about them, from its header alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.config import Experts
from slipstream.models.gguf_header import GgufHeader
from slipstream.models.module_shape import UNBOUNDED, ModuleShape

_EMBEDDING = "token_embd.weight"
_ENDS = ("eos", "eot", "eom")
ENDS = "slipstream.eos_ids"
"""Key of the ids that end a text, as in "0 3" or "none", in files that `slipstream convert` wrote: the format has
places for three, and llama.cpp adds tokens by their texts."""
_UNUSED = 5
"""Value of `tokenizer.ggml.token_type` for rows of the embedding that are no tokens."""


@dataclass(frozen=True)
class GgufShape(ModuleShape):
    """header: of the file."""

    header: GgufHeader = field(kw_only=True, repr=False, compare=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As in `ModuleShape`; other names are those of GGUF."""
        names = {_EMBEDDING: "embed_tokens.weight", "position_embd.weight": "embed_positions.weight"}
        return {names.get(tensor.name, tensor.name): tensor.shape for tensor in self.header.tensors}


def gguf_shape(header: GgufHeader) -> GgufShape:
    """Raises CheckpointError for a header that lacks the size of the model."""
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    hidden, layers = _whole(header, "embedding_length"), _whole(header, "block_count")
    if len(tensors.get(_EMBEDDING, ())) != 2 or not hidden or not 0 < layers <= len(tensors):
        raise CheckpointError(
            f"{header.path.name} does not say how large its model is",
            why="it is no language model, or its metadata are incomplete",
            fix="convert the model again",
        )
    heads = _whole(header, "attention.head_count")
    kv_heads = _whole(header, "attention.head_count_kv") or heads
    head_dim = _whole(header, "attention.key_length") or (hidden // heads if heads else 0)
    experts = _whole(header, "expert_count")
    learned = "position_embd.weight" in tensors
    rope = {"rope_type": header.own("rope.scaling.type", "default"), "rope_theta": header.own("rope.freq_base", 1e4)}
    if header.own("rope.scaling.factor") is not None:
        rope["factor"] = header.own("rope.scaling.factor")
    return GgufShape(
        model_type=header.architecture,
        vocab_size=tensors[_EMBEDDING][0],
        hidden_size=hidden,
        layers=layers,
        context=_whole(header, "context_length") or UNBOUNDED,
        position="learned" if learned else "rope",
        eos_ids=_ends(header),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_width=layers * kv_heads * head_dim,
        windows=(None,) * layers,
        tie_embeddings="output.weight" not in tensors,
        rope_parameters={} if learned else rope,
        experts=Experts(experts, _whole(header, "expert_used_count") or 1, 0, True, (True,) * layers)
        if experts > 1
        else None,
        header=header,
    )


def _ends(header: GgufHeader) -> tuple[int, ...]:
    written = header.metadata.get(ENDS)
    if isinstance(written, str):
        return tuple(int(word) for word in written.split() if word.isdecimal())
    return tuple(dict.fromkeys(i for role in _ENDS if (i := token_id(header, role)) is not None))


def token_id(header: GgufHeader, role: str) -> int | None:
    """Id of a special token, for example "eos"; None if the file has none."""
    found = header.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return found if isinstance(found, int) else None


def token_texts(header: GgufHeader) -> dict[int, str]:
    """Id -> token. Rows of the embedding that are no tokens are left out."""
    texts = header.metadata.get("tokenizer.ggml.tokens") or []
    types = header.metadata.get("tokenizer.ggml.token_type") or [1] * len(texts)
    return {i: text for i, (text, kind) in enumerate(zip(texts, types, strict=False)) if kind != _UNUSED}


def tokens_of_type(header: GgufHeader, kind: int) -> frozenset[int]:
    """Ids of one type (see `gguf_header`)."""
    types: list[int] = header.metadata.get("tokenizer.ggml.token_type") or []
    return frozenset(i for i, own in enumerate(types) if own == kind)


def _whole(header: GgufHeader, key: str) -> int:
    """A size; of one for each layer, the largest; 0 if there is none."""
    found: Any = header.own(key)
    if isinstance(found, list):
        found = max(found, default=0)
    return found if isinstance(found, int) else 0
