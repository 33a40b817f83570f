"""The order of rows in query and key heads, for checkpoints that have another order than our rotary embedding needs."""

import re

import numpy as np

from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.families import FAMILIES


def groups_of(config: DecoderConfig, fused: str) -> int:
    """Return the number of groups of rows in a fused tensor: see `Family.grouped`."""
    kind = FAMILIES[config.model_type].grouped.get(fused)
    if kind is None:  # the usual case, which needs no layer descriptions
        return 1
    return config.heads if kind == "heads" else next((layer.groups for layer in config.recurrences), 1)


_TURNED = re.compile(r"layers\.(\d+)\.self_attn\.(q|k|q_b|kv_a)_(proj|norm)\.(weight|bias)")


def rows_of_halves(config: DecoderConfig, name: str) -> np.ndarray | None:
    """Return for each row of a query or key projection its index in the stored tensor, or None if the order is the
    same.

    The order differs in checkpoints whose rotary embedding rotates neighbours, elements 2i and 2i + 1 of a head; our
    kernels rotate i and i + n / 2. In latent attention, rotated elements are stored last, but our kernels need them
    first. Converters reorder the heads of layers without rotary embedding, too."""
    found = _TURNED.fullmatch(name)
    layer = config.described[int(found[1])] if found else None
    if found is None or layer is None or not config.rotaries:
        return None
    turned = config.rotaries[layer.rotary or 0].get("dimensions", layer.head_dim)
    pairs = np.arange(turned).reshape(-1, 2).T.ravel()
    if (part := layer.latent) is not None:
        if found[3] == "norm":
            return None
        heads, before = (1, part.rank) if found[2] == "kv_a" else (layer.heads, part.plain)
        head = np.concatenate([before + pairs, np.arange(before)])
        return (np.arange(heads)[:, None] * len(head) + head).ravel()
    head = np.concatenate([pairs, np.arange(turned, layer.head_dim)])
    heads = layer.heads if found[2] == "q" else layer.kv_heads
    if found[3] == "norm" and layer.qk_norm == "head":
        return head
    return (np.arange(heads)[:, None] * layer.head_dim + head).ravel()


def rows_in_gguf(config: DecoderConfig, name: str) -> np.ndarray | None:
    """Return `rows_of_halves` for a GGUF file; None if the file has the rows in our order: see `Family.gguf_pairs`."""
    in_halves = "mrope_section" in config.rope_parameters  # for these, llama.cpp rotates i and i + n / 2
    pairs = FAMILIES[config.model_type].gguf_pairs and not in_halves
    return rows_of_halves(config, name) if pairs else None
