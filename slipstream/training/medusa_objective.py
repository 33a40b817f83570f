"""The objective of Medusa-1: heads on a frozen target, head k trained on the distribution k + 1 positions later (Cai et
al. 2401.10774, section 2.2.1).

Head k at position i predicts token i + 2 + k, so it is trained on the target's distribution at i + 1 + k. The paper
trains on the text (`loss="ce"`). Learning the full distribution ("kl") gives more signal per token, and acceptance is
decided by the distribution. The heads' losses are weighted by decay^k, as in the paper: otherwise the large losses of
far heads would dominate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.heads.medusa_format import save_medusa
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims, check_loss, distribution_losses
from slipstream.training.objective import Objective, agreement, chain_acceptance_probs, most_likely

if TYPE_CHECKING:
    from slipstream.training.data import Prepared
    from slipstream.training.run import RunConfig

RANKS = 10
"""Number of ranked candidates per head whose accuracy is measured; tree optimisation needs no more."""


@dataclass(frozen=True)
class MedusaOptions(Strict):
    """heads     number of heads, K. layers: residual blocks per head.
    own_head  each head trains its own lm_head, initialised with the target's; False: all share the target's.
    loss      one of `losses.KINDS`. decay: weight of head k is decay^k.
    """

    heads: int = 4
    layers: int = 1
    own_head: bool = True
    loss: str = "kl"
    decay: float = 0.8

    def __post_init__(self) -> None:
        check_integer("heads", self.heads, 1)
        check_integer("layers", self.layers, 1)
        check_number("decay", self.decay, 0.0, 1.0, open_low=True)
        check_loss(self.loss)


class MedusaObjective(Objective):
    name = "medusa"
    taps = (FINAL,)

    def __init__(self, teacher: Teacher, options: MedusaOptions):
        super().__init__()
        self.teacher, self.options, self.depth = teacher, options, options.heads
        c = teacher.config
        self.module: MedusaHeads = MedusaHeads(
            MedusaConfig(options.heads, options.layers, c.hidden_size, c.vocab_size, own_lm_head=options.own_head)
        )
        self.module.to(teacher.device, teacher.dtype).start_from(teacher.head)
        raw = [options.decay**k for k in range(options.heads)]
        self.weights = [w / sum(raw) for w in raw]

    def forward(self, window: Window) -> tuple[Tensor, dict[str, Tensor]]:
        final, tokens = window.taps[FINAL], window.tokens  # [B, T, d], [B, T]
        heads = self.options.heads
        rows = tokens.shape[1] - heads - 1
        states = self.module.states(final[:, :rows])  # [B, N, K, d]
        table = self.module.lm_head
        weight = table if table.dim() == 3 else table[None]
        aims = Aims(final, self.teacher.head, tokens, window.counts, 1)
        loss, each = distribution_losses(self.options.loss, states.permute(2, 0, 1, 3), weight, aims, self.weights)
        shown = {f"loss{k + 1}": each[k] for k in range(heads)}
        if not self.training:
            target_ids = most_likely(final, self.teacher.head)  # [B, T]
            for k in range(heads):
                head_ids = most_likely(states[:, :, k], weight[min(k, len(weight) - 1)])
                counts = window.counts[:, 2 + k : 2 + k + rows]
                shown[f"agree{k + 1}"] = agreement(head_ids, target_ids[:, 1 + k : 1 + k + rows], counts)
        return loss, shown

    def acceptance_probs(self, window: Window, temperature: float) -> Tensor:
        final = window.taps[FINAL]
        logits = self.module(final)  # [R, L, K, V]: row n - 1 predicts what follows token n
        draft_logits = [logits[:, :, k] for k in range(self.options.heads)]
        return chain_acceptance_probs(draft_logits, self.teacher.logits(final), window.tokens, temperature)

    @torch.no_grad()
    def measure(self, windows: list[Window], prompts: list[list[int]]) -> dict[str, Any]:
        """`medusa_head_accuracies` [K][RANKS]: how often the candidate of each rank is the target's token."""
        hits = torch.zeros(self.options.heads, RANKS, dtype=torch.float64)
        places = [0] * self.options.heads
        for window, starts in zip(windows, prompts, strict=True):
            final, tokens = window.taps[FINAL], window.tokens
            best = self.module(final).topk(min(RANKS, self.teacher.config.vocab_size), -1).indices  # [R, L, K, RANKS]
            for k in range(self.options.heads):
                right = best[:, : tokens.shape[1] - 2 - k, k] == tokens[:, 2 + k :, None]  # [R, N, RANKS]
                at = torch.arange(right.shape[1], device=tokens.device)  # [N]: predicts token at + 2 + k
                begins = torch.tensor(starts, device=tokens.device)[:, None]
                # As in decoding, only predictions of the target's output count, not of the prompt or padding.
                inside = (at + 1 >= begins) & window.counts[:, 2 + k :]  # [R, N]
                hits[k, : right.shape[2]] += (right & inside[..., None]).sum((0, 1)).double().cpu()
                places[k] += int(inside.sum())
        rows = [(hits[k] / max(1, places[k])).tolist() for k in range(self.options.heads)]
        return {"medusa_head_accuracies": [[round(x, 5) for x in row] for row in rows]}

    def export(self, folder: Path, facts: Mapping[str, Any]) -> None:
        measured = facts.get("medusa_head_accuracies")
        if measured:
            self.module.config = replace(self.module.config, accuracies=tuple(map(tuple, measured)))
        save_medusa(self.module, folder, target=facts.get("target"))


def make(teacher: Teacher, config: RunConfig, prepared: Prepared) -> MedusaObjective:
    """See `methods`."""
    return MedusaObjective(teacher, config.options)
