"""Training of whole models: a draft model, or a target that learns to exit early.

Two implementations of one interface: `CompactLlama` if the checkpoint is a plain Llama with tied embeddings (several
times faster on a CPU), the transformers model otherwise. Both return the hidden states after any layer, can skip
layers, and are saved as folders that transformers loads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.errors import LoadError, TrainingError, UnsupportedModelError
from slipstream.models.checkpoint import resolve
from slipstream.models.config import DecoderConfig
from slipstream.models.weights import load_weights
from slipstream.training.compact import CompactLlama, ModelShape
from slipstream.training.objective import Objective


class HuggingFaceModel(nn.Module):
    """A transformers causal LM of the Llama, Mistral, Qwen or GPT-2 kind, with the members of `CompactLlama`."""

    def __init__(self, folder: Path):
        super().__init__()
        from transformers import AutoModelForCausalLM

        try:
            self.lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as fault:
            raise LoadError(f"transformers cannot load {folder} for training ({fault})") from fault
        base = getattr(self.lm, self.lm.base_model_prefix)
        layers, norm = (
            getattr(base, "layers", getattr(base, "h", None)),
            getattr(base, "norm", getattr(base, "ln_f", None)),
        )
        if layers is None or norm is None:
            raise UnsupportedModelError(f"{type(self.lm).__name__} has no known layer list or final norm")
        self.parts: tuple[Any, Any, Any] = (base, list(layers), norm)  # a tuple, so that they are not registered twice
        self.lm.eval()  # the checkpoint's dropout would make a step depend on more than (seed, step)

    def train(self, mode: bool = True) -> HuggingFaceModel:
        self.training = mode
        return self

    @property
    def depth(self) -> int:
        return len(self.parts[1])

    @property
    def table(self) -> Tensor:
        return self.lm.get_output_embeddings().weight  # type: ignore[no-any-return]

    def normed(self, x: Tensor) -> Tensor:
        return self.parts[2](x)  # type: ignore[no-any-return]

    def hidden(self, tokens: Tensor, keep: Iterable[bool] | None = None, taps: Iterable[int] = ()) -> list[Tensor]:
        base, layers, _ = self.parts
        kept = [True] * len(layers) if keep is None else list(keep)
        wanted = sorted({*taps, len(layers) - 1})
        seen: dict[int, Tensor] = {}

        def watch(index: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                seen[index] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [layers[i].register_forward_hook(watch(i)) for i in wanted]
        skipped = [layer for layer, stays in zip(layers, kept, strict=True) if not stays]
        try:
            for layer in skipped:
                layer.forward = _pass_on
            base(input_ids=tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
            for layer in skipped:
                del layer.forward
        # As in CompactLlama, the last state comes once more at the end if it was tapped.
        return [*(seen[i] for i in sorted(set(taps))), seen[len(layers) - 1]]


def _pass_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


class ModelObjective(Objective):
    """An objective that trains a whole model."""

    module: CompactLlama | HuggingFaceModel

    def logits(self, states: Tensor) -> Tensor:
        """States before the final norm [..., d] -> logits [..., V]."""
        normed = self.module.normed(states)
        return F.linear(normed, self.module.table.to(normed.dtype))

    def shifted(self, logits: Tensor) -> list[Tensor]:
        """Logits [R, L, V] of a model that reads the text: those of draft token j after token n are at position n + j,
        because until a rejection the draft is the text itself."""
        return [logits[:, 1 + j :] for j in range(self.depth)]

    def export(self, folder: Path, facts: Mapping[str, Any]) -> None:
        decoder = self.teacher.decoder
        save_model(self.module, folder, decoder.source, sorted(decoder.capabilities.eos_ids))


def shape_of(config: DecoderConfig) -> ModelShape | None:
    """The shape with which `CompactLlama` computes the same function; None if it cannot."""
    plain = (
        config.model_type == "llama" and config.tie_embeddings and config.norm == "rms" and config.activation == "silu"
        and config.gated and config.position == "rope" and config.experts is None and not config.qk_norm
        and not (config.qkv_bias or config.o_bias or config.mlp_bias) and all(w is None for w in config.windows)
        and config.rope_parameters.get("rope_type", "default") == "default"
    )  # fmt: skip
    if not plain:
        return None
    return ModelShape(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        intermediate_size=config.intermediate_size, max_position_embeddings=config.context,
        rope_theta=float(config.rope_parameters.get("rope_theta", 10000.0)), rms_norm_eps=config.norm_eps,
    )  # fmt: skip


def load_trainable(source: str | Path, compile: bool = False) -> CompactLlama | HuggingFaceModel:
    """Load a checkpoint as a module to train, weights in float32."""
    folder, config = resolve(source), DecoderConfig.load(source)
    shape = shape_of(config)
    if shape is None:
        return HuggingFaceModel(folder)
    model = CompactLlama(shape, compile=compile)
    weights = load_weights(folder, config, torch.float32)
    model.load_state_dict(
        {f"model.{name}": weights[name].clone() for name in weights if not name.startswith("lm_head")}
    )
    return model


def save_model(
    model: CompactLlama | HuggingFaceModel, folder: Path, tokenizer_from: Path | None, eos: list[int]
) -> None:
    """Write a folder that transformers loads: float16 weights, configuration, and the tokenizer of `tokenizer_from`.

    Raises TrainingError if a weight exceeds the float16 range.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inner = model.lm if isinstance(model, HuggingFaceModel) else model
    weights = {name: w.detach().cpu().to(torch.float16).contiguous() for name, w in inner.state_dict().items()}
    broken = [n for n, w in weights.items() if not bool(torch.isfinite(w).all())]
    if broken:
        raise TrainingError(
            f"{broken[0]} has values above 65504, the maximum of float16",
            why="the run has diverged",
            fix="train with a smaller --lr",
        )
    if isinstance(model, HuggingFaceModel):
        model.lm.config.dtype = torch.float16
        model.lm.save_pretrained(folder, state_dict=weights)
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable only by its owner
        ends = eos or [0]
        (folder / "config.json").write_text(json.dumps(model.shape.hf_config(ends, ends[0]), indent=2) + "\n")
        generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": ends[0]}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer_from is not None:
        for path in sorted(tokenizer_from.iterdir()):
            if path.name.startswith(
                ("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "added_tokens")
            ):
                shutil.copyfile(path, folder / path.name)
