"""Writes a draft head as a checkpoint that other programs load (`HEAD_FORMATS`).

"eagle3" and "medusa" are the layouts of their authors' releases, "speculators" is the layout of the package of this
name, "specforge" that of SGLang's training framework. vLLM loads these four. "int8" is for Slipstream alone, and is
possible for DFlash heads, too.
"""

from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weights import load_weights
from slipstream.core.strict import JsonMapping
from slipstream.errors import PairError, ParameterError, UnsupportedModelError
from slipstream.heads.dflash_format import load_dflash, save_dflash
from slipstream.heads.eagle_format import lay_out_native, lay_out_speculators, load_eagle
from slipstream.heads.eagle_head import EagleConfig
from slipstream.heads.medusa_format import load_medusa, save_medusa
from slipstream.heads.medusa_heads import MedusaHeads
from slipstream.heads.recognition import read_tensors, recognise, write
from slipstream.settings import HEAD_FORMATS, SMALL_HEAD

_FORMATS = {"eagle3": ", ".join(name for name in HEAD_FORMATS if name != "medusa"), "medusa": "medusa"}
_KINDS = {
    "eagle": "an EAGLE-1 head, a decoder layer that reads the target's last hidden state",
    "eagle3": "an EAGLE-3 head, a decoder layer that reads states of several layers of the target",
    "dflash": "a DFlash head, layers that read the target's states as keys and values",
    "medusa": "Medusa heads, which predict several positions from one hidden state",
}


@dataclass(frozen=True)
class ConvertedHead:
    """A converted head. method: its name in vLLM's speculative_config; draft_tokens: a draft length for the head;
    parallel: True if all draft tokens come from one pass."""

    folder: Path
    dtype: str
    stored_bytes: int
    method: str
    draft_tokens: int
    parallel: bool


def convert_head(
    checkpoint: CheckpointName, to: str, folder: Path, target: CheckpointName | None = None
) -> ConvertedHead:
    """Write the head in a folder or hub repository to `folder` in the format `to`, in the dtype that it is stored in;
    "int8": matrices in 8 bits.

    target  the target's checkpoint, if the head's config.json does not name it. Medusa heads may need the target's
            lm_head, an EAGLE-3 head that does not name the layers it reads needs the target's number of layers, and the
            format `speculators` names the target.

    Raises the family of `LoadError`, UnsupportedModelError for a head that the format cannot hold, and ParameterError
    if the target is needed and not known.
    """
    wanted = "medusa" if to == "medusa" else "eagle3"
    source = Checkpoint.open(checkpoint, wanted)
    place, kind, config = source.download(), recognise(source), source.config
    if kind == "dflash" and to == SMALL_HEAD:
        dflash = load_dflash(source)
        save_dflash(dflash, folder, torch.int8, config.get("target_model"))
        return _describe_result(folder, source, kind, dflash.config.depth)
    if kind is not None and kind != wanted:
        raise UnsupportedModelError(
            f"{place} holds {_KINDS[kind]}, the format {to!r} holds {_KINDS[wanted]}",
            why="these are different networks: no tensors of one make up the other",
            fix=f"choose {_FORMATS[kind]}" if kind in _FORMATS else "train one: slipstream train eagle3",
        )
    named = target or config.get("target_model") or config.get("base_model_name_or_path")
    base = None if named is None else Checkpoint.open(named)
    name = None if base is None else str(base)
    if wanted == "medusa":
        heads = _add_lm_head(load_medusa(source), place, base)
        save_medusa(heads, folder, _find_dtype(source), target=name, file="medusa_lm_head.safetensors")
        return _describe_result(folder, source, "medusa", heads.config.heads)
    needed = target is not None or to == "speculators"
    about: JsonMapping = {}
    if base and needed:
        about = {"num_hidden_layers": DecoderConfig.load(base).layers} if base.is_gguf else base.config
    head = load_eagle(source, about.get("num_hidden_layers"))
    _check(head.config, to, place)
    if to != "speculators":
        layout = lay_out_native(head, name, maps=to == "specforge")
    elif name:
        layout = lay_out_speculators(head, name, about.get("architectures") or ())
    else:
        raise ParameterError("a checkpoint of speculators names the target", fix="add --target")
    write(folder, *layout, torch.int8 if to == SMALL_HEAD else _find_dtype(source))
    return _describe_result(folder, source, "eagle3", head.config.depths or 4, head.config.mask_token is not None)


def _find_dtype(source: Checkpoint) -> torch.dtype:
    return reduce(torch.promote_types, {t.dtype for t in read_tensors(source).values() if t.is_floating_point()})


def _describe_result(
    folder: Path, source: Checkpoint, method: str, draft_tokens: int, parallel: bool = False
) -> ConvertedHead:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return ConvertedHead(folder, str(_find_dtype(source)).removeprefix("torch."), size, method, draft_tokens, parallel)


def _check(c: EagleConfig, to: str, place: Path) -> None:
    """Raise UnsupportedModelError for a variant that readers of the format `to` would run as another head."""
    d, taps, pure = c.decoder, c.taps, to == "specforge"
    variants = (
        (taps != tuple(sorted(set(taps))) or taps[0] < 0, f"reads the layers {list(taps)}",
         "readers take the states of different layers in increasing order, before the final norm"),
        (taps[0] == 1 and to != "speculators", f"reads the layers {list(taps)}",
         "SGLang takes a first id of 1 for the state after layer 2: --to speculators for vLLM"),
        (d.qkv_bias != d.o_bias, "has biases in some projections of its attention only", "attention_bias is for all"),
        (to == "speculators" and c.target_hidden != d.hidden_size, f"reads states of width {c.target_hidden}",
         f"the package expects the head's own width, {d.hidden_size}"),
        (to == "speculators" and c.norm_before_fc and c.fc_norm, "has norms of each state and of all states",
         "the package has one or the other"),
        (pure and d.layers > 1, f"has {d.layers} layers", "SpecForge's head has one"),
        (pure and c.mask_token is not None, "is parallel (P-EAGLE)", "SpecForge names no mask token in config.json"),
        (pure and len(taps) != 3, f"reads {len(taps)} layers", "SpecForge's head reads three"),
        (pure and (d.qkv_bias or d.mlp_bias), "has biases", "SpecForge's layer has none"),
        (pure and d.qk_norm, "norms queries and keys", "SpecForge's layer has no such norms"),
        (pure and c.norm_before_residual, "adds attention to the normed feature", "SpecForge's adds it to the raw one"),
        (pure and c.norm_before_fc, "norms the joined states", "SpecForge's head has no such norm"),
    )  # fmt: skip
    for present, what, why in variants:
        if present:
            raise UnsupportedModelError(
                f"the EAGLE-3 head in {place} {what}, which the format {to!r} cannot express", why=why,
                fix=f"choose another format of {_FORMATS['eagle3']}, or train a head without it",
            )  # fmt: skip


def _add_lm_head(heads: MedusaHeads, place: Path, target: Checkpoint | None) -> MedusaHeads:
    """Return the heads as in the authors' releases, where each head has its own lm_head and biases."""
    c = heads.config
    if c.draft_vocab is not None:
        raise UnsupportedModelError(
            f"the Medusa heads in {place} know only {c.draft_vocab} of the target's {c.vocab_size} tokens",
            why="the format 'medusa' has the target's whole vocabulary, and vLLM has no reduced one for such heads",
            fix="train heads of the whole vocabulary: slipstream train medusa",
        )
    if not heads.has_lm_head:
        if target is None:
            raise ParameterError(
                f"the Medusa heads in {place} use the target's lm_head, and a file of this format must hold one",
                fix="add --target",
            )
        weights = load_weights(target, DecoderConfig.load(target))
        lm_head = weights[weights.head]
        if tuple(lm_head.shape) != (c.vocab_size, c.hidden_size):
            raise PairError(
                f"the target's lm_head is {tuple(lm_head.shape)}, the Medusa heads in {place} were made for one of "
                f"{(c.vocab_size, c.hidden_size)}",
                why="they were trained for another target",
                fix="give their own as --target",
            )
        heads.borrow(lm_head)
    complete = MedusaHeads(replace(c, own_lm_head=True, bias=True)).to(heads.dtype)
    state = complete.state_dict() | heads.state_dict() | {"lm_heads": heads.lm_head.expand(c.heads, -1, -1)}
    complete.load_state_dict(state)
    return complete
