"""Training of complete models with transformers: draft models, and targets that learn to exit early."""

from __future__ import annotations

import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName
from slipstream.errors import ParameterError, TrainingError, UnsupportedModelError, reading
from slipstream.tokens.folder_tokenizer import FolderTokenizer
from slipstream.tokens.text import tokenizer_of
from slipstream.training.objective import Figures, Objective, initialise


class TrainableModel(nn.Module):
    """A causal language model of transformers, of the Llama, Mistral, Qwen or GPT-2 kind."""

    def __init__(self, lm: Any):
        super().__init__()
        self.lm = lm
        base = getattr(lm, lm.base_model_prefix)
        layers, norm = (
            getattr(base, "layers", getattr(base, "h", None)),
            getattr(base, "norm", getattr(base, "ln_f", None)),
        )
        if layers is None or norm is None:
            raise UnsupportedModelError(f"the layers or the final norm of a {type(lm).__name__} cannot be found")
        self.parts: tuple[Any, Any, Any] = (base, list(layers), norm)  # a tuple: modules in it are not registered twice
        self.lm.eval()  # the checkpoint's dropout would make a step depend on more than (seed, step)

    def train(self, mode: bool = True) -> TrainableModel:
        self.training = mode
        return self

    @property
    def depth(self) -> int:
        return len(self.parts[1])

    @property
    def table(self) -> Tensor:
        """The output head [V, d]."""
        return self.lm.get_output_embeddings().weight  # type: ignore[no-any-return]

    def states(self, tokens: Tensor, keep: Seq[bool] | None = None, taps: Seq[int] = ()) -> list[Tensor]:
        """Return the inputs of the output head, which are hidden states after the final norm, [B, T, d] each: for each
        layer of `taps` (in increasing order), then for the last layer.

        tokens [B, T]; `keep[l]` false skips layer `l` (stochastic depth)."""
        base, layers, norm = self.parts
        skipped = [layer for layer, stays in zip(layers, keep or [True] * len(layers), strict=True) if not stays]
        try:
            for layer in skipped:
                layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
            out = base(input_ids=tokens, use_cache=False, output_hidden_states=bool(taps))
        finally:
            for layer in skipped:
                del layer.forward
        return [*(norm(out.hidden_states[1 + tap]) for tap in taps), out.last_hidden_state]


class ModelObjective(Objective):
    """An objective that trains a whole model."""

    module: TrainableModel

    def logits(self, states: Tensor) -> Tensor:
        """Turn states after the final norm [..., d] into logits [..., V]."""
        return F.linear(states, self.module.table.to(states.dtype))

    def shift(self, logits: Tensor) -> list[Tensor]:
        """Return the logits of each draft token, from the logits [R, L, V] of a model over the text. The logits of
        draft token j after token n are at position n + j, because up to the first rejection the draft equals the
        text."""
        return [logits[:, 1 + j :] for j in range(self.depth)]

    def export(self, folder: Path, target: str | None, figures: Figures) -> None:
        save_model(self.module, folder, self.teacher.decoder.checkpoint)


def load_trainable(checkpoint: CheckpointName) -> TrainableModel:
    """Load a checkpoint as a trainable module with float32 weights."""
    from transformers import AutoModelForCausalLM

    folder = Checkpoint.open(checkpoint).download()
    with reading(f"transformers cannot load {folder} for training", "check that transformers can load it"):
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return TrainableModel(lm)


def check_trainable(checkpoint: Checkpoint, role: str) -> None:
    """Raise ParameterError for a GGUF file. role: "target" or "draft"."""
    if checkpoint.is_gguf:
        raise ParameterError(
            f"the {role} {str(checkpoint)!r} is a GGUF file",
            why="the weights in a GGUF file are quantised, so they cannot be trained",
            fix="give the folder or hub id that the file was converted from",
        )


def make_llama(seed: int, **sizes: Any) -> TrainableModel:
    """Make a Llama with tied embeddings and normally distributed weights. Their standard deviation is 0.02, but 0.02 /
    sqrt(2 L) for matrices that write to the residual stream. sizes: named as in `LlamaConfig`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lm = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, bos_token_id=None, **sizes))
    initialise(lm, torch.Generator().manual_seed(seed), 0.02 * (2 * lm.config.num_hidden_layers) ** -0.5)
    return TrainableModel(lm)


def save_model(model: TrainableModel, folder: Path, tokenizer_from: Path | None) -> None:
    """Write a folder that transformers loads: float16 weights, configuration, and the tokenizer of `tokenizer_from`.

    Raises TrainingError if a weight exceeds the float16 range."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().cpu().to(torch.float16).contiguous() for name, w in model.lm.state_dict().items()}
    broken = [n for n, w in weights.items() if not bool(torch.isfinite(w).all())]
    if broken:
        raise TrainingError(
            f"{broken[0]} has values above 65504, the maximum of float16",
            why="the training run has diverged",
            fix="train with a smaller --lr",
        )
    model.lm.config.dtype = torch.float16
    model.lm.save_pretrained(folder, state_dict=weights)
    if tokenizer_from is None:
        return
    if Checkpoint.open(tokenizer_from).is_gguf:
        tokenizer = tokenizer_of(tokenizer_from)
        if isinstance(tokenizer, FolderTokenizer):
            tokenizer.transformers.save_pretrained(folder)
    else:
        for path in sorted(tokenizer_from.iterdir()):
            if path.name.startswith(
                ("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "added_tokens")
            ):
                shutil.copyfile(path, folder / path.name)
