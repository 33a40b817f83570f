"""Recognises the kind of a draft head in a checkpoint, checks by sizes whether the head fits a target, and reads and
writes the files of heads of every format.

A head is recognised by its config.json and the *names* of its tensors, not by the name of the checkpoint: an EAGLE-3
head that is run as an EAGLE-1 head may raise no error, but its draft tokens are never accepted.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.checkpoints.checkpoint import SINGLE, Checkpoint, CheckpointName, few
from slipstream.checkpoints.module_shape import differ
from slipstream.checkpoints.weights import check_finite, widen
from slipstream.core.strict import JsonMapping
from slipstream.core.target import HeadHost
from slipstream.errors import CheckpointError, LoadError, PairError

TAPS = "eagle_aux_hidden_state_layer_ids"
"""Key of config.json: the target layers whose states an EAGLE-3 head reads."""

MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of config.json that name the mask token of a parallel head (P-EAGLE), in the order in which vLLM reads them."""

_EAGLE3 = re.compile(r"midlayer\.|layers\.0\.hidden_norm\.|d2t$")
_MEDUSA = re.compile(r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight")

SCALE = ".scale"
"""Last part of the name of a tensor of scales [rows], for a matrix that is stored in 8 bits."""

HeadKind = Literal["medusa", "dflash", "eagle3", "eagle"]


def recognise(checkpoint: Checkpoint) -> HeadKind | None:
    """Return the kind of head; None for an ordinary model, or without a readable config.json (loading reports why)."""
    if checkpoint.is_gguf:
        return None
    try:
        config = checkpoint.config
    except LoadError:
        return None
    try:
        names = frozenset(n.removeprefix("model.") for n in checkpoint.tensor_names)
    except LoadError:  # e.g. only pickles, which loading refuses: config.json may suffice here
        names = frozenset()
    if "medusa_num_heads" in config or any(_MEDUSA.match(n) for n in names):
        return "medusa"
    if "hidden_norm.weight" in names or "dflash_config" in config:
        return "dflash"
    if names:
        if "fc.weight" not in names:
            return None
        # One tensor that only EAGLE-3 has is enough. If other tensors are missing, the loader names them.
        return "eagle3" if any(_EAGLE3.match(n) for n in names) else "eagle"
    declared = str(config.get("architectures")).lower()
    family = config.get("speculators_model_type")
    if "eagle3" in declared or family in ("eagle3", "peagle"):
        return "eagle3"
    return "eagle" if "eagle" in declared or family == "eagle" else None


def read_head(
    checkpoint: CheckpointName, ignored: re.Pattern[str]
) -> tuple[Checkpoint, HeadKind | None, dict[str, Tensor]]:
    """Read a head, and return (checkpoint, kind, tensors). Names lack the prefix "model."; tensors whose names match
    `ignored` are left out. Raises the family of `LoadError`."""
    opened = Checkpoint.open(checkpoint)
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(opened).items()}
    return opened, recognise(opened), {n: tensor for n, tensor in tensors.items() if not ignored.fullmatch(n)}


def check_host(
    host: HeadHost, kind: str, hidden_size: int, vocab_size: int, further: Iterable[tuple[object, str, str]] = ()
) -> None:
    """Raise PairError, with both values, unless a head that reads states of width `hidden_size`, with `vocab_size` ids,
    can belong to this target. Vocabularies are padded to round numbers, so small differences pass. A head has no
    tokenizer to compare. further: more comparisons, (True if they differ, the head's value, the target's value)."""
    for wrong, expected, actual in (
        (hidden_size != host.hidden_size, f"states of width {hidden_size}", f"states of width {host.hidden_size}"),
        (differ(host.vocab_size, vocab_size), f"a vocabulary of {vocab_size} ids", f"one of {host.vocab_size}"),
        *further,
    ):
        if wrong:
            raise PairError(
                f"the {kind} head was made for {expected}, but the target has {actual}",
                why="the head was trained for another target",
                fix="use a head that was trained for this target, or train one: slipstream train",
            )


def read_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read every tensor of a (small) checkpoint: name -> tensor in its stored dtype, 8-bit matrices in float32.

    Raises CheckpointError if files are missing, corrupt or pickled, or if numbers are not finite.
    """
    folder, tensors = checkpoint.download(), dict[str, Tensor]()
    for name, each in checkpoint.tensors.items():
        tensor = each.read()
        if tensor.is_floating_point():
            tensor = widen(f"{name} in {folder}", tensor)
            check_finite(f"{name} in {folder}", tensor)
        tensors[name] = tensor
    checkpoint.unmap()
    for name in [name for name in tensors if name + SCALE in tensors]:
        tensors[name] = tensors[name].float() * tensors.pop(name + SCALE)[:, None]
    return tensors


def write(
    folder: str | Path, config: JsonMapping, tensors: Mapping[str, Tensor], dtype: torch.dtype, file: str = SINGLE
) -> None:
    """Write config.json and `file`, with floats in `dtype`. int8: matrices become int8 with a scale for each row, other
    tensors float16. Raises CheckpointError for values that are not finite in `dtype`."""
    path = Path(folder)
    if dtype == torch.int8:
        tensors, dtype = _rows_in_8_bits(tensors), torch.float16
    stored = {n: t.detach().cpu().to(dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
    broken = [name for name, t in stored.items() if t.is_floating_point() and not bool(t.isfinite().all())]
    if broken:
        raise CheckpointError(
            f"{few(broken)} cannot be written as {dtype}: values are NaN or infinite",
            why="the head could not be loaded again",
            fix="save with a larger range (bfloat16 or float32), or check whether the training run diverged",
        )
    path.mkdir(parents=True, exist_ok=True)
    stored = {n: t.clone(memory_format=torch.contiguous_format) for n, t in stored.items()}  # no two share memory
    save_file(stored, path / file, metadata={"format": "pt"})
    (path / file).chmod(0o644)  # safetensors writes it readable by its owner only
    values = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _rows_in_8_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim == 2:
            scale = (tensor.abs().amax(1).clamp(min=1e-4) / 127).to(torch.float16)
            stored[name] = (tensor / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
            stored[name + SCALE] = scale
    return stored
