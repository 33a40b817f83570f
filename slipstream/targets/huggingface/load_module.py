"""Loads a checkpoint by transformers, as carefully as our own loader does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.backends.table import resolve
from slipstream.checkpoints.checkpoint import Checkpoint, few
from slipstream.checkpoints.config_values import object_of
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.lora import Adapter
from slipstream.checkpoints.module_shape import ModelShape, explain_unknown, shape_in
from slipstream.checkpoints.weights import Progress, check_finite
from slipstream.core.target import Target
from slipstream.errors import CheckpointError, ParameterError, UnsupportedModelError, reading
from slipstream.settings import TRANSFORMERS
from slipstream.targets.described import Described
from slipstream.targets.huggingface.huggingface_target import of_module
from slipstream.targets.huggingface.kinds import ARCHITECTURES, ENCODER_DECODER, PACKED, Kind
from slipstream.targets.huggingface.module_parts import ModuleParts, is_plain

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class DescribedModule(Described):
    """A checkpoint that transformers runs. Its exact capabilities are known only after loading (`trials`)."""

    @staticmethod
    def of(checkpoint: Checkpoint, settings: LoadSettings, refusals: Mapping[str, str]) -> DescribedModule:
        """Describe a checkpoint. Raises ParameterError for settings that transformers does not have."""
        _refuse(settings, refusals.get("decoder", "executor='transformers' was given"))
        resolved = resolve(replace(settings, executor="torch"))
        return DescribedModule(checkpoint, resolved, TRANSFORMERS, refusals)

    @cached_property
    def config(self) -> ModelShape:
        return shape_in(self.checkpoint.place, self.checkpoint.config.get("model_type"))

    @property
    def kind(self) -> Kind:
        config = self.config
        return ARCHITECTURES.get(config.model_type, PACKED if config.source_context is None else ENCODER_DECODER)

    @property
    def weight_bytes(self) -> int:
        return self.config.parameters * self.settings.dtype.itemsize

    def load(self, progress: Progress | None = None) -> Target:
        settings, checkpoint = self.settings, self.checkpoint
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        folder, config, trusted = checkpoint.download(), checkpoint.config, settings.trust_remote_code
        _check_code(config, checkpoint, trusted, settings.role)
        if settings.lora is not None and config.get("quantization_config"):
            raise UnsupportedModelError(
                f"lora does not work with {str(checkpoint)!r}, which is quantised",
                why="an adapter can be merged only into floating-point weights",
                fix="give the checkpoint that it was quantised from",
            )
        adapter = None if settings.lora is None else Adapter(settings.lora)
        held = sum(checkpoint.stored.values())  # raises for missing shards and pickles
        if not trusted and self.config.parameters > 8 * held:
            raise CheckpointError(
                f"config.json of {folder} has {self.config.parameters:,} weights, but the files only {held:,} bytes",
                why="transformers would allocate memory for all weights before it reads the files",
                fix="take config.json and the weights from the same checkpoint",
            )
        local = checkpoint.is_local or not trusted  # the code of a hub id is not in `folder`
        module = _load(folder if local else str(checkpoint), settings.dtype, trusted, settings.device_map)
        if settings.device_map is None and ModuleParts(module).device != settings.device:
            module.to(settings.device)
        if adapter is not None:
            _merge(adapter, module)
        for name, parameter in module.named_parameters():  # quantised weights are checked by their library
            if is_plain(parameter) and not parameter.is_meta:  # offloaded weights are read at their first use
                check_finite(f"{name} in {folder}", parameter)
        target = of_module(module, folder, kv_blocks=settings.kv_blocks)
        for why in self.refusals.values():
            log.warning("%s: transformers runs it instead, slower", why)
        return target


def wrap_module(module: PreTrainedModel, settings: LoadSettings) -> Target:
    """Make a target around a model in memory. Raises ParameterError for settings that would change the model."""
    _refuse(settings, "the model is loaded already")
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    wanted = getattr(torch, settings.dtype) if isinstance(settings.dtype, str) else settings.dtype
    if wanted not in (None, dtype):
        raise ParameterError(
            f"dtype is {str(wanted)!r}, but the loaded model is in {str(dtype)!r}",
            fix=f"convert the model first: model.to({wanted})",
        )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return of_module(module, kv_blocks=settings.kv_blocks)


def _refuse(settings: LoadSettings, because: str) -> None:
    """Raise ParameterError for settings of our own decoder. because: why transformers runs the model."""
    settings.refuse(
        ("quantize", "kv_dtype"),
        "given for a model that transformers runs",
        f"{because}, and transformers has no such setting",
        "leave it out, or quantise the model with transformers and give the loaded model to LLM",
    )


def _check_code(config: Mapping[str, object], checkpoint: Checkpoint, trust_remote_code: bool, role: str) -> None:
    """Raise UnsupportedModelError for a checkpoint that needs its own code, unless the user trusts this code."""
    from transformers import CONFIG_MAPPING

    kind, code = config.get("model_type"), object_of(config, "auto_map")
    if (isinstance(kind, str) and kind in CONFIG_MAPPING) or (code and trust_remote_code):
        return
    if not code:
        raise explain_unknown(kind)
    allow = (
        f"read the code; if you trust it, LLM({str(checkpoint)!r}, trust_remote_code=True) or --trust-remote-code"
        if role == "target"
        else "read the code; if you trust it, load the draft model yourself and pass it to LLM, because "
        "trust_remote_code holds only for the target"
    )
    raise UnsupportedModelError(
        f"the {role} {str(checkpoint)!r} brings its own Python code ({', '.join(map(str, code.values()))})",
        why="code of a checkpoint can do everything that your user account can do",
        fix=allow,
    )


def _load(checkpoint: str | Path, dtype: torch.dtype, trust_remote_code: bool, device_map: object) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.quantizers import AutoHfQuantizer

    fix = "check that transformers can load it; quantised checkpoints need extra libraries, device_map needs accelerate"
    with reading(f"transformers cannot load {str(checkpoint)!r}", fix):
        config = AutoConfig.from_pretrained(str(checkpoint), trust_remote_code=trust_remote_code)
        text = config.get_text_config(decoder=True)
        quantised = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
        if quantised is not None and not AutoHfQuantizer.supports_quant_method(quantised):
            raise UnsupportedModelError(
                f"{str(checkpoint)!r} is quantised with the method {quantised['quant_method']!r}",
                why="transformers does not support this method, and would ignore the scales of the weights",
                fix="use the unquantised checkpoint, or one in a format that transformers supports",
            )
        auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        loaded: Any = auto.from_pretrained(
            str(checkpoint),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            device_map=device_map,
        )
    module, report = loaded
    lost = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if lost:
        raise CheckpointError(
            f"{checkpoint} lacks {len(lost)} tensors of the model, or has them in another shape: {', '.join(lost[:5])}",
            why="transformers would fill them with random numbers",
            fix="download the checkpoint again, or correct config.json",
        )
    unused = sorted(map(str, report["unexpected_keys"]))
    modules = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    beside = [name for name in unused if name.rpartition(".")[0] in modules]  # a scale, a bias
    if beside and quantised is None:  # quantised weights may have further tensors
        raise CheckpointError(
            f"{checkpoint} has {len(beside)} tensors that the model in config.json does not have: {few(beside)}",
            why="without these tensors the output would differ from that of the trained model",
            fix="correct config.json, which may switch off a bias, or lack quantization_config",
        )
    if unused:
        log.warning(f"{checkpoint} has {len(unused)} tensors that transformers does not use: {few(unused)}")
    if dtype == torch.float64:
        module.config._experts_implementation = "eager"  # the grouped kernels do not support it
    return module.eval()


def _merge(adapter: Adapter, module: PreTrainedModel) -> None:
    """Merge an adapter into a model. Raises the adapter's errors, and ParameterError for offloaded weights."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    shared = None if head is None or head.weight is not embedding.weight else head.weight
    for name, parameter in module.named_parameters():
        if adapter.changes(name, tuple(parameter.shape), parameter is shared):
            if parameter.is_meta:
                raise ParameterError(
                    f"lora changes {name}, which device_map offloads",
                    fix="offload less, or merge it with peft",
                )
            parameter.data = adapter.merge(name, parameter.data)
    adapter.check_all_used()
