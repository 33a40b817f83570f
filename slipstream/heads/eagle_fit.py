"""Checks that an EAGLE head fits its target, and hands it the weights that the target shares with it."""

from __future__ import annotations

from dataclasses import replace

from slipstream.core.target import HeadHost
from slipstream.errors import PairError
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.host_check import check_host


def fit(head: EagleHead, host: HeadHost) -> EagleHead:
    """Check that `head` was made for the target, hand it the target's weights and drop draft ids that the target does
    not have. Returns a head in the target's dtype and on its device. Raises PairError with both values."""
    c = head.config
    kind = "EAGLE" if c.version == 1 else "EAGLE-3"
    check_host(host, kind, c.target_hidden, c.decoder.vocab_size)
    strange = [t for t in c.taps if t != -1 and not 0 <= t <= host.layers]
    if strange:
        raise PairError(
            f"the {kind} head taps layers {list(c.taps)}, the target has layers 0..{host.layers}",
            why=f"taps {strange} do not exist",
            fix="take a head that was trained for this target, or correct eagle_aux_hidden_state_layer_ids",
        )
    if not c.own_embedding and c.hidden_size != host.hidden_size:
        raise PairError(
            f"the {kind} head has width {c.hidden_size} and no embedding of its own, the target's has width "
            f"{host.hidden_size}",
            fix="take a head that was trained for this target",
        )
    if c.mask_token is not None and not c.own_embedding and c.mask_token >= host.vocab_size:
        raise PairError(
            f"the mask token of the {kind} head is {c.mask_token}, the target has the ids 0..{host.vocab_size - 1}",
            why="its mask rows embed that token",
            fix="take a head that was trained for this target",
        )
    embedding = None if c.own_embedding else host.embedding()
    head = head.to(host.device, host.dtype)
    if c.version == 1:
        tied = embedding is not None and host.tied
        return head.borrow(embedding, embedding if tied else host.lm_head())
    return _within(head, host.vocab_size).borrow(embedding)


def _within(head: EagleHead, vocab_size: int) -> EagleHead:
    """The head without draft ids that the target does not have (padding)."""
    keep = (head.target_ids >= 0) & (head.target_ids < vocab_size)  # [draft_vocab]
    if bool(keep.all()):
        return head
    ids, rows = head.target_ids[keep], head.lm_head.weight[keep]
    smaller = EagleHead(replace(head.config, draft_vocab=len(ids))).to(rows.device, rows.dtype)
    state = {n: t for n, t in head.state_dict().items() if n not in ("lm_head.weight", "d2t", "t2d")}
    smaller.load_state_dict(state | {"lm_head.weight": rows, "d2t": smaller.d2t, "t2d": smaller.t2d})
    smaller.select_vocabulary(ids)
    return smaller.eval().requires_grad_(False)
