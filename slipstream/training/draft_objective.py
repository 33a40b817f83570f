"""Distils a draft model: trains a small Llama on the target's distributions (DistillSpec, Zhou et al. 2310.08461).

Training starts from scratch in a given shape, or from a checkpoint with the target's vocabulary. A draft model only has
to predict the target's text, so it learns the target's full distribution at every position. Text that the target
generated works best (`--regenerate`).

A parallel draft model (PARD, An et al. 2504.18583) also learns to predict at K - 1 mask tokens that follow each prefix
of the window. One pass runs the window and the masks of all its tokens, which are K times as many rows. The paper
leaves out some of the later masks (COD) to save time; we do not.
"""

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.errors import PairError
from slipstream.training.eagle3_objective import count_tokens, find_least_frequent
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims
from slipstream.training.methods import DraftOptions, RunConfig
from slipstream.training.objective import Objective, Predictions, decay_weights
from slipstream.training.packing import TokenStream
from slipstream.training.trainable import ModelObjective, TrainableModel, load_trainable, make_llama

DECAY = 0.8
"""The loss of draft token k of a parallel draft model has the weight DECAY^k."""


def compute_masked_states(model: TrainableModel, tokens: Tensor, depth: int, mask: int) -> Tensor:
    """Return the inputs of the output head for draft tokens 1..depth after each token: tokens [B, T] -> [depth, B, T,
    d]. For draft token k + 1, row i is the last of k masks after token i; it sees the tokens up to i, and the masks."""
    batch, length = tokens.shape
    start = torch.arange(length, device=tokens.device).repeat(depth)  # [depth T] of each row
    masks = torch.arange(depth, device=tokens.device).repeat_interleave(length)
    sees = torch.where(masks == 0, start <= start[:, None], start == start[:, None]) & (masks <= masks[:, None])
    read = torch.cat((tokens, tokens.new_full((batch, (depth - 1) * length), mask)), 1)
    states = model.parts[0](
        input_ids=read, attention_mask=sees.expand(batch, 1, -1, -1), position_ids=(start + masks).expand(batch, -1),
        use_cache=False,
    ).last_hidden_state  # fmt: skip
    return states.unflatten(1, (depth, length)).transpose(0, 1)  # type: ignore[no-any-return]


class DraftObjective(ModelObjective):
    """Trains a draft model. mask: mask token of a parallel draft model; None: the model drafts one token per pass."""

    def __init__(self, teacher: Teacher, options: DraftOptions, seed: int = 0):
        super().__init__(teacher, options, options.depth)
        c = teacher.config
        if options.start is None:
            ends = sorted(teacher.decoder.capabilities.eos_ids)
            self.module = make_llama(
                seed, vocab_size=c.vocab_size, hidden_size=options.hidden_size,
                num_hidden_layers=options.layers, num_attention_heads=options.heads,
                num_key_value_heads=options.kv_heads, intermediate_size=options.intermediate,
                max_position_embeddings=c.context, rms_norm_eps=1e-5, eos_token_id=ends or 0,
                pad_token_id=ends[0] if ends else 0,
                head_dim=64 if options.hidden_size >= 64 * options.heads else options.hidden_size // options.heads,
            )  # fmt: skip
        else:
            self.module = load_trainable(Checkpoint.open(options.start, "draft"))
            if len(self.module.table) != c.vocab_size:
                raise PairError(
                    f"the draft model {options.start!r} has {len(self.module.table)} ids, the target {c.vocab_size}",
                    why="the draft model is trained on the target's probability of each id",
                    fix="give --start a draft model with the target's vocabulary, or leave --start out",
                )
        self.module.to(teacher.device, teacher.dtype)
        self.mask: int | None = getattr(self.module.lm.config, "pard_token", None)

    @classmethod
    def make(cls, teacher: Teacher, config: RunConfig, streams: list[TokenStream]) -> Objective:
        objective = cls(teacher, config.options, config.seed)
        if config.options.parallel and objective.mask is None:
            objective.mask = find_least_frequent(count_tokens(streams, config.shares, teacher.config.vocab_size))
            objective.module.lm.config.pard_token = objective.mask
        return objective

    def _compute_states(self, tokens: Tensor) -> Tensor:
        """Return the inputs of the output head: [K, B, T, d] for a parallel draft model, else [1, B, T, d]."""
        if self.mask is None:
            return self.module.states(tokens)[0][None]
        return compute_masked_states(self.module, tokens, self.depth, self.mask)

    def predictions(self, window: Window) -> Predictions:
        count = 1 if self.mask is None else self.depth
        states = self._compute_states(window.tokens[:, :-count])
        aims = Aims(window.taps[FINAL], self.teacher.head, window.counts, 0)
        return states, self.module.table[None], aims, decay_weights(DECAY, count)

    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        states, p = self._compute_states(window.tokens), self.teacher.logits(window.taps[FINAL])
        if self.mask is None:
            return self.shift(self.logits(states[0])), p
        return [self.logits(x[:, 1:]) for x in states], p  # row n predicts the token after token n
