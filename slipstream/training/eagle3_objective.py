"""Trains an EAGLE-3 head for any target, by training-time test (Li et al. 2503.01840, section 3.2).

When drafting, the head reads its own outputs from the second draft token on, so it is trained on its own outputs, too:
step 0 runs every position on the target's features, step j runs every position on the output of step j - 1. All chains
of a window are unrolled in parallel. Step j of the chain that starts at i is at position i + j and attends to

    rows 0..i of step 0 (the target's features)   and   its own rows of steps 1..j

which is exactly the content of the KV cache when the chain is drafted.

A parallel head (P-EAGLE, 2602.01469, section 3) is trained with the same attention. But the inputs of the rows after
step 0 are the mask token and `mask_hidden` instead of the outputs of the step before. We train all rows; the paper
trains a sample of the later steps' rows, to save memory.

The head predicts a reduced draft vocabulary, the most frequent ids of the data (2503.01840, section 4; `d2t` in the
checkpoints). This makes a step of the head cheap if the target's vocabulary is large.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slipstream.checkpoints.config import DecoderConfig
from slipstream.errors import ParameterError
from slipstream.heads.eagle_format import load_eagle, save_eagle
from slipstream.heads.eagle_head import EagleConfig, EagleHead, Rotary, default_taps, rotary_tables
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims
from slipstream.training.methods import EagleOptions, RunConfig
from slipstream.training.objective import Figures, Objective, Predictions, decay_weights, initialise
from slipstream.training.packing import TokenStream

Counts = NDArray[np.float64]
"""The frequency of each id, [V]."""
BLOCK = 128
"""Queries per attention block. A block only reads keys up to its own end, which skips nearly half of the scores."""


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, diagonal: Seq[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """Compute causal attention as plain matrix products, one block of queries at a time.

    q `[B, H, T, D]`, k and v `[B, KV, T, D]` -> `[B, H, T, D]`. The heads of one group share their keys as extra rows.

    diagonal: further keys and values `[B, KV, T, D]`; the query at a position sees only the key at that position."""
    batch, heads, length, dim = q.shape
    groups = k.shape[1]
    q = q.view(batch, groups, heads // groups, length, dim) * dim**-0.5
    rows = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        size = end - start
        part = q[:, :, :, start:end]  # [B, KV, G, size, D]
        scores = (part.reshape(batch, groups, -1, dim) @ k[:, :, :end].transpose(-1, -2)).view(
            batch, groups, -1, size, end
        )
        mask = torch.ones(size, end, dtype=torch.bool, device=q.device).tril(start)  # [size, end]
        scores = scores.masked_fill(~mask, float("-inf"))
        if diagonal:
            scores = torch.cat(
                [scores, *((part * x[:, :, None, start:end]).sum(-1, keepdim=True) for x, _ in diagonal)], -1
            )
        probs = scores.float().softmax(-1).to(v.dtype)
        seen = (probs[..., :end].reshape(batch, groups, -1, end) @ v[:, :, :end]).view(batch, groups, -1, size, dim)
        for j, (_, x) in enumerate(diagonal):
            seen = seen + probs[..., end + j, None] * x[:, :, None, start:end]
        rows.append(seen)
    return torch.cat(rows, 3).view(batch, heads, length, dim)


def compute_chain_states(
    head: EagleHead, tokens: Tensor, taps: Seq[Tensor], rotary: Rotary, steps: int
) -> list[Tensor]:
    """Return the inputs of `head.logits` for every chain of a window.

    tokens [B, T]; taps [B, T, target_hidden] each; rotary: tables of at least T positions.
    Returns `steps` tensors [B, N, d], N = T - steps: row i of step j predicts token i + 2 + j."""
    rows = tokens.shape[1] - steps
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> keys and values [B, Hk, N, D] of each step

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, N, heads, D], a row for each chain
        first, *later = seen[layer] = [*seen.get(layer, ()), (k.transpose(1, 2), v.transpose(1, 2))]
        return attend_in_blocks(q.transpose(1, 2), *first, later).transpose(1, 2)

    hidden = head.fuse([tap[:, :rows] for tap in taps])  # [B, N, d]
    out, mask = [], head.config.mask_token
    for j in range(steps):
        place = rotary[0][j : j + rows], rotary[1][j : j + rows]
        read = tokens[:, 1 + j : 1 + j + rows]
        if j > 0 and mask is not None:
            learned = head.mask_hidden.to(taps[0].dtype).split(head.config.target_hidden, -1)
            read, hidden = torch.full_like(read, mask), head.fuse(list(learned)).expand_as(hidden)
        hidden, x = head(read, hidden, place, attend)
        out.append(x)
    return out


def make_head(teacher: Teacher, options: EagleOptions, counts: Counts, seed: int) -> EagleHead:
    """Make a head with random weights, whose draft vocabulary is the most frequent ids."""
    c = teacher.config
    width = options.draft_vocab or draft_vocabulary(teacher.parameters, c.hidden_size)
    ids = find_most_frequent(counts, min(width, c.vocab_size), c.eos_ids)
    decoder = describe_layers(c, options.intermediate, layers=options.layers)
    config = EagleConfig(3, decoder, choose_taps(c.layers, options.taps), c.hidden_size, len(ids))
    if options.parallel:
        config = replace(config, mask_token=find_least_frequent(counts), depths=options.steps)
    head = EagleHead(config)
    initialise(head, torch.Generator().manual_seed(seed))
    head.select_vocabulary(torch.from_numpy(ids))
    return head


def load_start(options: EagleOptions, teacher: Teacher) -> EagleHead:
    """Load the head `options.start`. Raises ParameterError for a head of another kind or for a target of another shape,
    and for options that would change the head's shape."""
    assert options.start is not None
    shape = ("parallel", "layers", "draft_vocab", "taps", "intermediate")
    asked = [name for name in shape if getattr(options, name) != getattr(EagleOptions(), name)]
    if asked:
        raise ParameterError(
            f"--start does not work with {', '.join('--' + name.replace('_', '-') for name in asked)}",
            why="a head that is trained further keeps its shape and its draft vocabulary",
            fix="leave out these options, or --start",
        )
    head, c = load_eagle(options.start, teacher.config.layers), teacher.config
    of_head, of_target = (head.config.target_hidden, head.config.decoder.vocab_size), (c.hidden_size, c.vocab_size)
    if head.config.version != 3 or head.config.mask_token is not None or of_head != of_target:
        raise ParameterError(
            f"training for this target cannot start from the head {options.start!r}",
            why=f"it must be an EAGLE-3 head, not parallel, for {of_target[1]} ids and a width of {of_target[0]}",
            fix="give a head that was trained for this target, or leave --start out",
        )
    return head.train().requires_grad_(True)


class EagleObjective(Objective):
    """Trains an EAGLE-3 head. counts: frequency of each id in the data, [V]; the most frequent ids are the draft
    vocabulary."""

    module: EagleHead

    def __init__(self, teacher: Teacher, options: EagleOptions, counts: Counts, seed: int = 0):
        super().__init__(teacher, options, options.steps)
        self.module = (
            make_head(teacher, options, counts, seed) if options.start is None else load_start(options, teacher)
        )
        self.module.to(teacher.device, teacher.dtype).borrow(teacher.embedding)
        self.taps = tuple(dict.fromkeys((*self.module.config.taps, FINAL)))
        ids = self.module.target_ids
        if options.start is None:
            with torch.no_grad():
                self.module.lm_head.weight.copy_(teacher.head[ids])
                if teacher.config.norm == "rms":  # the weight of a LayerNorm has another meaning
                    self.module.norm.weight.copy_(teacher.norm)
        # int64 [V]: draft vocabulary id of each target id, -1 if none
        self.known = torch.full((teacher.config.vocab_size,), -1, device=teacher.device)
        self.known[ids] = torch.arange(len(ids), device=teacher.device)
        self.head = teacher.head[ids].clone()  # [V', d]
        self.weights = decay_weights(options.decay, options.steps)

    @classmethod
    def make(cls, teacher: Teacher, config: RunConfig, streams: list[TokenStream]) -> EagleObjective:
        counts = count_tokens(streams, config.shares, teacher.config.vocab_size)
        return cls(teacher, config.options, counts, config.seed)

    def _compute_states(self, tokens: Tensor, taps: dict[int, Tensor]) -> list[Tensor]:
        device = tokens.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        reads = [taps[t] if dtype is None else taps[t].to(dtype) for t in self.module.config.taps]
        rotary = rotary_tables(self.module.config.decoder, tokens.shape[1], tokens.device)
        if self.teacher.dtype == torch.float64:
            rotary = rotary[0].double(), rotary[1].double()
        return compute_chain_states(self.module, tokens, reads, rotary, self.options.steps)

    def draft_ids(self, ids: Tensor) -> Tensor:
        return self.known[ids]

    def predictions(self, window: Window) -> Predictions:
        states = torch.stack([x[:, :-1] for x in self._compute_states(window.tokens, window.taps)])  # [K, B, N, d]
        aims = Aims(window.taps[FINAL], self.head, window.counts, 1)
        return states, self.module.lm_head.weight[None], aims, self.weights

    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        padded = F.pad(window.tokens, (0, self.depth))  # a chain reads its draft tokens, here the tokens of the text
        # Row n - 1 predicts the token after token n.
        states = self._compute_states(padded, window.taps)
        return [self.module.logits(x) for x in states], self.teacher.logits(window.taps[FINAL])

    def export(self, folder: Path, target: str | None, figures: Figures) -> None:
        save_eagle(self.module, folder, target=target)


def choose_taps(layers: int, asked: Seq[int] | None, least: int = FINAL) -> tuple[int, ...]:
    """Return the taps of a head: `asked`, or if it is None, `choose_layers(layers)`. Raises ParameterError for a tap
    outside least..layers."""
    reads = tuple(asked) if asked else choose_layers(layers)
    strange = [t for t in reads if not least <= t <= layers]
    if strange:
        raise ParameterError(f"taps are {reads}, but the target has layers 0..{layers}", fix=f"leave out {strange}")
    return reads


def choose_layers(layers: int) -> tuple[int, ...]:
    """Return `default_taps`. For a target with few layers, return as many different layers as possible."""
    taps = default_taps(layers)
    if 0 < taps[0] < taps[1] < taps[2]:
        return taps
    return tuple(sorted({min(1, layers), (layers + 1) // 2, max(1, layers - 1)}))


def draft_vocabulary(parameters: int, hidden_size: int) -> int:
    """Return the default size of the draft vocabulary for a target of this size: a power of two from 8,192 to 32,768.
    Drafting a token reads one row of the output head for each of these ids, together at most 1/24 of the target's
    weights (unless this is less than 8,192 rows)."""
    rows = parameters // (24 * hidden_size)
    return max(8192, min(32768, 1 << max(0, rows.bit_length() - 1)))


def find_most_frequent(counts: Counts, width: int, always: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the `width` most frequent ids, in increasing order, including the ids `always`. Among equally frequent
    ids, smaller ids are preferred."""
    weight = counts.astype(np.float64)
    weight[list(always)] = np.inf
    return np.sort(np.argsort(-weight, kind="stable")[:width]).astype(np.int64)


def find_least_frequent(counts: Counts) -> int:
    """Return the least frequent id, for use as mask token. Among equally frequent ids it is the greatest, because
    unused ids are usually the last ids."""
    return len(counts) - 1 - int(np.argmin(counts[::-1]))


def count_tokens(streams: list[TokenStream], shares: Seq[float] | None, vocab_size: int) -> Counts:
    """Return the frequency of each id in the data, [V], with streams weighted as in the batches. The sum is 1."""
    total = np.zeros(vocab_size)
    for i, stream in enumerate(streams):
        weight = float(len(stream.tokens)) if shares is None else shares[i]
        counts = np.zeros(vocab_size)
        for start in range(0, len(stream.tokens), 2**22):
            counts += np.bincount(stream.tokens[start : start + 2**22], minlength=vocab_size)
        total += weight * counts / max(1, len(stream.tokens))
    return total / total.sum()


def describe_layers(
    target: DecoderConfig, intermediate: int | None, family: str = "llama", layers: int = 1
) -> DecoderConfig:
    """Describe a head's layers: layers of this family with the target's sizes, and with the target's rotary embedding
    if it has one."""
    rope = dict(target.rope_parameters) or {"rope_type": "default", "rope_theta": 10000.0}
    return DecoderConfig(
        model_type=family, vocab_size=target.vocab_size, hidden_size=target.hidden_size, layers=layers,
        heads=target.heads, qk_norm=family == "qwen3",
        kv_heads=target.kv_heads, head_dim=target.head_dim, intermediate_size=intermediate or target.intermediate_size,
        context=target.context, norm_eps=target.norm_eps, rope_parameters=rope, windows=(None,) * layers,
    )  # fmt: skip
