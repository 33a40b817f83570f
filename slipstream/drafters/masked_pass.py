"""Draft tokens that all come from one pass over mask tokens: P-EAGLE (arXiv 2602.01469) and PARD (arXiv 2504.18583).

The pass runs the text and K - 1 mask tokens after it; the last place of the text gives the distribution of draft token
1, the mask in place j that of token j + 1. No distribution depends on a token that was drawn, so each token is sampled
from the one of its place, which is its q. What depends on the tokens before (penalties, structured output) still does:
`Chains` applies it token by token, to logits that are known already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

import torch
from torch import Tensor

from slipstream.core.decode_steps import DecodedSteps, StepSampling
from slipstream.core.sequence import Sequence
from slipstream.drafters.chains import Source


class MaskedPass:
    """A `chains.Source` for `drafter`.

    run  (sequences, number of draft tokens of each) -> their logits, [number, V'] for each sequence. It leaves no more
         in the drafter's cache than the text.
    """

    multi_step = True

    def __init__(self, drafter: Source, run: Callable[[Seq[Sequence], Seq[int]], list[Tensor]]):
        self.device, self.width, self.room, self._run = drafter.device, drafter.width, drafter.room, run
        self._depth: dict[int, int] = {}
        self._made: dict[int, Tensor] = {}

    def plan(self, seqs: Seq[Sequence], depth: Seq[int]) -> None:
        """Tell how many tokens are drafted for each sequence next."""
        self._depth, self._made = {seq.id: d for seq, d in zip(seqs, depth, strict=True)}, {}

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """See `chains.Source`: the pass runs for the first draft token."""
        if not chains[0]:
            made = self._run(seqs, [self._depth[seq.id] for seq in seqs])
            self._made = {seq.id: logits for seq, logits in zip(seqs, made, strict=True)}
        return torch.stack([self._made[seq.id][len(chains[0])] for seq in seqs])

    def decode_steps(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        """See `chains.Source`."""
        logits = torch.stack(self._run(seqs, [steps] * len(seqs)), 1)  # [K, R, V']
        return DecodedSteps(torch.stack([sampling.pick(x.double(), j) for j, x in enumerate(logits)]), logits)
