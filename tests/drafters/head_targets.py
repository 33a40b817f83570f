"""Targets for the tests of draft heads, and their true hidden states."""

import functools
from collections.abc import Iterator, Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.draft import Draft
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Target
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_head import EagleHead
from slipstream.targets.decoder import Decoder
from tests.drafters.conformance import Recorder
from tests.heads.tiny_heads import config, dflash_config, dflash_head, head
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import random_llama

V = 5
PROMPTS = [[1, 2, 3], [4], [0, 1, 2, 0, 1, 2, 0]]


def toy() -> ToyTarget:
    return ToyTarget(V, order=3, seed=21, sharpness=1.5)


def features(target: Target, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """Return the true features of a text, from one prefill without a draft: [n, taps * target_hidden]."""
    seq = Sequence(list(tokens))
    out = target.run([seq], Draft.empty(1), taps)
    joined = torch.cat([out.hidden[tap] for tap in taps], -1).clone()
    target.commit([seq], [[]])
    target.release(seq.id)
    return joined


def greedy_drafts(drafter: Drafter, depth: int, steps: int, max_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Decode PROMPTS greedily in one batch. Yields (text before the step, draft tokens) for each prompt and each step
    except the first. Every draft has `depth` tokens."""
    target, recorder = toy(), Recorder(drafter, V)
    seqs = [Sequence(p, SamplingParams(max_tokens=max_tokens)) for p in PROMPTS]
    for index in range(steps):
        step(seqs, target, recorder, RULES["rejection"], depth if index else 0)
    for seq in seqs:
        for proposal in recorder.proposed[seq.id][1:]:
            assert len(proposal.ids) == depth
            yield proposal.text, proposal.ids


def prefilled(drafter: Drafter, prompts: Seq[list[int]], target: Target | None = None, **params: Any) -> list[Sequence]:
    """Return sequences after one step without a draft, which has read their prompts."""
    seqs = [Sequence(list(prompt), SamplingParams(**{"max_tokens": 40} | params)) for prompt in prompts]
    step(seqs, target or toy(), drafter, RULES["rejection"], 0)
    return seqs


def fitting_head(kind: str, **changes: Any) -> EagleHead | DFlashHead:
    """Make a random head for `tiny_decoder`. kind: name of its drafter."""
    decoder = {"head_dim": 16, **changes.pop("decoder", {})}
    if kind == "dflash":
        return dflash_head(dflash_config(40, 24, 24, **{"taps": (1, 2, 4), "decoder": decoder} | changes), spread=0.3)
    version, fields = (1, {}) if kind == "eagle" else (3, {"draft_vocab": 30, "taps": (1, 2, 4)})
    return head(config(version, 40, 24, 24, **fields | {"decoder": decoder} | changes), spread=0.3)


SHAPE = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4,
    "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@functools.cache
def tiny_decoder(executor: str = "torch", dtype: str = "float64", **changes: Any) -> Decoder:
    """Make a tiny Llama: 4 layers of width 24, 40 ids."""
    return Decoder.of_module(random_llama(1, **SHAPE | changes), LoadSettings(executor=executor, dtype=dtype))
