"""Reads and writes checkpoints of EAGLE heads, and fits heads to their target. There are two layouts: the native layout
of EAGLE-1/-2, -3 and P-EAGLE, and the layout of the package `speculators`.

    native        config.json of a Llama, mostly with one layer, plus the head's own keys (`draft_vocab_size`,
                  `eagle_config`, ...); tensors as `EagleHead.state_dict`, or `layers.0.` for `midlayer.`
    speculators   the Llama's keys inside `transformer_layer_config`, the head's own keys next to it

Biases, norms and an embedding are detected by their tensors; config.json decides only what the tensors do not show.
"""

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName, few
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.config_values import count_of, object_of
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.core.target import HeadHost
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError, reading
from slipstream.heads.eagle_head import EagleConfig, EagleHead, default_taps
from slipstream.heads.recognition import MASK_TOKENS, SCALE, TAPS, check_host, read_head, write

_IGNORED = re.compile(r".*rotary_emb\.inv_freq|verifier_.*")
"""Tensors that are not loaded: buffers, and copies of the target's weights."""

Layout = tuple[JsonObject, dict[str, Tensor]]
"""(contents of config.json, tensors)."""


@reading("the draft head cannot be read", "download or export it again", CheckpointError)
def load_eagle(checkpoint: CheckpointName, layers: int | None = None) -> EagleHead:
    """Load the head in a folder or hub repository, in float32 (or float64, if stored so), on the CPU. The target's
    weights are not attached yet.

    layers  number of target layers: decides the taps of a head whose config.json does not name them.

    Raises the family of `LoadError`: no such head; pickled or corrupt files; tensors missing, unknown or of another
    shape; an unsupported variant.
    """
    opened, kind, tensors = read_head(checkpoint, _IGNORED)
    folder, config = opened.place, opened.config
    if kind not in ("eagle", "eagle3"):
        raise CheckpointError(
            f"{folder} contains {f'a {kind} head' if kind else 'no EAGLE head'}",
            why="the drafter 'eagle' needs a head of EAGLE-1, -2 or -3",
            fix=f"use the drafter {kind!r}"
            if kind
            else "give the folder of an EAGLE head: its tensors are named fc.weight, midlayer.* or layers.0.*",
        )
    if kind == "eagle3":
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): t for name, t in tensors.items()}
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    head_config = _read_config(kind, config, tensors, layers, folder)
    with torch.device("meta"):  # else its weights would first be random numbers
        head = EagleHead(head_config).to(torch.promote_types(tensors["fc.weight"].dtype, torch.float32))
    if head_config.version == 3:
        complete_maps(head_config.draft_vocab, head_config.decoder.vocab_size, tensors, folder)
    fill(head, tensors, opened, "EAGLE")
    return head.eval().requires_grad_(False)


def _read_config(
    kind: str, config: JsonMapping, tensors: Mapping[str, Tensor], layers: int | None, folder: Path
) -> EagleConfig:
    """Make the `EagleConfig` of a checkpoint from config.json and tensors."""
    nested = object_of(config, "eagle_config")
    flat = dict(object_of(config, "transformer_layer_config") or config)
    # The layers of every family equal Llama's, except for biases and norms, which are detected by their tensors.
    flat["model_type"] = "llama"
    _refuse_variants(nested, flat, folder)
    decoder = DecoderConfig.from_dict(flat)
    layer = "midlayer." if kind == "eagle3" else "layers.0."
    decoder = replace(
        decoder,
        qkv_bias=layer + "self_attn.q_proj.bias" in tensors,
        o_bias=layer + "self_attn.o_proj.bias" in tensors,
        mlp_bias=layer + "mlp.up_proj.bias" in tensors,
        qk_norm=layer + "self_attn.q_norm.weight" in tensors,
        mask_token=None,  # `EagleConfig.mask_token` has the id
    )
    fc = tuple(tensors["fc.weight"].shape)  # [d, taps * target_hidden], or [d, d + target_hidden]
    d = decoder.hidden_size
    if len(fc) != 2 or fc[0] != d:
        raise _explain_mismatch(f"fc.weight in {folder} has the shape {fc}, but config.json gives hidden_size {d}")
    own_embedding = "embed_tokens.weight" in tensors
    if kind == "eagle":
        return EagleConfig(
            version=1, decoder=decoder, taps=(-1,), target_hidden=fc[1] - d, draft_vocab=decoder.vocab_size,
            fc_bias="fc.bias" in tensors, own_embedding=own_embedding,
        )  # fmt: skip
    taps, width = _read_taps(config, nested, fc[1], d, layers, folder)
    mask_token, depths = _read_parallel(config, tensors, folder)
    said = {**nested, **config}
    return EagleConfig(
        version=3,
        decoder=decoder,
        taps=taps,
        target_hidden=width,
        draft_vocab=count_of(config, "draft_vocab_size", flat.get("draft_vocab_size") or decoder.vocab_size),
        own_embedding=own_embedding,
        norm_before_residual=bool(said.get("norm_before_residual")),
        fc_norm="fc_norm.0.weight" in tensors or bool(config.get("fc_norm")),
        norm_output=bool(said.get("norm_output")),
        norm_before_fc="input_norm.weight" in tensors or bool({**config, **nested}.get("norm_before_fc")),
        mask_token=mask_token,
        depths=depths,
    )


def _read_parallel(
    config: JsonMapping, tensors: Mapping[str, Tensor], folder: Path
) -> tuple[int, int | None] | tuple[None, None]:
    """Return (mask token, number of draft tokens in training) of a parallel head (P-EAGLE); (None, None) for others."""
    peagle = config.get("speculators_model_type") == "peagle"
    parallel = any(config.get(key) is not None for key in MASK_TOKENS[1:])  # other heads may have the first key, too
    if not (peagle or parallel or config.get("parallel_drafting") or "mask_hidden" in tensors):
        return None, None
    token = next((config[key] for key in MASK_TOKENS if config.get(key) is not None), None)
    if type(token) is not int:
        raise ConfigError(
            f"config.json of the parallel head in {folder} "
            + ("does not set a mask token" if token is None else f"sets the mask token to {token!r}"),
            why="a parallel head drafts from the embedding of this token",
            fix=f"set {MASK_TOKENS[0]} to the id that the head was trained with",
        )
    methods = object_of(config, "speculators_config").get("proposal_methods")
    named = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    key, where = ("speculative_tokens", named) if "speculative_tokens" in named else ("para_depths", config)
    return token, None if where.get(key) is None else count_of(where, key, 1)


def _read_taps(
    config: JsonMapping, nested: JsonMapping, joined: int, d: int, layers: int | None, folder: Path
) -> tuple[tuple[int, ...], int]:
    """Return (tapped target layers, width of their states) of a head whose fc reads `joined` values."""
    counted = config.get(TAPS) or config.get("aux_hidden_state_layer_ids")
    named = counted or nested.get(TAPS)
    if named is not None and not (isinstance(named, list) and named and all(type(t) is int for t in named)):
        raise ConfigError(f"{TAPS} is {named!r}, but must be a list of layer numbers", fix="correct config.json")
    count = len(named) if named else count_of(config, "num_aux_hidden_states", 3)
    width = count_of(config, "target_hidden_size", joined // count)
    if count * width != joined:
        raise _explain_mismatch(
            f"fc.weight in {folder} has {joined} inputs, but config.json describes {count} taps of width {width}",
            fix="correct num_aux_hidden_states, target_hidden_size or eagle_aux_hidden_state_layer_ids",
        )
    if named:
        # SpecForge and SGLang count layers from 0; SGLang recognises such ids by a first id of 1. A config that gives
        # the number of taps counts as vLLM does: the state after that many layers.
        from_zero = not counted and "num_aux_hidden_states" not in config and named[0] == 1
        return tuple(tap + from_zero for tap in named), width
    if count != 3 or layers is None:
        raise ConfigError(
            f"config.json in {folder} does not say which {count} layers of the target the head reads",
            why="there is a default only for three layers"
            if count != 3
            else "the default depends on the target, which is not known here",
            fix=f"set {TAPS} in config.json",
        )
    return default_taps(layers), width


def _refuse_variants(nested: JsonMapping, flat: JsonMapping, folder: Path) -> None:
    """Refuse unsupported variants. An ordinary head's code would draft wrong tokens with them, without any error."""
    variant = None
    if nested.get("use_aux_hidden_state") is False:
        variant = "does not read layers of the target (use_aux_hidden_state is false)"
    elif "sliding_attention" in (flat.get("layer_types") or ()):
        variant = "has a sliding window"
    elif flat.get("hidden_act", "silu") not in ("silu", "swish"):
        variant = f"has the activation {flat['hidden_act']!r}"
    if variant:
        raise UnsupportedModelError(
            f"the EAGLE head in {folder} {variant}",
            why="our code for EAGLE heads does not support this, and would draft wrong tokens",
            fix="use a head of EAGLE-1, -2, -3, -3.1 or P-EAGLE without this variant",
        )


def complete_maps(count: int, vocab: int, tensors: dict[str, Tensor], folder: Path) -> None:
    """Complete and check the maps between `count` draft ids and `vocab` target ids. d2t holds *offsets*: read as ids,
    they would make the head draft tokens near the start of the vocabulary, without any error."""
    if "d2t" not in tensors and count == vocab:
        tensors["d2t"] = torch.zeros(count, dtype=torch.int64)
    if "d2t" not in tensors or tensors["d2t"].shape != (count,):
        return  # `fill` reports tensors that are missing or have another shape
    tensors["d2t"] = tensors["d2t"].to(torch.int64)
    ids = torch.arange(count) + tensors["d2t"]
    inside = ids[(ids >= 0) & (ids < vocab)]
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[inside] = True
    stored_t2d = tensors.setdefault("t2d", t2d).bool()
    if stored_t2d.shape != t2d.shape:
        return
    tensors["t2d"] = stored_t2d
    if int(t2d.sum()) != count or not torch.equal(stored_t2d, t2d):
        absolute = set(tensors["d2t"].tolist()) == set(stored_t2d.nonzero()[:, 0].tolist())
        raise CheckpointError(
            f"d2t and t2d in {folder} disagree: d2t maps to {int(t2d.sum())} ids ({count - len(inside)} lie outside "
            f"0..{vocab - 1}), t2d marks {int(stored_t2d.sum())}, but the head drafts {count}",
            why="d2t contains target ids, but the format requires offsets: target id = draft id + d2t"
            if absolute
            else "draft ids would be mapped to wrong target ids",
            fix="subtract 0, 1, 2, ... from d2t" if absolute else "export the head again",
        )


def fill(head: Any, tensors: Mapping[str, Tensor], checkpoint: Checkpoint, kind: str) -> None:
    """Load the tensors into an EAGLE or DFlash head on the device "meta", which moves to the CPU; none may be missing,
    unknown or of another shape."""
    wanted, folder = head.state_dict(), checkpoint.place
    missing, unknown = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    if missing or unknown:
        parts = [f"lacks {len(missing)} tensors ({few(sorted(missing))})"] if missing else []
        parts += [f"has {len(unknown)} unknown tensors ({few(sorted(unknown))})"] if unknown else []
        raise CheckpointError(
            f"the {kind} head in {folder} {' and '.join(parts)}",
            why="the head would not draft as it was trained",
            fix="download or export it again",
        )
    for name, to in wanted.items():
        if to.shape != tensors[name].shape:
            shape = tuple(tensors[name].shape)
            raise _explain_mismatch(f"{name} in {folder} has the shape {shape}, but config.json says {tuple(to.shape)}")
    head.to_empty(device="cpu").load_state_dict(dict(tensors))
    head.in_8_bits = any(name.endswith(SCALE) for name in checkpoint.tensors)


def _explain_mismatch(what: str, fix: str = "take both files from the same checkpoint") -> CheckpointError:
    return CheckpointError(what, why="the weights and config.json seem to belong to different heads", fix=fix)


def fit(head: EagleHead, host: HeadHost) -> EagleHead:
    """Check that `head` was made for the target, let it use the target's weights, and drop draft ids that the target
    does not have. Returns a head in the target's dtype and on its device. Raises PairError, which gives the head's
    value and the target's."""
    c, borrows = head.config, not head.config.own_embedding
    strange = [tap for tap in c.taps if tap != -1 and not 0 <= tap <= host.layers]
    ids = f"the ids 0..{host.vocab_size - 1}"
    further = (
        (strange, f"the target layers {strange} ({TAPS})", f"layers 0..{host.layers}"),
        (borrows and c.hidden_size != host.hidden_size, f"width {c.hidden_size}", f"width {host.hidden_size}"),
        (borrows and (c.mask_token or 0) >= host.vocab_size, f"the mask token {c.mask_token}", ids),
    )
    check_host(host, "EAGLE" if c.version == 1 else "EAGLE-3", c.target_hidden, c.decoder.vocab_size, further)
    head = head.to(host.device, host.dtype)
    if c.version == 1:
        output = host.lm_head()
        return head.borrow(None if c.own_embedding else output if host.tied else host.embedding, output)
    return _drop_padding(head, host.vocab_size).borrow(None if c.own_embedding else host.embedding)


def _drop_padding(head: EagleHead, vocab_size: int) -> EagleHead:
    """Return the head without draft ids that the target does not have (padding)."""
    keep = head.target_ids < vocab_size  # [draft_vocab]
    if not bool(keep.all()):
        ids = head.target_ids[keep]
        head.config = replace(head.config, draft_vocab=len(ids))
        head.lm_head.weight = nn.Parameter(head.lm_head.weight[keep], requires_grad=False)
        head.d2t = head.d2t[: len(ids)]
        head.select_vocabulary(ids)
    return head


def save_eagle(
    head: EagleHead, folder: str | Path, dtype: torch.dtype = torch.float16, target: str | None = None
) -> None:
    """Write `head` in the native layout. dtype: of the stored floats; target: name of the target model."""
    write(folder, *lay_out_native(head, target), dtype)


def lay_out_native(head: EagleHead, target: str | None = None, maps: bool = False) -> Layout:
    """Return the head in the layout of the EAGLE authors' releases.

    maps  True to write d2t and t2d even for a full vocabulary, for which vLLM refuses them.

    config.json has keys for norms and orders of computation only if they differ from the authors' head, because
    SpecForge leaves out a norm if it reads `norm_output` = false.
    """
    c = head.config
    qwen3 = c.version == 3 and c.decoder.qk_norm
    config: JsonObject = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else f"LlamaForCausalLMEagle{'3' * (c.version == 3)}"],
        **describe_layers(c.decoder),
    }
    if target is not None:
        config["target_model"] = target
    if c.version == 1:
        return config | {"bias": c.fc_bias}, dict(head.state_dict())
    # SpecForge and SGLang write [1, 3, 4] for the states after layers 2, 4 and 5; SGLang only if the first is 1.
    by_sglang = [tap - (c.taps[0] == 2) for tap in c.taps]
    config |= {
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "num_aux_hidden_states": len(c.taps),
        TAPS: list(c.taps),  # ids as vLLM counts layers
        "eagle_config": {TAPS: by_sglang, "use_aux_hidden_state": True, "norm_before_fc": c.norm_before_fc},
    }
    if c.mask_token is not None:
        config |= {"ptd_token_id": c.mask_token, "para_depths": c.depths}
    return config | {name: True for name, on in _list_variants(c).items() if on}, _tensors(head, maps)


def lay_out_speculators(head: EagleHead, target: str, architectures: Seq[str]) -> Layout:
    """Return an EAGLE-3 or P-EAGLE head in the layout of the package `speculators`. target: folder or hub id."""
    c = head.config
    kind, name, length = ("eagle3", "Eagle3", 4) if c.mask_token is None else ("peagle", "PEagle", c.depths or 8)
    config: JsonObject = {
        "architectures": [f"{name}Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length}],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": describe_layers(c.decoder) | {"num_aux_hidden_states": len(c.taps)},
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        TAPS: list(c.taps),
        **_list_variants(c),
    }
    if c.mask_token is not None:
        config["mask_token_id"] = c.mask_token
    return config, {name.replace("midlayer.", "layers.0."): t for name, t in _tensors(head).items()}


def _list_variants(c: EagleConfig) -> dict[str, bool]:
    return {name: getattr(c, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}


def _tensors(head: EagleHead, maps: bool = False) -> dict[str, Tensor]:
    full = head.config.draft_vocab == head.config.decoder.vocab_size and not maps
    return {name: t for name, t in head.state_dict().items() if not (full and name in ("d2t", "t2d"))}


def describe_layers(d: DecoderConfig) -> JsonObject:
    """Describe the head's own decoder layers as a Llama or Qwen3 model, for transformers 4 and 5."""
    rope: JsonMapping = d.rope_parameters
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return {
        "model_type": "qwen3" if d.qk_norm else "llama", "vocab_size": d.vocab_size, "hidden_size": d.hidden_size,
        "num_hidden_layers": d.layers, "num_attention_heads": d.heads, "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim, "intermediate_size": d.intermediate_size, "max_position_embeddings": d.context,
        "rms_norm_eps": d.norm_eps, "hidden_act": d.activation, "attention_bias": d.qkv_bias, "mlp_bias": d.mlp_bias,
        "rope_theta": rope.get("rope_theta", 1e4), "rope_parameters": dict(rope),
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "tie_word_embeddings": False, **(_describe_windows(d.windows) if any(d.windows) else {}),
    }  # fmt: skip


def _describe_windows(windows: Seq[int | None]) -> JsonObject:
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"layer_types": types, "sliding_window": max(window or 0 for window in windows), "use_sliding_window": True}
