"""Distils a draft model: trains a small Llama on the target's distributions (DistillSpec, Zhou et al. 2310.08461).

It starts from scratch in a given shape, or from a checkpoint with the target's vocabulary. A draft model only has to
predict what the target says, so it learns the target's full distribution at every position. Text that the target
generated works best (`--regenerate`).
"""

from torch import Tensor

from slipstream.errors import PairError
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims
from slipstream.training.methods import DraftOptions
from slipstream.training.objective import Predictions
from slipstream.training.trainable import ModelObjective, load_trainable, new_llama
from slipstream.zoo import checkpoint_of


class DraftObjective(ModelObjective):
    def __init__(self, teacher: Teacher, options: DraftOptions, seed: int = 0):
        super().__init__(teacher, options, options.depth)
        c = teacher.config
        if options.start is None:
            ends = sorted(teacher.decoder.capabilities.eos_ids)
            self.module = new_llama(
                seed, vocab_size=c.vocab_size, hidden_size=options.hidden_size,
                num_hidden_layers=options.layers, num_attention_heads=options.heads,
                num_key_value_heads=options.kv_heads, intermediate_size=options.intermediate,
                max_position_embeddings=c.context, rms_norm_eps=1e-5, eos_token_id=ends or 0,
                pad_token_id=ends[0] if ends else 0,
                head_dim=64 if options.hidden_size >= 64 * options.heads else options.hidden_size // options.heads,
            )  # fmt: skip
        else:
            self.module = load_trainable(checkpoint_of(options.start, "draft"))
            if len(self.module.table) != c.vocab_size:
                raise PairError(
                    f"the draft {options.start!r} has {len(self.module.table)} ids, the target {c.vocab_size}",
                    why="it is trained on the target's probability of each id",
                    fix="start from a draft of the target's vocabulary, or from scratch",
                )
        self.module.to(teacher.device, teacher.dtype)

    def predictions(self, window: Window) -> Predictions:
        [states] = self.module.states(window.tokens[:, :-1])  # [B, N, d]
        aims = Aims(window.taps[FINAL], self.teacher.head, window.counts, 0)
        return states[None], self.module.table[None], aims, [1.0]

    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        [states] = self.module.states(window.tokens)  # [R, L, d]
        return self.shifted(self.logits(states)), self.teacher.logits(window.taps[FINAL])
