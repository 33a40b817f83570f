"""The systems that are compared on targets that transformers runs, and the bars that must be reached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.contenders import LOOKUP_LENGTHS, WORKERS, Contender, WorkerKind
from benchmarks.figures import Figure

KINDS = {
    "slipstream": WorkerKind("benchmarks.huggingface.slipstream_worker"),
    "transformers": WORKERS["transformers"],
}
LENGTHS = (2, 4, 6, 10)
"""Draft lengths of draft models. Each contender uses the length that is fastest on prompts that are not measured."""
AUTO_BAD, CUSTOM_BAD = "bad", "custom_bad"

OURS = {
    "plain": Contender("Slipstream, plain", "slipstream", "plain"),
    "draft": Contender("Slipstream, draft model, chosen lengths", "slipstream", "draft"),
    "draft_fixed": Contender("Slipstream, draft model, fixed length", "slipstream", "draft", lengths=LENGTHS),
    "draft_same": Contender(
        "Slipstream, draft model that transformers runs, too, chosen lengths", "slipstream", "draft_same"
    ),
    "suffix": Contender("Slipstream, suffix tree, chosen lengths", "slipstream", "suffix"),
    AUTO_BAD: Contender("Slipstream, draft model of random weights, chosen lengths", "slipstream", AUTO_BAD),
    "custom": Contender("generate(custom_generate=...), draft model, chosen lengths", "slipstream", "custom"),
    CUSTOM_BAD: Contender(
        "generate(custom_generate=...), draft model of random weights, chosen lengths", "slipstream", CUSTOM_BAD
    ),
}
ASSISTED = {
    "constant": Contender("transformers, assisted, constant", "transformers", "constant", lengths=LENGTHS),
    "confident": Contender("transformers, assisted, confidence 0.4", "transformers", "confident", lengths=LENGTHS),
    "heuristic": Contender("transformers, assisted, heuristic", "transformers", "heuristic", lengths=LENGTHS),
    "defaults": Contender("transformers, assisted, its defaults", "transformers", "confident", draft_tokens=20),
}
"""transformers' assisted generation, with the settings that its documentation names. The fastest setting counts."""
THEIRS = {
    "transformers": Contender("transformers, generate", "transformers", "target"),
    **ASSISTED,
    "lookup": Contender("transformers, prompt lookup", "transformers", "lookup", lengths=LOOKUP_LENGTHS),
}
CONTENDERS = {key: replace(who, prompts="both") for key, who in {**OURS, **THEIRS}.items()}


@dataclass(frozen=True)
class Group:
    """Contenders of one interleaved run, and the figures computed from it. A group without contenders compares batches
    with the same requests one after another."""

    contenders: tuple[str, ...]
    figures: tuple[str, ...]


GROUPS = {
    "assisted": Group(
        ("plain", "draft", "draft_fixed", "draft_same", "transformers", *ASSISTED),
        ("assisted", "assisted_same", "gain"),
    ),
    "lookup": Group(("suffix", "transformers", "lookup"), ("lookup", "lookup_gain")),
    "control": Group(
        ("plain", "draft", AUTO_BAD, "custom", CUSTOM_BAD, "transformers"),
        ("plain", "gain", "bad", "custom", "custom_bad"),
    ),
    "batch": Group((), ("batch", "batch_draft", "batch_encoder_decoder")),
}
FIGURES = {
    "assisted": Figure("draft model against the fastest assisted generation", 1.5, "assisted", "draft"),
    "assisted_same": Figure(
        "the same, transformers runs the draft model, too", 1.5, "assisted", "draft_same"),
    "lookup": Figure("suffix tree against prompt lookup", 1.0, "lookup", "suffix"),
    "lookup_gain": Figure("suffix tree against `generate`", 0.97, "transformers", "suffix"),
    "plain": Figure("plain decoding against `generate`", 0.97, "transformers", "plain"),
    "gain": Figure("draft model against `generate`", 0.97, "transformers", "draft"),
    "bad": Figure("draft model of random weights against `generate`", 0.97, "transformers", AUTO_BAD),
    "custom": Figure("custom_generate with a draft model against `generate`", 0.97, "transformers", "custom"),
    "custom_bad": Figure(
        "custom_generate with a draft model of random weights against `generate`", 0.97, "transformers", CUSTOM_BAD),
    "batch": Figure("8 texts at once against one after another, plain", 2.0, "apart_plain", "together_plain"),
    "batch_draft": Figure(
        "8 texts at once against one after another, draft model", 2.0, "apart_draft", "together_draft"),
    "batch_encoder_decoder": Figure(
        "8 texts at once against one after another, encoder-decoder, plain", 2.0, "apart_t5", "together_t5"),
}  # fmt: skip


def models(target: str, draft: str, bad: str) -> dict[tuple[str, str], dict[str, Any]]:
    """See `Session.models`. bad: a draft model of random weights."""
    pair = {"target": target, "draft": draft}
    return {
        ("slipstream", "plain"): {"target": target},
        ("slipstream", "draft"): pair,
        ("slipstream", "draft_same"): pair | {"draft_executor": "transformers"},
        ("slipstream", "suffix"): {"target": target, "draft": "suffix"},
        ("slipstream", AUTO_BAD): {"target": target, "draft": bad},
        ("slipstream", "custom"): pair | {"custom": True},
        ("slipstream", CUSTOM_BAD): {"target": target, "draft": bad, "custom": True},
        ("transformers", "target"): {"target": target},
        ("transformers", "constant"): pair,
        ("transformers", "confident"): pair | {"confidence": 0.4},
        ("transformers", "heuristic"): pair | {"schedule": "heuristic"},
        ("transformers", "lookup"): {"target": target},
    }
