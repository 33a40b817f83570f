"""DFlash (Chen et al. 2602.06036): a head reads the target's hidden states, and drafts a whole block in one pass.

The tapped states of every accepted token become keys and values of each layer of the head (section 4.1): one entry a
token in its KV cache, kept and rolled back like an EAGLE head's. A draft is one pass over a block, the last token and a
mask for each draft token. Its distributions are independent of each other given the text; with a Markov head (DSpark,
2607.05147) each also depends on the draft token before it. Either way a draft is a chain, whose tokens are drawn from
the distributions q that verification is given. A short draft is the beginning of a block, and takes as long.
"""

import copy
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.backends.torch.torch_heads import TorchDFlash
from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.drafter import DrafterTraits
from slipstream.core.sequence import Sequence
from slipstream.core.target import HEAD_HOST, Target, needed
from slipstream.drafters.chains import Chains
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.none import NoOptionsConfig
from slipstream.heads.dflash_format import fit, load_dflash
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_rows import HeadDrafter


class DFlashDrafter(HeadDrafter):
    """runtime: the head. vocab_size: width of the target's logits."""

    name = "dflash"

    def __init__(self, runtime: TorchDFlash, vocab_size: int):
        super().__init__(runtime)
        c = runtime.config
        self.runtime, self.multi_step = runtime, True
        self.width = len(runtime.head.output_head) if c.draft_vocab is None else c.decoder.vocab_size
        depth, n = min(c.depth, MAX_NODES), c.block
        self.traits = DrafterTraits(c.taps, chains_only=True, reads_prompts=True, keeps_prefixes=True, longest=depth)
        self._depth, self._chains = depth, Chains(self, vocab_size)
        self._ran: tuple[list[int], Tensor] | None = None  # ids, and logits [R, K, V] of the blocks that ran last
        self._sees = None if c.causal else torch.ones(n, n, dtype=torch.bool)

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        depth = [self.depth(seq, min(most, self._depth)) for seq, most in zip(seqs, budget, strict=True)]
        return self._chains.draft(seqs, depth)

    # --- see `chains.Source` ---------------------------------------------------------------------------------------

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """Logits [R, V]. All of a block is run for its first draft token."""
        drafted = len(chains[0])
        if not drafted or self._ran is None:
            self._ran = [seq.id for seq in seqs], self._blocks(seqs, self._depth)
        ids, logits = self._ran
        before = [[*seq.tokens[-1:], *chain][-1] for seq, chain in zip(seqs, chains, strict=True)]
        rows = logits[[ids.index(seq.id) for seq in seqs], drafted]  # [R, V], a copy
        return self.runtime.head.after(rows, torch.tensor(before, device=self.device))

    def decode_steps(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling = ARGMAX) -> DecodedSteps:
        """Tokens [K, R] and logits [K, R, V]."""
        logits = self._blocks(seqs, steps)
        tokens, scores = [torch.tensor([seq.tokens[-1] for seq in seqs], device=self.device)], list[Tensor]()
        for j in range(steps):
            scores.append(self.runtime.head.after(logits[:, j], tokens[-1]))
            tokens.append(sampling.pick(scores[-1], j))
        return DecodedSteps(torch.stack(tokens[1:]), torch.stack(scores))

    def _blocks(self, seqs: Seq[Sequence], steps: int) -> Tensor:
        """Bring the context of these sequences up to date and run their blocks -> logits [R, steps, V]."""
        behind = [seq for seq in seqs if self.rows[seq.id].pending]
        if behind:
            self.runtime.extend(*self.pending(behind))
            self.ran(behind)
        n = self.runtime.config.block
        tokens = self.runtime.head.block_tokens(torch.tensor([seq.tokens[-1] for seq in seqs])).tolist()
        depths, sees = [range(1, n + 1)] * len(seqs), [self._sees] * len(seqs)
        return self.runtime.run_blocks(self.draft_rows(seqs, tokens, depths, range(len(seqs) * n), sees), steps)


def make(target: Target, *, head: str | Path | DFlashHead | None = None, **options: Any) -> DFlashDrafter:
    """See `registry`. head: folder or hub id of a DFlash or DSpark head, or a head in memory; None: the one that ships
    for this target. It has no options. PyTorch runs the head, beside targets of any backend.
    Raises ParameterError and the families of LoadError and PairError."""
    NoOptionsConfig(**options)
    host = needed(target.capabilities.head_host, target, HEAD_HOST, "drafter 'dflash'")
    if head is None:
        from slipstream.zoo import head_dir

        head = head_dir("dflash", host.runtime.source)
    # A copy: the original may still be in training.
    loaded = copy.deepcopy(head).eval().requires_grad_(False) if isinstance(head, DFlashHead) else load_dflash(head)
    return DFlashDrafter(TorchDFlash(fit(loaded, host)), host.vocab_size)
