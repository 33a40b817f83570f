"""Loads a checkpoint by transformers, as carefully as our own loader does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.backends.table import resolve_settings
from slipstream.core.target import Target
from slipstream.errors import CheckpointError, LoadError, ParameterError, UnsupportedModelError
from slipstream.models.checkpoint import read_json, resolve, weight_files
from slipstream.models.lora import Adapter
from slipstream.targets.huggingface.huggingface_target import of_module
from slipstream.targets.huggingface.module_parts import ModuleParts, is_plain


def from_path(source: str | Path, settings: Mapping[str, Any], trust_remote_code: bool, role: str) -> Target:
    """A target out of a folder or hub id, in memory as `settings` say (dtype, device or device_map, threads).

    trust_remote_code  run Python code of the checkpoint where transformers has none. role: "target" or "draft".

    Raises the family of LoadError, and ParameterError for settings that transformers does not have.
    """
    _refuse(settings, ("quantize", "kv_dtype"))
    resolved = resolve_settings(
        "torch", settings["dtype"], settings["device"], None, settings["threads"], kv_tokens=settings["kv_tokens"]
    )
    if resolved.threads is not None:
        torch.set_num_threads(resolved.threads)
    folder = resolve(source)
    config = read_json(folder / "config.json")
    _check_code(config, source, trust_remote_code, role)
    if settings["lora"] is not None and config.get("quantization_config"):
        raise UnsupportedModelError(
            f"lora was given with {str(source)!r}, which is quantised",
            why="an adapter is merged into weights that are numbers",
            fix="give the checkpoint that it was quantised from",
        )
    adapter = None if settings["lora"] is None else Adapter(settings["lora"])
    weight_files(folder)  # names missing shards and pickles
    local = Path(source).expanduser().is_dir() or not trust_remote_code  # the code of a hub id is not in `folder`
    device_map = settings["device_map"]
    module = _loaded(folder if local else source, resolved.dtype, trust_remote_code, device_map)
    if device_map is None and ModuleParts(module).device != resolved.device:
        module.to(resolved.device)
    if adapter is not None:
        _merge(adapter, module)
    _check_weights(module, folder)
    return of_module(module, folder, kv_blocks=resolved.kv_blocks)


def with_settings(module: torch.nn.Module, settings: Mapping[str, Any]) -> Target:
    """A target around a model in memory. Raises ParameterError for settings that would change it."""
    _refuse(settings, ("quantize", "kv_dtype"))
    dtype, own = settings["dtype"], next(p.dtype for p in module.parameters() if p.is_floating_point())
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if wanted not in (None, own):
        raise ParameterError(
            f"dtype is {str(wanted)!r}, the loaded model is in {str(own)!r}", fix=f"model.to({wanted})"
        )
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    resolved = resolve_settings("torch", own, ModuleParts(module).device, kv_tokens=settings["kv_tokens"])
    return of_module(module, kv_blocks=resolved.kv_blocks)


def _refuse(settings: Mapping[str, Any], names: tuple[str, ...]) -> None:
    given = {name: settings[name] for name in names if settings[name] is not None}
    if given:
        raise ParameterError(
            " and ".join(f"{name}={value!r}" for name, value in given.items()) + " was asked of transformers",
            why="our own decoder does not run this model, and transformers has no such setting",
            fix="leave it out, or load the model quantised by transformers and give it to LLM",
        )


def _check_code(config: Mapping[str, Any], source: str | Path, trust_remote_code: bool, role: str) -> None:
    """Raise UnsupportedModelError for a checkpoint that needs code of its own, unless that is trusted."""
    from transformers import CONFIG_MAPPING

    kind, code = config.get("model_type"), config.get("auto_map")
    if kind in CONFIG_MAPPING or (code and trust_remote_code):
        return
    if not code:
        raise UnsupportedModelError(
            f"the architecture {kind!r} is known neither to Slipstream nor to the installed transformers",
            fix="install a newer transformers, or use another model",
        )
    allow = (
        f"read it; if you trust it: LLM({str(source)!r}, trust_remote_code=True), or --trust-remote-code"
        if role == "target"
        else "read it; if you trust it, load the draft model yourself and pass it: trust_remote_code of the target "
        "does not hold for its draft"
    )
    raise UnsupportedModelError(
        f"the {role} {str(source)!r} brings its own Python code ({', '.join(map(str, dict(code).values()))})",
        why="code of a checkpoint can do anything that you can",
        fix=allow,
    )


def _loaded(source: str | Path, dtype: torch.dtype, trust_remote_code: bool, device_map: Any) -> Any:
    """The model, on the CPU unless a device map is given, every weight of it from the checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
        auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        loaded: Any = auto.from_pretrained(
            str(source),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            device_map=device_map,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as fault:
        raise LoadError(
            f"transformers cannot load {str(source)!r}: {type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}",
            fix="check that transformers alone loads it; a quantised checkpoint needs its library, "
            "and a device_map accelerate",
        ) from fault
    module, found = loaded
    lost = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if lost:
        raise CheckpointError(
            f"{source} lacks {len(lost)} tensors of the model, or has them in another shape: {', '.join(lost[:5])}",
            why="transformers would fill them with random numbers",
            fix="download the checkpoint again, or correct config.json",
        )
    if dtype == torch.float64:
        module.config._experts_implementation = "eager"  # the grouped kernels do not support it
    return module.eval()


def _merge(adapter: Adapter, module: Any) -> None:
    """Merge an adapter into a model in memory. Raises its errors, and ParameterError for offloaded weights."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    shared = None if head is None or head.weight is not embedding.weight else head.weight
    for name, parameter in module.named_parameters():
        if adapter.changes(name, tuple(parameter.shape), parameter is shared):
            if parameter.is_meta:
                raise ParameterError(
                    f"lora changes {name}, which the device map offloads", fix="offload less, or merge it by peft"
                )
            parameter.data = adapter.merged(name, parameter.data)
    adapter.check_all_used()


def _check_weights(module: torch.nn.Module, folder: Path) -> None:
    """Raise CheckpointError for weights that are not finite. Quantised ones are what their library made of the file;
    offloaded ones are read when they are used."""
    for name, parameter in module.named_parameters():
        if is_plain(parameter) and parameter.numel() and not parameter.is_meta:
            low, high = parameter.detach().aminmax()  # one pass, no copy; NaN propagates
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise CheckpointError(
                    f"{name} in {folder} holds NaN or infinity",
                    why="every token computed with it would be meaningless",
                    fix="download the checkpoint again; if it was made here, look there for an overflow",
                )
