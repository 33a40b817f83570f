"""Trains a DFlash head for any target (Chen et al. 2602.06036, section 4.2). Blocks that begin at random tokens of the
text ("anchors", drawn again in each step) are predicted as in drafting.

The rows of a block see the block itself, and the target's states of the tokens before its anchor; blocks do not see
each other. The loss of draft token k has the weight decay^k, because draft tokens after the first error are useless.
The paper's exp(-k / 4), for blocks of 8, is a decay of 0.78. A Markov head (DSpark, 2607.05147) reads the token before
each draft token, which is taken from the text in training.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import ParameterError
from slipstream.heads.dflash_format import save_dflash
from slipstream.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.heads.eagle_head import Rotary, rotary_tables
from slipstream.training.eagle3_objective import choose_taps, describe_layers
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims
from slipstream.training.methods import DFlashOptions
from slipstream.training.objective import Figures, Objective, Predictions, initialise

ANCHORS_AT_ONCE = 32
"""Number of blocks of a window that run together when every token is an anchor, as in evaluation."""


def compute_block_states(head: DFlashHead, tokens: Tensor, taps: Tensor, anchors: Tensor, rotary: Rotary) -> Tensor:
    """Return the inputs of `head.logits`, [B, A, K, d], for blocks that begin at the anchors.

    tokens [B, T]; taps [B, T, taps * target_hidden]; anchors int64 [B, A]; rotary: tables of T + n positions."""
    length, (batch, count), n, device = tokens.shape[1], anchors.shape, head.config.block, tokens.device
    context = head.context(taps, (rotary[0][:length], rotary[1][:length]))
    before = torch.arange(length, device=device) < anchors[..., None]  # [B, A, T]
    same = (
        torch.eye(count, dtype=torch.bool, device=device).repeat_interleave(n, 1).expand(batch, -1, -1)
    )  # [B, A, A n]
    sees = torch.cat((before, same), -1).repeat_interleave(n, 1)[:, None]  # [B, 1, A n, T + A n]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, A, n, heads, D]
        keys, values = (torch.cat((old, new.flatten(1, 2)), 1) for old, new in zip(context[layer], (k, v), strict=True))
        q, keys, values = (x.transpose(1, 2) for x in (q.flatten(1, 2), keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=sees, enable_gqa=True)  # [B, H, A n, D]
        return out.transpose(1, 2).unflatten(1, (count, n))

    places = anchors[..., None] + torch.arange(n, device=device)  # [B, A, n]
    x = head(head.block_tokens(tokens.gather(1, anchors)), (rotary[0][places], rotary[1][places]), attend)
    return x[:, :, n - head.config.depth :]  # type: ignore[no-any-return]


class DFlashObjective(Objective):
    module: DFlashHead

    def __init__(self, teacher: Teacher, options: DFlashOptions, seed: int = 0):
        super().__init__(teacher, options, options.block - 1)
        c = teacher.config
        self.seed = seed
        mask = c.vocab_size - 1 if options.mask_token is None else options.mask_token
        if mask >= c.vocab_size:
            raise ParameterError(
                f"mask_token is {mask}, but the target's vocabulary is 0..{c.vocab_size - 1}",
                fix="give a rare token",
            )
        reads = choose_taps(c.layers, options.taps, 1)
        self.taps = tuple(dict.fromkeys((*reads, FINAL)))
        layers, rank = describe_layers(c, options.intermediate, "qwen3", options.layers), options.markov_rank
        self.module = DFlashHead(
            DFlashConfig(layers, reads, c.hidden_size, options.block, mask, c.layers, markov_rank=rank)
        )
        initialise(self.module, torch.Generator().manual_seed(seed))
        self.module.to(teacher.device, teacher.dtype).borrow(teacher.embedding, teacher.head)
        with torch.no_grad():
            if c.norm == "rms":  # the weight of a LayerNorm has another meaning
                self.module.norm.weight.copy_(teacher.norm)
            if rank:
                self.module.markov_head["markov_w2"].weight.zero_()  # type: ignore[operator]
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self.draws = torch.Generator().manual_seed(self.seed + 1_000_003 * step)

    def _compute_blocks(self, window: Window, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Run the blocks that begin at `anchors` [B, A]. Returns their outputs [B, A, K, d], and the position of the
        token before each draft token [B, A, K]; positions after the text are replaced by its last position."""
        reads = torch.cat([window.taps[t] for t in self.module.config.taps], -1)
        device, length = reads.device.type, window.tokens.shape[1]
        if torch.is_autocast_enabled(device):
            reads = reads.to(torch.get_autocast_dtype(device))
        tables = rotary_tables(self.module.config.decoder, length + self.options.block, reads.device)
        cos, sin = (table.to(self.teacher.dtype) for table in tables)
        before = (anchors[..., None] + torch.arange(self.depth, device=anchors.device)).clamp(max=length - 1)
        return compute_block_states(self.module, window.tokens, reads, anchors, (cos, sin)), before

    def predictions(self, window: Window) -> Predictions:
        """See `Objective.predictions`. `Aims` has one row of windows for each draft token: draft token k of every block
        is in window k."""
        tokens, counts, device, length = window.tokens, window.counts, window.tokens.device, window.tokens.shape[1]
        draws = self.draws if self.training else torch.Generator().manual_seed(self.seed)
        chance = counts[:, 2:].float().cpu() + 1e-9  # prefer positions whose draft token counts
        anchors = 1 + torch.multinomial(chance, self.options.anchors, replacement=True, generator=draws).to(device)
        states, before = self._compute_blocks(window, anchors)
        row, k = torch.arange(len(tokens), device=device)[:, None, None], torch.arange(self.depth, device=device)
        counted = counts[row, (before + 1).clamp(max=length - 1)] & (anchors[..., None] + k + 1 < length)

        def by_depth(x: Tensor) -> Tensor:
            return x.flatten(0, 1).transpose(0, 1)  # [B, A, K, ...] -> [K, B A, ...]

        table = self.teacher.head
        if self.options.markov_rank:  # a Markov head adds a second product: concatenate states and tables
            markov = self.module.markov_head
            states = torch.cat((states, markov["markov_w1"](tokens[row, before]).to(states.dtype)), -1)
            table = torch.cat((table, markov["markov_w2"].weight), -1)  # type: ignore[arg-type]
        aims = Aims(
            final=by_depth(window.taps[FINAL][row, before]),
            head=self.teacher.head,
            counts=F.pad(by_depth(counted * self.options.decay**k), (1, 0)),
            ahead=0,
        )
        return by_depth(states)[None], table[None], aims, [1.0]

    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        tokens, parts = window.tokens, list[Tensor]()  # [R, a, K, V] each, for drafts after tokens 1, 2, ...
        for some in torch.arange(1, tokens.shape[1], device=tokens.device).split(ANCHORS_AT_ONCE):
            states, before = self._compute_blocks(window, some.expand(len(tokens), -1))
            read = tokens.gather(1, before.flatten(1)).view_as(before)
            parts.append(self.module.after(self.module.logits(states), read))
        return list(torch.cat(parts, 1).unbind(2)), self.teacher.logits(window.taps[FINAL])

    def export(self, folder: Path, target: str | None, figures: Figures) -> None:
        save_dflash(self.module, folder, target=target)
