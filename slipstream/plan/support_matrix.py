"""What works with what: architecture x drafter x rule x quantisation, from what the code declares."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs
from slipstream.models.config import FAMILIES
from slipstream.models.weight_formats import QUANTISATIONS
from slipstream.settings import RULES, SAME, STRING
from slipstream.targets.huggingface.kinds import ARCHITECTURES, DECODER, GGUF, KINDS, ONE_BY_ONE, Kind
from slipstream.templates import filled

T = TypeVar("T")

TESTED = "tested with the extra `quant`"
EXTERNAL = {
    "torchao int8 weights": TESTED,
    "torchao int8 weights and activations": TESTED,
    "bitsandbytes int8": TESTED,
    "bitsandbytes nf4": TESTED,
    "torchao int4 weights": "not tried: no kernels for a CPU",
    "GPTQ": "tried by hand: its library, gptqmodel 7.7, asks for PyTorch 2.14",
    "AWQ": "not tried: its library, gptqmodel 7.7, asks for PyTorch 2.14",
}
"""Quantisations that transformers loads, and whether a test does."""
FAILS = "fails the trial at load: the logits of a text are others when more text follows"
"""Of Jamba, in transformers itself, on a CPU."""


IN_FILES = ("F32", "F16", "Q8_0", "Q4_K_M and others")
"""Quantisations of GGUF files."""


@dataclass(frozen=True)
class Cell:
    """Whether a drafter works with a kind of target; why: what is different, or why it is refused; empty if nothing."""

    works: bool
    why: str = ""

    def __str__(self) -> str:
        return "no" if not self.works else "chains" if self.why else "yes"


def architectures() -> dict[str, Kind]:
    return {**dict.fromkeys(sorted(FAMILIES), DECODER), **dict(sorted(ARCHITECTURES.items()))}


def cell(kind: Kind, spec: DrafterSpec) -> Cell:
    """Whether a target of this kind takes drafts of this drafter."""
    if spec.needs is Needs.EARLY_EXIT and not kind.early_exit:
        return Cell(False, "its layers cannot be run apart")
    if spec.needs in (Needs.DRAFT_HEAD, Needs.MTP_LAYERS) and not kind.heads:
        return Cell(False, "it offers no hidden states")
    if spec.needs is Needs.MTP_LAYERS and kind is DECODER:
        return Cell(False, "none of its architectures brings MTP layers")
    if spec.length and not kind.trees:
        return Cell(True, "of a tree, the first branch is verified")
    return Cell(True)


def quantisations(kind: Kind) -> dict[str, str]:
    """Quantisation of the target -> what it needs; a draft model's is chosen apart from it."""
    in_files = dict.fromkeys(IN_FILES, "as the GGUF file has it")
    if kind is DECODER:
        return dict.fromkeys(QUANTISATIONS, "float32 arithmetic on a CPU") | in_files
    if kind is GGUF:
        return dict.fromkeys(QUANTISATIONS, "refused: `slipstream convert` quantises") | in_files
    refused = "refused: transformers loads quantised models, LLM(loaded_model)"
    formats = dict.fromkeys(QUANTISATIONS, refused) | EXTERNAL
    if kind is ONE_BY_ONE:
        formats["bitsandbytes nf4"] = FAILS
    return formats


DRAFT_TOKENIZERS = {
    SAME: "another tokenizer than the target's is refused",
    STRING: "lossless, chains of the most likely tokens",
}
"""`draft_tokenizer` -> what becomes of a draft model with another tokenizer."""


def page() -> str:
    """The table in Markdown: docs/support.md. Drafters with equal cells share a column, kinds of targets a row."""
    columns = _alike(DRAFTERS, lambda name: tuple(str(cell(kind, DRAFTERS[name])) for kind in KINDS))
    rows = _alike(KINDS, lambda kind: tuple(str(cell(kind, DRAFTERS[names[0]])) for names in columns.values()))
    quantised: dict[str, dict[str, list[str]]] = {}  # kinds of targets -> what a quantisation needs -> names
    for name, need in dict.fromkeys(each for kind in KINDS for each in quantisations(kind).items()):
        if not need.startswith("refused"):
            kinds = _together([kind for kind in KINDS if quantisations(kind).get(name) == need])
            quantised.setdefault(kinds, {}).setdefault(need, []).append(name)
    return filled(
        "support.md",
        columns=list(columns.values()),
        rows=rows.items(),
        refusals={entry.why for kind in KINDS for spec in DRAFTERS.values() if not (entry := cell(kind, spec)).works},
        kinds={kind: [name for name, of in architectures().items() if of is kind] for kind in KINDS},
        quantised=quantised.items(),
        rules=RULES,
        draft_tokenizers=DRAFT_TOKENIZERS.items(),
    )


def _together(kinds: list[Kind]) -> str:
    """The names of kinds; several that transformers runs as all of these but some."""
    by_transformers = [kind for kind in KINDS if kind not in (DECODER, GGUF)]
    if len(kinds) == 1 or kinds[0] not in by_transformers:
        return "; ".join(kind.name for kind in kinds)
    return " but ".join(["all that transformers runs", *(kind.name for kind in by_transformers if kind not in kinds)])


def _alike(things: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Key -> the things that have it, in their order."""
    groups: dict[Any, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups
