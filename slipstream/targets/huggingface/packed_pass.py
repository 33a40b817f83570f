"""A packed pass through a transformers model: rows of several sequences in one forward, registered as an attention.

Attention is the only part of a transformer in which tokens meet. transformers lets anyone register an attention and the
function that makes its masks. Ours runs each sequence on its own blocks, with its own mask, so the rest of the model
sees one long row of M tokens with given positions.

Models run in one of three kinds of passes (`KINDS`):

    blocks    attention gets exactly the cached keys and values: it reads the blocks in place
    gathered  the model computes with cached values (latent attention): it gets the values of all sequences,
              concatenated, and attention uses each sequence's part
    dense     the model has its own attention but asks transformers for its masks: the model gets all slots, and one
              mask in which each sequence sees only its own slots

In the decoder of an encoder-decoder, cross-attention runs on each sequence's own source (`packed_cross`). A position
bias (T5) is computed by the model for the positions of the rows, over the slots of the longest sequence.

In transformers, a mask is a function of two indices (causal, sliding window, chunks). Called with *positions*, it holds
for any slot of the cache; the visibility of new rows in a tree is added here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream.backends.torch.rows_apart import FOLD_ROWS, Attend, rows_apart
from slipstream.errors import TargetError
from slipstream.targets.huggingface.module_blocks import ModuleBlocks, Pair
from slipstream.targets.huggingface.packed_cross import CrossAttention

NAME = "slipstream_packed"
"""Name under which attention and masks are registered."""

KINDS = ("blocks", "gathered", "dense")
"""Kinds of packed passes, the fastest first."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One sequence of a pass: its rows start:stop, and its slots 0..total-1 after the pass.

    positions  [n] positions of its new tokens. tree: bool [n, n], which new tokens each new token sees; None: a chain.
    in_place   whether its blocks are consecutive; first: place of slot 0 in the cache, or in the gathered blocks.
    offset     index of slot 0 if the slots of all sequences are concatenated.
    """

    start: int
    stop: int
    total: int
    positions: Tensor
    tree: Tensor | None
    in_place: bool
    first: int
    offset: int

    @property
    def at(self) -> Tensor:
        """[total]: the position of each slot."""
        return torch.cat((torch.arange(self.total - len(self.positions)), self.positions))


@dataclass
class PackedPass:
    """One packed pass. kind: one of KINDS. tokens: int64 [M]; places: int64 [M], where each token's keys and values go;
    scattered: blocks of sequences whose blocks are not consecutive, concatenated. device: of the embeddings. apart:
    whether each row attends on its own (see `rows_apart`); the model's own attention then gets only finite keys and
    values. cross: cross-attention of the decoder of an encoder-decoder.

    cached, attended  number of layers that have written keys and values, and that have used `packed_attention`.
    kept_back  bool [M]: rows whose keys and values the model's own attention did not get.
    """

    kind: str
    rows: list[PackedRow]
    blocks: ModuleBlocks
    tokens: Tensor
    places: Tensor
    scattered: Tensor | None
    device: torch.device
    apart: bool = False
    cross: CrossAttention | None = None
    cached: int = 0
    attended: int = 0
    kept_back: Tensor | None = None
    _written: Pair | None = None
    _current: Pair | None = None
    _copied: Pair | None = None

    @property
    def slots(self) -> int:
        """Number of slots of all sequences."""
        return self.rows[-1].offset + self.rows[-1].total

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the tokens, int64 [M], on `device`."""
        return torch.cat([row.positions for row in self.rows]).to(self.device)

    @property
    def before(self) -> Tensor | int:
        """The length of the cache that the model is given. For a decoder with cross-attention, [M, 1]: added to a row's
        index in the pass, it gives the row's position. Otherwise 0, because positions are given."""
        if self.cross is None:
            return 0
        return (self.positions - torch.arange(len(self.places), device=self.device))[:, None]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        """Write keys [1, Hk, M, D] and values [1, Hv, M, Dv] of one layer, for all rows. Returns what the model
        computes with: the same tensors, or all slots [1, Hk, S, D]."""
        self.cached += 1
        self._current = self.blocks.write(layer, self.places, keys[0], values[0])
        self._copied = None if self.scattered is None else self.blocks.gather(layer, self.scattered)
        if self.cross is not None:  # the longest length, for a bias; attention reads the blocks
            keys = keys[:, :, :1].expand(-1, -1, max(row.total for row in self.rows), -1)
        self._written = keys, values
        if self.kind == "blocks":
            return keys, values
        each = [self._of_row(row, 0) for row in self.rows]
        if self.apart and self.kind == "dense":
            finite = [x.isfinite().all(-1).all(1)[0].cpu() for x in (keys, values)]  # [M] each
            bad = ~(finite[0] & finite[1])
            for row, pair in zip(self.rows, each, strict=True):  # every row sees the earlier slots
                past = row.total - (row.stop - row.start)
                bad[row.start : row.stop] |= not all(bool(x[:, :past].isfinite().all()) for x in pair)
            self.kept_back = bad if self.kept_back is None else self.kept_back | bad
            each = [(k.where(k.isfinite(), 0), v.where(v.isfinite(), 0)) for k, v in each]
        if len(each) == 1:
            return each[0][0][None], each[0][1][None]
        return torch.cat([k for k, _ in each], 1)[None], torch.cat([v for _, v in each], 1)[None]

    def attend(self, key: Tensor, value: Tensor) -> None:
        """Check that attention gets exactly the keys and values that this layer has just written."""
        self.attended += 1
        if self.kind == "blocks" and (self._written is None or self._written[0] is not key):
            raise TargetError("the model changes keys after they were cached")
        if self.kind == "blocks" and (self._written is None or self._written[1] is not value):
            raise TargetError("the model changes values after they were cached")
        if self.kind == "gathered" and not key.shape[2] == value.shape[2] == self.slots:
            raise TargetError(f"attention got {key.shape[2]} keys, but the pass has {self.slots} KV slots")
        if self.kind == "dense":
            raise TargetError("the model calls the registered attention function, which this kind of pass does not use")
        self._written = None

    def check_used(self, layers: int) -> None:
        """Raise TargetError unless this many layers have used the attention and the cache that they were given."""
        used = self.cached if self.kind == "dense" else self.attended
        if used != layers:
            raise TargetError(f"only {used} of {layers} layers used Slipstream's attention and cache")
        if self.cross is not None and self.cross.attended != layers:
            raise TargetError(f"only {self.cross.attended} of {layers} layers used Slipstream's cross-attention")

    def share(self, row: PackedRow, hidden: int, key: Tensor, value: Tensor) -> Pair:
        """Return keys [Hk, S, D] and values of a sequence from slot `hidden` on. key, value: attention's inputs."""
        if self.kind == "blocks":
            return self._of_row(row, hidden)
        first, last = row.offset + hidden, row.offset + row.total
        return key[0, :, first:last], value[0, :, first:last]

    def _of_row(self, row: PackedRow, hidden: int) -> Pair:
        cached = self._current if row.in_place else self._copied
        assert cached is not None
        first, last = row.first + hidden, row.first + row.total
        return cached[0][:, first:last], cached[1][:, first:last]

    def find_lost(self) -> set[int]:
        """Return the rows that see a row of `kept_back`: their outputs are meaningless."""
        if self.kept_back is None:
            return set()
        lost = set[int]()
        for row in self.rows:
            bad = self.kept_back[row.start : row.stop]
            sees = torch.ones(len(bad), len(bad), dtype=torch.bool).tril() if row.tree is None else row.tree.cpu()
            lost |= {row.start + i for i in (sees & bad).any(1).nonzero().flatten().tolist()}
        return lost

    def bias(self, row: PackedRow, bias: Tensor) -> Tensor:
        """Return a sequence's share [H, n, S] of a position bias [1, H, M, K], whose columns are positions."""
        if bias.shape[2] != len(self.places) or bias.shape[3] < row.total:
            raise TargetError(f"a position bias is {list(bias.shape)}, but the pass has {len(self.places)} rows")
        row_bias = bias[0, :, row.start : row.stop, : row.total]
        return row_bias if row.tree is None else row_bias.index_select(-1, row.at.to(row_bias.device))


_here = threading.local()


@contextmanager
def running(one: PackedPass) -> Iterator[PackedPass]:
    """Make `one` the pass of this thread within this block."""
    _here.current = one
    try:
        yield one
    finally:
        _here.current = None


def current_pass() -> PackedPass:
    current: PackedPass | None = getattr(_here, "current", None)
    if current is None:
        raise TargetError(
            f"the model was called directly, but still uses Slipstream's attention {NAME!r}",
            fix="call model.set_attn_implementation('sdpa') first",
        )
    return current


@dataclass
class PackedMask:
    """Says which slots the new tokens of each sequence see: (bool [n, S] or None for all, first slot that any sees)."""

    rows: list[tuple[Tensor | None, int]]
    _masks: dict[tuple[int, int, torch.dtype, torch.device], Tensor | None] = field(default_factory=dict)
    _bias: Tensor | None = None

    def additive(self, b: int, fold: int, like: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Return the mask [fold * n, S]: 0 for slots that are seen, minus infinity elsewhere. bias: a position bias
        (see `PackedPass.bias`) to add: [1, H / fold, fold * n, S]."""
        if bias is not self._bias:  # most models share one bias among all layers
            self._masks, self._bias = {}, bias
        key = (b, fold, like.dtype, like.device)
        if key not in self._masks:
            (seen, first), mask = self.rows[b], None
            if seen is not None:
                mask = torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, -torch.inf).repeat(fold, 1)
                mask = mask.to(like.device)
            if bias is not None:
                run = current_pass()
                row_bias = run.bias(run.rows[b], bias)[..., first:].to(like)  # [H, n, S]
                row_bias = row_bias.reshape(1, len(row_bias) // fold, -1, row_bias.shape[-1])
                mask = row_bias if mask is None else row_bias + mask
            self._masks[key] = mask
        return self._masks[key]


def packed_mask(
    *, mask_function: Callable[..., Tensor] | None = None, dtype: torch.dtype = torch.float32, **_: object
) -> PackedMask | Tensor:
    """Make masks as `AttentionMaskInterface`. For models with their own attention a tensor [1, 1, M, S]."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    sees: Any = mask_function or causal_mask_function
    if current_pass().cross is not None and sees is bidirectional_mask_function:
        return PackedMask([])  # cross-attention: each sequence sees its whole source
    run, zero = current_pass(), torch.zeros((), dtype=torch.int64)
    rows: list[tuple[Tensor | None, int]] = []
    dense = torch.zeros(len(run.places), run.slots, dtype=torch.bool) if run.kind == "dense" else None
    for row in run.rows:
        n = row.stop - row.start
        if n == 1 and sees is causal_mask_function and dense is None:
            rows.append((None, 0))
            continue
        seen = sees(zero, zero, row.positions[:, None], row.at[None, :]).expand(n, row.total)
        if row.tree is not None:
            seen = seen.clone()
            seen[:, row.total - n :] &= row.tree
        if dense is not None:
            dense[row.start : row.stop, row.offset : row.offset + row.total] = seen
            continue
        first = int(seen.any(0).int().argmax())
        seen = seen[:, first:]
        rows.append((None if bool(seen.all()) else seen, first))
    if dense is None:
        return PackedMask(rows)
    additive = torch.zeros(dense.shape, dtype=dtype).masked_fill_(~dense, torch.finfo(dtype).min)
    return additive[None, None].to(run.device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as `AttentionInterface`. query [1, H, M, D] -> [1, M, H, Dv].

    softcap  scores become softcap * tanh(score / softcap). s_aux: [H], a score for seeing nothing.
    position_bias  [1, H, M, K], see `PackedPass.bias`; ignored in cross-attention.
    """
    run = current_pass()
    crossed = None if run.cross is None else run.cross.share(key)
    biased = position_bias is not None and run.cross is None
    if crossed is None:
        run.attend(key, value)
    if dropout or (crossed is None and (not isinstance(attention_mask, PackedMask) or biased or is_causal is False)):
        raise TargetError("the model's attention uses a mask or bias of its own")
    heads, width = query.shape[1], (value if crossed is None else crossed[0][1]).shape[-1]
    out = query.new_empty(query.shape[2], heads, width)  # [M, H, Dv]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    for b, row in enumerate(run.rows):
        n = row.stop - row.start
        if crossed is None:
            keys, values = run.share(row, attention_mask.rows[b][1], key, value)
        else:
            keys, values = crossed[b]
        kv_heads = len(keys)
        fold = heads // kv_heads if n <= FOLD_ROWS or softcap is not None or s_aux is not None else 1
        q = query[0, :, row.start : row.stop].reshape(heads // fold, fold * n, query.shape[-1])  # [Hk, G n, D]
        mask = None if crossed is not None else attention_mask.additive(b, fold, query, position_bias)
        attend: Attend
        if softcap is None and s_aux is None:
            attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=heads // fold != kv_heads)
        else:
            attend = partial(_eager, scale=scale, softcap=softcap, sinks=s_aux)
        given = q[None], keys[None], values[None], mask
        seen = rows_apart(attend, *given, n) if run.apart else attend(*given)
        out[row.start : row.stop] = seen.reshape(heads, n, width).transpose(0, 1)
    return out[None], None


def _eager(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of q [1, Hk, G n, D] with capped scores (Gemma 2) or a score for seeing nothing (gpt-oss)."""
    scores = q @ keys.transpose(2, 3) * scale  # [1, Hk, G n, S]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.reshape(keys.shape[1], -1, 1)  # [Hk, G, 1]
        column = column.expand(-1, -1, q.shape[2] // column.shape[1]).reshape(1, *scores.shape[1:3], 1)
        scores = torch.cat((scores, column.to(scores.dtype)), -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probs = scores.softmax(-1, dtype=wide).to(values.dtype)[..., : keys.shape[2]]
    return probs @ values


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
