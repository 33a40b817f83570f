"""Reads Medusa heads in the two layouts in use, and writes the layout "medusa".

    "medusa"  {h}.{l}.linear.{weight,bias}, {h}.{N}.weight                            the reference implementation
    "blocks"  blocks.{h}.layers.{l}.{weight,bias}, lm_heads.{h}.weight or lm_head.weight    vLLM up to 0.32

In both, tensor names may begin with "medusa_head." or "medusa_heads.", and there may be a `token_map` int64
[draft_vocab]. Sizes are taken from the tensors, and config.json must not contradict them. Exception: published
checkpoints have a config.json with fewer heads than the file holds; then all heads of the file are used.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import SINGLE, Checkpoint, CheckpointName, few
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.core.target import HeadHost
from slipstream.errors import CheckpointError, ConfigError, reading
from slipstream.heads.medusa_heads import Accuracies, MedusaConfig, MedusaHeads
from slipstream.heads.recognition import check_host, read_tensors, write

log = logging.getLogger("slipstream")

_PREFIX = re.compile(r"^medusa_heads?\.")
_IN_BLOCKS = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"(?:(\d+)\.\d+|lm_heads\.(\d+))\.weight")


@reading("the draft head cannot be read", "download or export it again", CheckpointError)
def load_medusa(checkpoint: CheckpointName) -> MedusaHeads:
    """Load the heads in a folder or hub repository, float32, on the CPU. If the heads use the target's lm_head and the
    file has no copy of it, `borrow` must be called before use.

    Raises CheckpointError (files missing, corrupt or pickled; tensors missing, unknown or of another shape) and
    ConfigError (config.json contradicts the tensors).
    """
    opened = Checkpoint.open(checkpoint)
    folder, config = opened.download(), opened.config
    tensors = {_IN_BLOCKS.sub(r"\1.\2.linear.", _PREFIX.sub("", n)): t for n, t in read_tensors(opened).items()}
    token_map, shared = tensors.pop("token_map", None), tensors.pop("lm_head.weight", None)
    heads = sorted(name for name in tensors if _HEAD.fullmatch(name))
    if config.get("original_lm_head") and len(heads) == 1:  # vLLM also accepts the shared head under this name
        shared = tensors.pop(heads.pop())
    _refuse_unknown(folder, [name for name in tensors if name not in heads and not _BLOCK.fullmatch(name)])
    c = _read_config(folder, config, tensors, tensors[heads[0]] if heads else shared, bool(heads), token_map)
    tensors = {re.sub(r"^lm_heads\.(\d+)", rf"\1.{c.layers}", name): tensor for name, tensor in tensors.items()}
    with torch.device("meta"):  # names are checked before memory is taken
        wanted = _tensors(MedusaHeads(c)).keys()
    if missing := wanted - tensors.keys():
        raise CheckpointError(f"{folder} lacks {few(sorted(missing))}", fix="download or export it again")
    _refuse_unknown(folder, tensors.keys() - wanted)
    sizes = {"hidden_size": c.hidden_size, "medusa_num_layers": c.layers, "truncated_vocab_size": c.width}
    for key, size in sizes.items():
        if (said := _read_count(folder, config, key)) not in (None, size):
            raise ConfigError(
                f"{folder / 'config.json'} says {key} {said}, the tensors say {size}",
                why="one of the two belongs to another checkpoint",
                fix="download or export the heads again",
            )
    loaded = MedusaHeads(c)
    with torch.no_grad():
        if token_map is not None:
            loaded.select_vocabulary(_check_map(folder, token_map, c))
        for name, to in _tensors(loaded).items():
            tensor = tensors[name]
            if name.endswith(f".{c.layers}.weight") and len(tensor) == c.vocab_size != c.width:
                tensor = tensor[loaded.token_map]
            to.copy_(_check_shape(folder, name, tensor, to.shape))
        if shared is not None:
            loaded.borrow(_check_shape(folder, "lm_head.weight", shared, (len(shared), c.hidden_size)))
    return loaded.requires_grad_(False).eval()


def _tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """Return name in the layout "medusa" -> one head's part of the stacked parameters."""
    tensors: dict[str, Tensor] = {}
    for h in range(heads.config.heads):
        for layer in range(heads.config.layers):
            tensors[f"{h}.{layer}.linear.weight"] = heads.blocks[layer, h]
            if heads.biases is not None:
                tensors[f"{h}.{layer}.linear.bias"] = heads.biases[layer, h]
        if heads.lm_heads is not None:
            tensors[f"{h}.{heads.config.layers}.weight"] = heads.lm_heads[h]
    return tensors


def save_medusa(
    heads: MedusaHeads,
    folder: str | Path,
    dtype: torch.dtype = torch.float16,
    target: str | None = None,
    file: str = SINGLE,
) -> None:
    """Write config.json and `file`. A borrowed lm_head belongs to the target and is not written.

    dtype: of the stored floats; target: name of the target model.
    """
    c, tensors = heads.config, _tensors(heads)
    if c.draft_vocab is not None:
        tensors["token_map"] = heads.token_map
    config: JsonObject = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "medusa_num_heads": c.heads,
        "medusa_num_layers": c.layers, "hidden_size": c.hidden_size, "vocab_size": c.vocab_size,
        "truncated_vocab_size": c.width, "original_lm_head": not c.own_lm_head, "medusa_fc_bias": c.bias,
    }  # fmt: skip
    if target is not None:
        config["base_model_name_or_path"] = target
    if c.accuracies is not None:
        config["medusa_head_accuracies"] = [list(row) for row in c.accuracies]
    write(folder, config, tensors, dtype, file)


def fit(heads: MedusaHeads, host: HeadHost) -> MedusaHeads:
    """Check that the heads were made for the target, borrow the target's lm_head if they have none, and drop draft ids
    that the target lacks. Returns heads in the target's dtype, on its device. Raises PairError, which gives the heads'
    value and the target's."""
    c = heads.config
    check_host(host, "Medusa", c.hidden_size, c.vocab_size)
    known = torch.nonzero(heads.token_map < host.vocab_size)[:, 0]
    if len(known) < c.width:  # the heads' vocabulary is padded wider than the target's
        heads = _keep_rows(heads, known)
    heads = heads.to(host.device, host.dtype)
    return heads if heads.has_lm_head else heads.borrow(host.lm_head())


def _keep_rows(heads: MedusaHeads, rows: Tensor) -> MedusaHeads:
    cut = MedusaHeads(replace(heads.config, draft_vocab=len(rows))).to(heads.dtype)
    state = heads.state_dict()
    state["token_map"] = state["token_map"][rows]
    if "lm_heads" in state:
        state["lm_heads"] = state["lm_heads"][:, rows]
    cut.load_state_dict(state)
    if heads.lm_heads is None and heads.has_lm_head:
        cut.borrow(heads.lm_head[rows])
    return cut.requires_grad_(False).eval()


def _refuse_unknown(folder: Path, names: Collection[str]) -> None:
    if names:
        raise CheckpointError(
            f"{folder} holds tensors that Medusa heads do not have: {few(sorted(names))}",
            why="their purpose is unknown",
            fix="load a whole model as a model; a checkpoint of heads holds residual blocks and lm_heads",
        )


def _read_config(
    folder: Path,
    config: JsonMapping,
    tensors: Mapping[str, Tensor],
    any_head: Tensor | None,
    own_lm_head: bool,
    token_map: Tensor | None,
) -> MedusaConfig:
    """Make the configuration from the tensors. any_head: one of the lm_heads in the file, if it has any."""
    blocks = {name: match for name in tensors if (match := _BLOCK.fullmatch(name))}
    if not blocks:
        raise CheckpointError(
            f"{folder} holds no residual block of a Medusa head", fix="give the folder of the heads, not the target's"
        )
    layers = 1 + max(int(block[2]) for block in blocks.values())
    numbers = [match[1] or match[2] for name in tensors if (match := _HEAD.fullmatch(name))]
    count = 1 + max(map(int, [*numbers, *(block[1] for block in blocks.values())]))
    said = _read_count(folder, config, "medusa_num_heads", "num_heads") or count
    if said < count:
        log.warning("%s names %d heads, the file holds %d: all of them are used", folder / "config.json", said, count)
    hidden = (1, *tensors[next(iter(blocks))].shape)[-1]  # a scalar is refused later, by its shape
    vocab = _read_count(folder, config, "vocab_size")
    if vocab is None and any_head is not None and token_map is None:
        vocab = len(any_head)
    if vocab is None:
        raise ConfigError(f"{folder / 'config.json'} names no vocab_size", fix="add the target's vocab_size")
    width = vocab if token_map is None else len(token_map)
    if any_head is not None and len(any_head) not in (width, vocab):
        raise ConfigError(
            f"the lm_heads in {folder} have {len(any_head)} rows, the vocabulary has {width} ids",
            why="the id of each row would be unknown",
            fix="correct vocab_size in config.json, or add the token_map of a truncated vocabulary",
        )
    measured = config.get("medusa_head_accuracies")
    return MedusaConfig(
        heads=max(count, said),
        layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab=None if token_map is None else width,
        own_lm_head=own_lm_head,
        bias=any(block[3] == "bias" for block in blocks.values()),
        accuracies=None if measured is None else _read_accuracies(folder, measured),
    )


def _read_accuracies(folder: Path, measured: Iterable[Iterable[float]]) -> Accuracies:
    what = f"medusa_head_accuracies in {folder / 'config.json'} is not a table of numbers"
    with reading(what, "write one list of shares per head, or remove the key", ConfigError):
        return tuple(tuple(float(value) for value in row) for row in measured)


def _read_count(folder: Path, config: JsonMapping, *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{key} in {folder / 'config.json'} is {value!r}", fix="write an integer")
            return value
    return None


def _check_map(folder: Path, token_map: Tensor, config: MedusaConfig) -> Tensor:
    ids = token_map.long()
    if ids.dim() != 1 or len(set(ids.tolist())) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < (
        config.vocab_size
    ):  # fmt: skip
        raise CheckpointError(
            f"token_map in {folder} is not a list of different ids below {config.vocab_size}",
            why="the heads would draft ids that the target does not have",
            fix="export the heads again",
        )
    return ids


def _check_shape(folder: Path, name: str, tensor: Tensor, shape: Seq[int]) -> Tensor:
    if tensor.shape != tuple(shape):
        raise CheckpointError(
            f"{name} in {folder} is {tuple(tensor.shape)}, expected {tuple(shape)}",
            why="heads of different sizes do not belong together",
            fix="download or export it again",
        )
    return tensor
