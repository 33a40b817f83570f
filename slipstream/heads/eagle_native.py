"""An EAGLE head on a CPU by our own kernels; cache, packed rows and weights as a decoder's. Drafts are one call, whose
guesses are drawn in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draws import GREEDY, Drawn, Draws
from slipstream.heads.eagle import EagleHead
from slipstream.heads.eagle_runtime import target_ids
from slipstream.kernels import eagle, linear
from slipstream.kernels.compiled import readied
from slipstream.kernels.layer import Model
from slipstream.targets.decoder.executor import Batch, check_unrolled
from slipstream.targets.decoder.native_paged import NativePaged, Threads, check_sound, picks_of
from slipstream.targets.decoder.native_weights import INPUTS, matrix, narrowest, nbytes


class NativeEagle(NativePaged):
    """head: with the target's weights borrowed; any float dtype, computed in float32. Not needed afterwards. Only where
    `eagle_runtime.native_suits`.
    embedding: [V, d] in panels where the target has it so already, None for a copy of the head's.
    threads, quantize: as in `NativeExecutor`. See `EagleRuntime`."""

    name = "native"

    def __init__(
        self,
        head: EagleHead,
        threads: int | None = None,
        quantize: str | None = None,
        embedding: np.ndarray | None = None,
    ):
        c = head.config.decoder
        super().__init__(c.layers, c.kv_heads, c.head_dim)
        self.config, self.device = head.config, torch.device("cpu")
        self.ids = target_ids(head).cpu()
        self._head = _head(head, self.ids, quantize, embedding)
        self._threads = Threads(threads, self.weight_bytes)
        self._padded = self._head.own.head.values.shape[1]
        with readied():
            token = Batch((0,), torch.zeros(1, dtype=torch.int64), (0,), (0, 1), (0,), (None,), (0,), (2,))
            self._run(token, torch.zeros(1, len(self.config.taps) * self.config.target_hidden), False, 1, GREEDY)
        self._forget()

    @property
    def weight_bytes(self) -> int:
        """Of what a step reads."""
        return nbytes(self._head.own) + self._head.fc.values.nbytes

    def extend(self, batch: Batch, features: Tensor, own: bool = False) -> tuple[Tensor, Tensor]:
        _, after, logits, _ = self._run(batch, features, own, 0, GREEDY)
        return after, logits[0]

    def chains(self, batch: Batch, features: Tensor, steps: int, draws: Draws = GREEDY) -> Drawn:
        check_unrolled(steps)
        drawn, _, logits, laws = self._run(batch, features, False, steps, draws)
        return Drawn(drawn, logits, laws)

    def _run(
        self, batch: Batch, features: Tensor, own: bool, steps: int, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `kernels.eagle.draft`: (draft ids [K, B], next features [A, d], logits [K or 1, A, V], laws)."""
        rows, vocab = self._rows(batch, max(steps - 1, 0)), self.config.draft_vocab
        wanted = np.asarray(batch.select, np.int64)
        count, sampled = len(wanted), draws.kind != "maximum"
        drawn = np.empty((steps, count if steps else 0), np.int64)
        after = np.empty((count, self.config.hidden_size), np.float32)
        logits = np.empty((max(steps, 1), count, self._padded), np.float32)
        laws = np.empty((steps, count if steps else 0, vocab if sampled else 0))
        threads, picks = self._threads.of(batch.splits[-1]), picks_of(draws, steps, count, vocab)
        given = features.float().contiguous().numpy()  # kernels are compiled for no other layout
        with Threads.turn(threads):
            sound = eagle.draft(
                *(self._head, self._caches(batch), rows, batch.tokens.numpy(), given, own, wanted),
                *(picks, drawn, after, logits, laws, threads),
            )
        if steps:
            check_sound(sound)
        made, raw = torch.from_numpy(drawn), torch.from_numpy(logits)[..., :vocab]
        return made, torch.from_numpy(after), raw, torch.from_numpy(laws) if sampled else None


def _head(head: EagleHead, ids: Tensor, quantize: str | None, embedding: np.ndarray | None) -> eagle.Head:
    c, d, weights = head.config, head.config.decoder, head.state_dict()
    table = weights["embed_tokens.weight"] if c.own_embedding else head.borrowed["embedding"]
    output = head.borrowed["lm_head"] if c.version == 1 else weights["lm_head.weight"]
    layers = ["midlayer."] if c.version == 3 else [f"layers.{i}." for i in range(d.layers)]
    joined = {
        group: [torch.cat([weights[f"{layer}{name}.weight"] for name in names]) for layer in layers]
        for group, names in INPUTS.items()
    }
    every = [weights["fc.weight"], output, *(each for group in joined.values() for each in group)]
    bits = None if quantize else narrowest(every)

    def layered(group: str) -> linear.Matrix:
        names = [[f"{layer}{name}.bias" for name in INPUTS[group]] for layer in layers]
        biases = [torch.cat([weights[n] for n in own]) for own in names] if names[0][0] in weights else []
        return matrix(joined[group], len(layers), bits, biases)

    def vector(name: str) -> Tensor:
        return weights[name].float()

    ones = torch.ones(c.hidden_size)  # where EAGLE-1 has no norm
    norms = []
    for layer in layers:
        first = f"{layer}input_layernorm.weight"
        norms += [vector(first) if first in weights else ones, vector(f"{layer}post_attention_layernorm.weight")]
    norms.append(vector("norm.weight") if c.version == 3 else ones)
    tap_norms = [vector(f"fc_norm.{i}.weight").numpy() for i in range(len(c.taps) if c.fc_norm else 0)]
    inv_freq, turn_scale = d.rope()
    own = Model(
        embed=linear.panels(narrowest([table])(table)) if embedding is None else embedding,
        norms=torch.stack(norms).numpy(),
        inv_freq=inv_freq.numpy().astype(np.float64),
        turn_scale=float(turn_scale),
        eps=np.float32(d.norm_eps),
        heads=d.heads,
        windows=np.zeros(len(layers), np.int64),
        head_norms=linear.NONE,
        **{group: layered(group) for group in INPUTS},
        head=matrix([output], 1, bits),
    )
    return eagle.Head(
        own=own,
        fc=matrix([weights["fc.weight"]], 1, bits, [weights["fc.bias"]] if c.fc_bias else []),
        tap_norms=np.stack(tap_norms) if tap_norms else linear.NONE,
        joint_norm=vector("input_norm.weight").numpy()[None] if c.norm_before_fc else linear.NONE,
        feature_norm=vector("midlayer.hidden_norm.weight").numpy()[None] if c.version == 3 else linear.NONE,
        ids=ids.numpy(),
        normed_start=c.norm_before_residual,
        normed_end=c.norm_output,
    )
