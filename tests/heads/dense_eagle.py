"""EAGLE heads of every variant, made-up texts for them, a dense recomputation without any cache, and checkpoints that
are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.executor.executor import Batch
from slipstream.heads.eagle_head import EagleConfig, EagleHead
from tests.backends.native.models import forest, last
from tests.heads.tiny_heads import config
from tests.tiny_checkpoints import rewrite

Damage = Callable[[dict[str, Tensor]], Any] | dict[str, Any]
"""Changes tensors of a checkpoint in place, or is new values of config.json."""

V, TARGET = 40, 6
SHORT = {"draft_vocab": 24}
TWO = {"layers": 2, "windows": (None, None)}
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def variant(version: int, target: int = TARGET, decoder: dict[str, Any] | None = None, **changes: Any) -> EagleConfig:
    short = SHORT if version == 3 else {}
    return config(version, V, target=target, decoder={"head_dim": 16} | (decoder or {}), **short, **changes)


VARIANTS: dict[str, EagleConfig] = {
    "3": variant(3), "3, norm before residual": variant(3, norm_before_residual=True),
    "3.1": variant(3, fc_norm=True, norm_output=True),
    "3, joined norm, own embedding": variant(3, norm_before_fc=True, own_embedding=True),
    "3, biases": variant(3, decoder=BIASES), "1": variant(1, 8),
    "3, two layers, norms of queries and keys": variant(3, decoder=TWO | {"qk_norm": True}),
    "parallel": variant(3, mask_token=7, depths=6, own_embedding=True, decoder=TWO),
    "1, two layers, bias": variant(1, 8, fc_bias=True, decoder=TWO),
}  # fmt: skip


class Text:
    """A made-up text: tokens and the target's states, true rows 0..n-2."""

    def __init__(self, head: EagleHead, n: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        width = len(head.config.taps) * head.config.target_hidden
        self.tokens = torch.randint(head.config.decoder.vocab_size, (n,), generator=generator).tolist()
        self.features = torch.randn(n, width, generator=generator, dtype=torch.float64)


def rotary(head: EagleHead) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0..255, float64 [256, 1, D]."""
    inv_freq, scale = head.config.decoder.rope()
    angles = torch.outer(torch.arange(256, dtype=torch.float64), inv_freq)
    angles = torch.cat((angles, angles), -1)[:, None]
    return angles.cos() * scale, angles.sin() * scale


def dense(head: EagleHead, tokens: list[int], hidden: Tensor, sees: Tensor, positions: list[int]) -> Any:
    """(next features, what logits reads) of rows that see each other by `sees` [n, n], with no cache at all."""
    cos, sin = rotary(head)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)

    return head(torch.tensor(tokens), hidden, (cos[positions], sin[positions]), attend)


def true_batch(texts: list[Text], starts: list[int], stops: list[int]) -> tuple[Batch, Tensor]:
    """True rows of each text, from a start to before a stop."""
    parts = list(zip(texts, starts, stops, strict=True))
    batch = forest([(b, start, text.tokens[start + 1 : stop + 1], []) for b, (text, start, stop) in enumerate(parts)])
    return last(batch), torch.cat([text.features[start:stop] for text, start, stop in parts])


def logits(head: EagleHead) -> Tensor:
    """Of a made-up text, [n, draft_vocab]."""
    text = Text(head, 9)
    hidden = head.fuse(list(text.features[:8].split(head.config.target_hidden, -1)))
    _, x = dense(head, text.tokens[1:], hidden, torch.ones(8, 8).tril().bool(), list(range(8)))
    return head.logits(x)


def same_logits(head: EagleHead, wanted: EagleHead) -> None:
    lent = wanted._borrowed
    torch.testing.assert_close(
        logits(head.double().borrow(lent.get("embedding"), lent.get("lm_head"))), logits(wanted), rtol=0, atol=0
    )


def assert_refused(
    folder: Path, damage: Damage, load: Callable[[Path], Any], error: type[Exception], says: str | None
) -> None:
    """A checkpoint is not loaded any more after this change."""
    if isinstance(damage, dict):
        rewrite(folder, **damage)
    else:
        rewrite(folder, damage)
    with pytest.raises(error, match=says):
        load(folder)
