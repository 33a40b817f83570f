"""The objective of Medusa-1: heads on a frozen target. Head k is trained on the distribution k + 1 positions later (Cai
et al. 2401.10774, section 2.2.1).

Head k at position i predicts token i + 2 + k, so it is trained on the target's distribution at i + 1 + k. The paper
trains on the tokens of the text. The full distribution gives more signal per token, and acceptance depends on it. The
loss of head k has the weight decay^k, as in the paper; otherwise the large losses of the last heads would dominate.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.heads.medusa_format import save_medusa
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims
from slipstream.training.methods import MedusaOptions
from slipstream.training.objective import Figures, Objective, Predictions, decay_weights

RANKS = 10
"""Number of best candidates of each head whose accuracy is measured, which is enough to optimise draft trees."""


class MedusaObjective(Objective):
    module: MedusaHeads

    def __init__(self, teacher: Teacher, options: MedusaOptions, seed: int = 0):
        super().__init__(teacher, options, options.heads)
        c = teacher.config
        self.module = MedusaHeads(
            MedusaConfig(options.heads, options.layers, c.hidden_size, c.vocab_size, own_lm_head=options.own_head)
        )
        self.module.to(teacher.device, teacher.dtype).start_from(teacher.head)
        self.weights = decay_weights(options.decay, options.heads)

    def predictions(self, window: Window) -> Predictions:
        final = window.taps[FINAL]  # [B, T, d]
        states = self.module.states(final[:, : final.shape[1] - self.depth - 1])  # [B, N, K, d]
        table = self.module.lm_head
        aims = Aims(final, self.teacher.head, window.counts, 1)
        return states.permute(2, 0, 1, 3), table if table.dim() == 3 else table[None], aims, self.weights

    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        final = window.taps[FINAL]
        logits = self.module(final)  # [R, L, K, V]: row n - 1 predicts the token after token n
        return [logits[:, :, k] for k in range(self.depth)], self.teacher.logits(final)

    def acceptance_probs(self, window: Window, temperature: float) -> Tensor:
        """See `Objective.acceptance_probs`. At every temperature, draft tokens are the argmaxes of the heads."""
        return super().acceptance_probs(window, 0.0)

    @torch.no_grad()
    def measure(self, windows: list[Window]) -> Figures:
        """Measure `medusa_head_accuracies` [K][RANKS]: how often each head's candidate of each rank is the target's
        token. As in decoding, only predictions of output tokens that are made at output tokens count."""
        hits = torch.zeros(self.depth, RANKS, dtype=torch.float64)
        places = [0] * self.depth
        for window in windows:
            tokens, counts = window.tokens, window.counts
            ranked = min(RANKS, self.teacher.config.vocab_size)
            best = self.module(window.taps[FINAL]).topk(ranked, -1).indices  # [R, L, K, RANKS]
            for k in range(self.depth):
                rows = tokens.shape[1] - 2 - k
                right = best[:, :rows, k] == tokens[:, 2 + k :, None]  # [R, N, RANKS]
                inside = counts[:, 1 : 1 + rows] & counts[:, 2 + k :]  # [R, N]: row i predicts token i + 2 + k
                hits[k, :ranked] += (right & inside[..., None]).sum((0, 1)).double().cpu()
                places[k] += int(inside.sum())
        rates = [(hits[k] / max(1, places[k])).tolist() for k in range(self.depth)]
        return {"medusa_head_accuracies": [[round(x, 5) for x in row] for row in rates]}

    def export(self, folder: Path, target: str | None, figures: Figures) -> None:
        measured = figures.get("medusa_head_accuracies")
        if measured:
            self.module.config = replace(self.module.config, accuracies=tuple(map(tuple, measured)))
        save_medusa(self.module, folder, target=target)
