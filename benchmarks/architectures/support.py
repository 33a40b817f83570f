"""Writes the beginning of docs/support.md, the tables of features, from declarations in the code: `make support`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from benchmarks.architectures.table import PAGE
from benchmarks.markdown_tables import render_markdown_rows
from slipstream.checkpoints.families import FAMILIES
from slipstream.checkpoints.weight_formats import QUANTISATIONS
from slipstream.drafters.registry import DRAFTERS, DrafterSpec
from slipstream.settings import RULES, SAME, STRING
from slipstream.targets.huggingface.kinds import ARCHITECTURES, DECODER, KINDS, ONE_BY_ONE, Kind

T = TypeVar("T")

TESTED = "tested with the extra `quant`"
EXTERNAL = {
    "torchao int8 weights": TESTED,
    "torchao int8 weights and activations": TESTED,
    "bitsandbytes int8": TESTED,
    "bitsandbytes nf4": TESTED,
    "torchao int4 weights": "not tested: it has no kernels for a CPU",
    "GPTQ": "tested by hand: its library, gptqmodel 7.7, requires PyTorch 2.14",
    "AWQ": "not tested: its library, gptqmodel 7.7, requires PyTorch 2.14",
}
"""Quantisations that transformers loads, and whether they are tested."""
FAILS = "fails the trial at load: the logits of a text depend on the text after it"
"""What happens with Jamba in transformers on a CPU."""


IN_FILES = ("F32", "F16", "Q8_0", "Q4_K_M and others")
"""Quantisations of GGUF files."""

HEADING = "\n## "
"""From the first such heading on, the page is not made here."""


def architectures() -> dict[str, Kind]:
    others = {name: kind for name, kind in sorted(ARCHITECTURES.items()) if name not in FAMILIES}
    return {**dict.fromkeys(sorted(FAMILIES), DECODER), **others}


def cell(kind: Kind, spec: DrafterSpec) -> str:
    """Say whether a drafter works with a kind of target: "no", "chains" (the first branch of a tree), or "yes"."""
    if spec.refusal(kind):
        return "no"
    return "chains" if spec.length and not kind.trees else "yes"


def quantisations(kind: Kind) -> dict[str, str]:
    """Return what each quantisation of the target needs. The quantisation of the draft model is chosen separately."""
    in_files = dict.fromkeys(IN_FILES, "as the GGUF file has it")
    if kind is DECODER:
        return dict.fromkeys(QUANTISATIONS, "float32 arithmetic on a CPU") | in_files
    refused = "refused: transformers loads quantised models, LLM(loaded_model)"
    formats = dict.fromkeys(QUANTISATIONS, refused) | EXTERNAL
    if kind is ONE_BY_ONE:
        formats["bitsandbytes nf4"] = FAILS
    return formats


DRAFT_TOKENIZERS = {
    SAME: "another tokenizer than the target's is refused",
    STRING: "lossless, chains of the most likely tokens",
}
"""For each value of `draft_tokenizer`, what happens to a draft model with another tokenizer."""


def page() -> str:
    """Make the beginning of the page. Drafters with equal cells share a column; kinds of targets with equal cells share
    a row."""
    columns = _alike(DRAFTERS, lambda name: tuple(cell(kind, DRAFTERS[name]) for kind in KINDS))
    alike = _alike(KINDS, lambda kind: tuple(cell(kind, DRAFTERS[names[0]]) for names in columns.values()))
    refusals = {why for kind in KINDS for spec in DRAFTERS.values() if (why := spec.refusal(kind))}
    quantised: dict[str, dict[str, list[str]]] = {}  # by kinds of targets, then by requirement: names of quantisations
    for name, need in dict.fromkeys(each for kind in KINDS for each in quantisations(kind).items()):
        if not need.startswith("refused"):
            kinds = _together([kind for kind in KINDS if quantisations(kind).get(name) == need])
            quantised.setdefault(kinds, {}).setdefault(need, []).append(name)
    tables = (
        _table(["kind of target", *map(_code, columns.values())],
               [["; ".join(map(_bold, kinds)), *cells] for cells, kinds in alike.items()]),
        _table(["kind of target", "architectures (`model_type`)", "what runs it"],
               [[_bold(kind), _code(name for name, of in architectures().items() if of is kind),
                 kind.note] for kind in KINDS]),
        _table(["kind of target", "quantisation of the target"],
               [[kinds, "; ".join(f"{', '.join(names)} ({need})" for need, names in needs.items())]
                for kinds, needs in quantised.items()]),
    )  # fmt: skip
    together, apart = ("; ".join(_bold(kind) for kind in KINDS if kind.trees is one) for one in (True, False))
    tokenizers = " or ".join(f"`{name}` ({what})" for name, what in DRAFT_TOKENIZERS.items())
    return f"""\
# What works with what

`make support` generates this page from declarations in the code, and a test compares page and code.
Causal models and encoder-decoders that are not listed here undergo a trial when they are loaded
([model families](model-families.md#every-other-model)).

{tables[0]}

*chains* means that only the first branch of a draft tree is verified. *no* means that the drafter does not work with
the target, for one of these reasons: {"; ".join(sorted(refusals))}.

{tables[1]}

For some kinds ({together}), one forward pass runs a batch of requests, and beams that continue the same text share KV
blocks. For the others ({apart}), each request needs a forward pass, and each beam a copy of the cache.

{tables[2]}

Every combination in these tables works with every rule ({_code(RULES)}) and every batch size. Target and
draft model may be of different kinds, but either both or none must be encoder-decoders. `eagle3` also stands for
EAGLE-3.1 and P-EAGLE, `dflash` for DSpark, and `model` for PARD.
The runner of the target also runs its [MTP layers](model-families.md#mtp-layers).
The draft model has its own quantisation (`draft_quantize`). The setting `draft_tokenizer` is \
{tokenizers}. Beam search drafts nothing ([why](commands.md#beam-search)).
"""


def _table(heads: list[str], body: list[list[str]]) -> str:
    return render_markdown_rows(heads, body, range(len(heads)))


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _bold(kind: Kind) -> str:
    return f"**{kind.name}**"


def _together(kinds: list[Kind]) -> str:
    """Return the names of kinds. If most kinds that transformers runs are among them, name only the missing ones."""
    by_transformers = [kind for kind in KINDS if kind is not DECODER]
    if len(kinds) == 1 or kinds[0] not in by_transformers:
        return "; ".join(map(_bold, kinds))
    missing = ", ".join(_bold(kind) for kind in by_transformers if kind not in kinds)
    return "all that transformers runs" + f" except {missing}" * bool(missing)


def _alike(things: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Group things by their key, in order."""
    groups: dict[Any, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def main() -> None:
    below = PAGE.read_text(encoding="utf-8").split(HEADING, 1)[1]
    PAGE.write_text(page() + HEADING + below, encoding="utf-8")


if __name__ == "__main__":
    main()
