"""DFlash (Chen et al. 2602.06036): a head reads the target's hidden states, and drafts a whole block in one pass.

The tapped states of every accepted token become keys and values of each layer of the head (section 4.1). Its KV cache
has one entry per token, which is kept and rolled back as in an EAGLE head. A draft is one pass over a block: the last
token and a mask for each draft token. The distributions of its draft tokens depend only on the text, not on each
other's tokens; with a Markov head (DSpark, 2607.05147), each also depends on the draft token before it. In both cases a
draft is a chain whose tokens are drawn from q. A short draft is the beginning of a block, and takes nearly as long as a
whole one.
"""

import copy
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.backends.table import backend_for_head
from slipstream.checkpoints.checkpoint import CheckpointName
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, DrafterTraits
from slipstream.core.sequence import Sequence
from slipstream.core.target import HEAD_HOST, Target, require
from slipstream.drafters.chains import Chains, MaskedPass
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.none import NoOptionsConfig
from slipstream.heads.dflash_format import fit, load_dflash
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_rows import DFlashRuntime, HeadDrafter
from slipstream.zoo import head_dir


class DFlashDrafter(HeadDrafter):
    """Drafts blocks with a DFlash head. runtime: the head. vocab_size: width of the target's logits."""

    name = "dflash"

    def __init__(self, runtime: DFlashRuntime, vocab_size: int):
        super().__init__(runtime)
        self.runtime, self.width, c = runtime, runtime.width, runtime.config
        depth = min(c.depth, MAX_NODES)
        self.traits = DrafterTraits(c.taps, chains_only=True, reads_prompts=True, keeps_prefixes=True, longest=depth)
        self._pass = MaskedPass(self, self._blocks, runtime.after if c.markov_rank or c.draft_vocab else None)
        self._depth, self._chains = depth, Chains(self._pass, vocab_size)
        self._sees = None if c.causal else torch.ones(c.block, c.block, dtype=torch.bool)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        depths = (self.depth(seq, min(each.depth, self._depth)) for seq, each in zip(seqs, budgets, strict=True))
        most = list(map(Budget, depths))
        self._pass.plan(seqs, most)
        return self._chains.draft(seqs, most)

    def _blocks(self, seqs: Seq[Sequence], depth: Seq[int]) -> list[Tensor]:
        """Bring the context of these sequences up to date and return the logits of their blocks: see `MaskedPass`."""
        behind = [seq for seq in seqs if self.rows[seq.id].pending]
        if behind:
            self.runtime.extend(*self.collect_pending(behind))
            self.note_run(behind)
        c = self.runtime.config
        tokens = [[seq.tokens[-1], *[c.mask_token] * (c.block - 1)] for seq in seqs]
        first = [c.block * (r + 1) - c.depth for r in range(len(seqs))]
        select = [row + k for row, d in zip(first, depth, strict=True) for k in range(d)]
        depths, sees = [range(1, c.block + 1)] * len(seqs), [self._sees] * len(seqs)
        return list(self.runtime.run_blocks(self.draft_rows(seqs, tokens, depths, select, sees)).split(list(depth)))


def make(
    target: Target, *, head: CheckpointName | DFlashHead | None = None, quantize: str | None = None, **options: object
) -> DFlashDrafter:
    """Make the DFlash drafter, as `registry` requires. head: folder or hub id of a DFlash or DSpark head, or a head in
    memory; None: the head that ships for this target. quantize: as for the drafter `eagle`. There are no other options.
    Raises ParameterError and the families of LoadError and PairError."""
    NoOptionsConfig(**options)
    host = require(target.capabilities.head_host, target, HEAD_HOST, "drafter 'dflash'")
    if head is None:
        head = head_dir("dflash", host.runtime.checkpoint)
    # A copy: the original may still be in training.
    loaded = copy.deepcopy(head).eval().requires_grad_(False) if isinstance(head, DFlashHead) else load_dflash(head)
    fitted = fit(loaded, host)
    backend, settings = backend_for_head(fitted.config.decoder, host, quantize)
    return DFlashDrafter(backend.dflash(fitted, host, settings), host.vocab_size)
