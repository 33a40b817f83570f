"""Reads and writes checkpoints of DFlash and DSpark heads, and fits them to their target.

config.json describes the head's layers as a Qwen3 model. Keys of the head are block_size, mask_token_id and
target_layer_ids (0: the state after the first layer), in `dflash_config` or at the top. The package `speculators` puts
the Qwen3 keys into `transformer_layer_config`, and counts layers in `aux_hidden_state_layer_ids` from 1. Tensors have
the names of `DFlashHead.state_dict`. Biases, the Markov head, an embedding and an output head are detected by their
tensors. By default only layers with a window are causal. The keys is_causal, causal (all layers) and
sliding_window_non_causal change that, as in vLLM.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import CheckpointName
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.config_values import count_of, object_of
from slipstream.core.strict import JsonMapping
from slipstream.core.target import HeadHost
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError, reading
from slipstream.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.heads.eagle_format import complete_maps, describe_layers, fill
from slipstream.heads.recognition import check_host, read_head, write

_IGNORED = re.compile(r".*rotary_emb\.inv_freq|confidence_head\..*|verifier_.*")
"""Tensors that are not loaded: buffers, copies of the target's weights, and the head that predicts acceptance."""
_PLAIN = {"use_aux_hidden_state": True, "use_swa": False, "attention_sink_bias": False, "attention_value_scale": None}
"""Settings of `dflash_config` that change the computation -> the only supported value."""
_READ = ("mask_token_id", "target_layer_ids", "causal", "sample_from_anchor", "block_size")


@reading("the draft head cannot be read", "download or export it again", CheckpointError)
def load_dflash(checkpoint: CheckpointName) -> DFlashHead:
    """Load the head in a folder or hub repository, in float32 (or float64, if stored so), on the CPU. The target's
    weights are not attached yet.

    Raises the family of `LoadError`: no such head; pickled or corrupt files; tensors missing, unknown or of another
    shape; settings that are missing or that change the computation.
    """
    opened, kind, tensors = read_head(checkpoint, _IGNORED)
    folder, config = opened.place, opened.config
    if kind != "dflash" or tensors.get("fc.weight", torch.empty(0)).ndim != 2:
        raise CheckpointError(
            f"{folder} holds {'a DFlash head without fc' if kind == 'dflash' else f'a head of the kind {kind}'}",
            fix=f"use the drafter {kind!r}" if kind else "give the folder of a DFlash head",
        )
    if "t2d" in tensors and bool(tensors["t2d"].all()):  # every id can be drafted
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    head_config = _read_config({**object_of(config, "transformer_layer_config"), **config}, tensors, folder)
    with torch.device("meta"):  # else its weights would first be random numbers
        head = DFlashHead(head_config).to(torch.promote_types(tensors["fc.weight"].dtype, torch.float32))
    if head_config.draft_vocab is not None:
        complete_maps(head_config.draft_vocab, head_config.decoder.vocab_size, tensors, folder)
    fill(head, tensors, opened, "DFlash")
    return head.eval().requires_grad_(False)


def _read_config(config: JsonMapping, tensors: Mapping[str, Tensor], folder: Path) -> DFlashConfig:
    nested, markov = object_of(config, "dflash_config"), tensors.get("markov_head.markov_w1.weight")
    _refuse_variants(config, nested, tensors, folder)
    said: Any = {**config, **nested}
    if isinstance(counted := said.get("aux_hidden_state_layer_ids"), list):
        said.setdefault("target_layer_ids", [at - 1 for at in counted if type(at) is int])
    layers, mask, block = said.get("target_layer_ids"), said.get("mask_token_id"), said.get("block_size")
    dspark = markov is not None or config.get("speculators_model_type") == "dspark"
    from_anchor = bool(said.get("sample_from_anchor", dspark))  # the default for DSpark, as in vLLM
    least = 2 - from_anchor  # smallest block: last token and one mask; no mask if the last token's row predicts, too
    listed = isinstance(layers, list) and layers and all(type(at) is int and at >= 0 for at in layers)
    for name, value, right, what in (
        ("target_layer_ids", layers, listed, "a list of layers"),
        ("mask_token_id", mask, type(mask) is int and mask >= 0, "the id that the head was trained with"),
        ("block_size", block, type(block) is int and block >= least, f"an integer >= {least}"),
    ):
        if not right:
            raise ConfigError(
                f"{name} of the DFlash head in {folder} is {value!r}, expected {what}",
                why="the head would draft wrong tokens",
                fix="correct config.json",
            )
    windows = any(kind != "full_attention" for kind in config.get("layer_types") or ())
    flat = {"rope_theta": 1e6, **config, "model_type": "qwen3", "use_sliding_window": windows}  # theta as in vLLM
    flat["is_causal"] = True  # causality is in `DFlashConfig` instead
    decoder, causal = DecoderConfig.from_dict(flat), config.get("is_causal", nested.get("causal"))
    draft_vocab = count_of(config, "draft_vocab_size", len(tensors.get("d2t", ())) or decoder.vocab_size)
    reduced = draft_vocab < decoder.vocab_size
    return DFlashConfig(
        decoder=replace(
            decoder,
            qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
            o_bias="layers.0.self_attn.o_proj.bias" in tensors,
            mlp_bias="layers.0.mlp.up_proj.bias" in tensors,
        ),
        taps=tuple(at + 1 for at in layers),
        target_hidden=tensors["fc.weight"].shape[1] // len(layers),
        block=block,
        mask_token=mask,
        target_layers=config.get("num_target_layers"),
        causal=bool(causal),
        causal_windows=windows and causal is None and not config.get("sliding_window_non_causal"),
        from_anchor=from_anchor,
        markov_rank=0 if markov is None else markov.shape[-1],
        draft_vocab=draft_vocab if reduced else None,
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head=reduced or "lm_head.weight" in tensors,
    )


def _refuse_variants(config: JsonMapping, nested: JsonMapping, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse variants that this code would compute wrongly: the head would draft wrong tokens without any error."""
    method = config.get("speculators_model_type", "dflash")
    unread = [f"dflash_config.{n} {v!r}" for n, v in nested.items() if n not in _READ and _PLAIN.get(n, ...) != v]
    variants = {
        "another activation": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "another Markov head": config.get("markov_head_type", "vanilla") != "vanilla",
        "scaled logits": config.get("logit_scale", 1) != 1,
        "interleaved rotary positions": config.get("is_neox_style", True) is not True,
        f"another method of speculators ({method})": method not in ("dflash", "dspark"),
        "a mask embedding of its own (mask_embedding.pt)": (folder / "mask_embedding.pt").exists(),
    }
    unread += [what for what, is_so in variants.items() if is_so]
    if unread:
        raise UnsupportedModelError(
            f"the DFlash head in {folder} has {', '.join(unread)}",
            why="run as an ordinary DFlash head it would draft wrong tokens",
            fix="use a head without it",
        )


def save_dflash(
    head: DFlashHead, folder: str | Path, dtype: torch.dtype = torch.float16, target: str | None = None
) -> None:
    """Write `head` in the layout above. dtype: of the stored floats; target: name of the target model."""
    c = head.config
    nested = {"mask_token_id": c.mask_token, "target_layer_ids": [tap - 1 for tap in c.taps]}
    nested |= {} if c.causal_windows else {"causal": c.causal}
    config = {
        "architectures": ["Qwen3DSparkModel" if c.markov_rank else "DFlashDraftModel"],
        **describe_layers(c.decoder),
        "model_type": "qwen3",
        "target_hidden_size": c.target_hidden,
        "block_size": c.block,
        "dflash_config": nested,
        "sample_from_anchor": c.from_anchor,
    }
    more = {"target_model": target, "num_target_layers": c.target_layers, "markov_rank": c.markov_rank or None,
            "draft_vocab_size": c.draft_vocab}  # fmt: skip
    config |= {name: value for name, value in more.items() if value is not None}
    write(folder, config, head.state_dict(), dtype)


def fit(head: DFlashHead, host: HeadHost) -> DFlashHead:
    """Check that `head` was made for the target, and let it use the target's weights. Returns the head in the target's
    dtype and on its device. Raises PairError, which gives the head's value and the target's."""
    c, d, vocab = head.config, head.config.decoder.hidden_size, head.config.decoder.vocab_size
    strange = [tap - 1 for tap in c.taps if tap > host.layers]
    borrows, rows = not (c.own_embedding and c.own_lm_head), vocab if c.own_embedding else host.vocab_size
    further = (
        (c.target_layers not in (None, host.layers), f"a target of {c.target_layers} layers", f"{host.layers} layers"),
        (strange, f"the target layers {strange}", f"layers 0..{host.layers - 1}"),
        (borrows and d != host.hidden_size, f"width {d} and the target's tables", f"width {host.hidden_size}"),
        (c.mask_token >= rows, f"mask_token_id {c.mask_token}", f"{rows} embeddings"),
        (c.markov_rank and vocab < host.vocab_size, f"a Markov head of {vocab} ids", f"{host.vocab_size} ids"),
    )
    check_host(host, "DFlash", c.target_hidden, vocab, further)
    embedding = None if c.own_embedding else host.embedding()
    lm_head = None if c.own_lm_head else embedding if host.tied and embedding is not None else host.lm_head()
    return head.to(host.device, host.dtype).borrow(embedding, lm_head)
