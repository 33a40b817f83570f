"""`Adapter`: a LoRA adapter in PEFT's format, merged into weights as they are read.

A weight W becomes W + s B A, computed in float32 or wider and stored in the dtype of W. s is alpha / r; with
`use_rslora`, alpha / sqrt(r). Tensors of `modules_to_save` replace W.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName, few, read_json
from slipstream.checkpoints.tensor_file import TensorFile
from slipstream.core.strict import JsonMapping
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError, reading

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_WITHOUT_EFFECT = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that do not change the base model's weights."""
_READ = frozenset(
    (
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save",
        "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules",
        "task_type", "use_rslora",
    )
)  # fmt: skip
"""Fields of adapter_config.json that are read here, or that have no effect on a trained adapter."""


class Adapter:
    """A LoRA adapter. checkpoint: of the adapter. Raises `LoadError` or its subclasses; UnsupportedModelError if the
    adapter is not plain LoRA."""

    def __init__(self, checkpoint: CheckpointName):
        self.folder = Checkpoint.open(checkpoint).download()
        config = read_json(self.folder / CONFIG)
        _refuse(config, self.folder)
        self._full: dict[str, Tensor] = {}
        factors: defaultdict[tuple[str, bool], dict[str, Tensor]] = defaultdict(dict)
        for stored, tensor in self._tensors().items():
            name = stored.removeprefix("base_model.model.").replace(".base_layer.", ".")
            if factor := _FACTOR.fullmatch(name):
                factors[factor[1], bool(factor[2])][factor[3]] = tensor
            else:
                self._full[_key(name)] = tensor
        what = f"{self.folder / CONFIG} has no usable r, lora_alpha or pattern of them"
        with reading(what, "download or export it again", ConfigError):
            self._factors = {
                _key(f"{module}.weight"): self._product(module, embedding, pair, config)
                for (module, embedding), pair in factors.items()
            }
        self._left = {*self._full, *self._factors}
        base = config.get("base_model_name_or_path")
        self._fix = f"use the model that the adapter was trained on ({base})" if base else "use its base model"

    def _tensors(self) -> dict[str, Tensor]:
        path = self.folder / FILE
        if not path.exists():
            why = "pickles are not read, because they can run any code"
            raise CheckpointError(f"{self.folder} holds no {FILE}", why=why, fix="save it anew")
        with reading(f"{path} cannot be read", "download it again", CheckpointError):
            tensors = {name: tensor.read() for name, tensor in TensorFile(path).tensors.items()}
            wrong = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if wrong or not tensors:
            what = f"NaN or infinity in {few(wrong)}" if wrong else "no tensor"
            raise CheckpointError(f"{path} holds {what}", fix="download or export it again")
        return tensors

    def _product(
        self, module: str, embedding: bool, pair: Mapping[str, Tensor], config: JsonMapping
    ) -> tuple[Tensor, Tensor, float]:
        """Return two matrices and a number. Their product is the change of the module's weight."""
        rank = _of_module(config.get("rank_pattern"), module, config["r"])
        if pair.keys() != {"A", "B"} or not len(pair["A"]) == pair["B"].shape[-1] == rank:
            shapes = {name: tuple(tensor.shape) for name, tensor in pair.items()}
            raise CheckpointError(
                f"{self.folder} has for {module} matrices of the shapes {shapes}, but {CONFIG} says rank {rank}",
                fix="take both files from the same adapter",
            )
        scale = _of_module(config.get("alpha_pattern"), module, config["lora_alpha"])
        scale /= math.sqrt(rank) if config.get("use_rslora") else rank
        if embedding or config.get("fan_in_fan_out"):
            return pair["A"].t(), pair["B"].t(), scale
        return pair["B"], pair["A"], scale

    def changes(self, name: str, shape: tuple[int, ...], shared: bool = False) -> bool:
        """Return whether the adapter changes the model's tensor `name`. shared: whether the tensor is both embedding
        and output head. Raises CheckpointError if the adapter does not fit the model."""
        key = _key(name)
        if key not in self._full and key not in self._factors:
            return False
        if shared:
            raise CheckpointError(
                f"the adapter {self.folder} changes {name}, which is the embedding and the output head of this model",
                why="merging would change both",
                fix="merge it by peft into a copy of the model with tie_word_embeddings=False",
            )
        wanted = [tuple(self._full[key].shape)] if key in self._full else []
        if key in self._factors:
            left, right, _ = self._factors[key]
            wanted.append((left.shape[0], right.shape[-1]))
        if any(each != shape for each in wanted):
            raise CheckpointError(
                f"{name} has the shape {shape}, but the adapter {self.folder} was made for {wanted[0]}",
                why="the adapter was trained on another model",
                fix=self._fix,
            )
        self._left.discard(key)
        return True

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Merge the adapter into a tensor that it changes."""
        key = _key(name)
        if key in self._full:
            weight = self._full[key].to(weight)
        if key not in self._factors:
            return weight
        left, right, scale = self._factors[key]
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return (wide + left.to(wide) @ right.to(wide) * scale).to(weight.dtype)

    def check_all_used(self) -> None:
        """Raise CheckpointError if the adapter changes tensors that the model does not have."""
        if self._left:
            raise CheckpointError(
                f"the adapter {self.folder} changes {len(self._left)} tensors that this model does not have: "
                + few(self._left),
                why="without them, the model that runs would not be the one that was trained",
                fix=self._fix,
            )


def _key(name: str) -> str:
    """Remove the first part of a name. Checkpoints of a model without its output head lack this part."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _of_module(pattern: Mapping[str, object] | None, module: str, default: object) -> Any:
    """Return the value of the first regular expression that matches the end of the module's name, as PEFT does."""
    return next((v for key, v in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _refuse(config: Mapping[str, object], folder: Path) -> None:
    """Raise UnsupportedModelError for an adapter whose effect is not W + s B A."""
    wrong = {name: value for name, value in config.items() if value and name not in _READ}
    if str(config.get("peft_type")).upper() != "LORA":
        wrong["peft_type"] = config.get("peft_type")
    if config.get("bias") not in (None, "none"):
        wrong["bias"] = config["bias"]
    if config.get("init_lora_weights") not in _WITHOUT_EFFECT:
        wrong["init_lora_weights"] = config["init_lora_weights"]
    if wrong:
        raise UnsupportedModelError(
            f"the adapter {folder} has " + " and ".join(f"{name}={value!r}" for name, value in wrong.items()),
            why="only plain LoRA is merged: two matrices for each weight",
            fix="merge it by peft (merge_and_unload), and load the folder that save_pretrained then writes",
        )
