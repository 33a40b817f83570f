"""The contenders: every engine in all its modes of decoding and in several weight formats, on the same prompts.

Contenders are compared within a class (number of bits of the weights) and a mode (plain, draft model, lookup).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from benchmarks.contenders import DRAFT_LENGTHS, LOOKUP_LENGTHS, Contender
from benchmarks.prompts import Prompts

SYSTEMS = {
    "slipstream": "Slipstream",
    "transformers": "transformers",
    "llamacpp": "llama.cpp",
    "genai": "OpenVINO GenAI",
    "vllm": "vLLM",
    "vllm_draft": "vLLM",
    "vllm_ngram": "vLLM",
}
"""Name of the system by worker."""
CLASSES = {16: "16 bits", 8: "8 bits", 4: "4 bits"}
"""Classes by the bits of a weight. Class 16 includes weights of 32 bits."""
BASE = "plain"
SIXTEEN = "keys, values and the rows that enter a matrix product are rounded to float16"
BINDINGS = "drafts by a second model through the bindings' draft interface; llama.cpp's own loop has no Python binding"
FAST = "arithmetic in the precision that the pipeline chooses: bfloat16 where the processor has it, else float32"

PLAIN = {
    "plain": Contender("Slipstream, plain", "slipstream", "plain"),
    "int8": Contender("Slipstream int8, plain", "slipstream", "int8", exact=False, bits=8),
    "transformers": Contender("transformers, plain", "transformers", "target"),
    "llamacpp": Contender("llama.cpp F32, plain", "llamacpp", "F32"),
    "llamacpp_f16": Contender("llama.cpp F16, plain", "llamacpp", "F16", exact=False, note=SIXTEEN),
    "llamacpp_q8": Contender("llama.cpp Q8_0, plain", "llamacpp", "Q8_0", exact=False, bits=8),
    "llamacpp_q4": Contender("llama.cpp Q4_K_M, plain", "llamacpp", "Q4_K_M", exact=False, bits=4),
    "genai": Contender("OpenVINO GenAI fp32, plain", "genai", "plain"),
    "vllm": Contender("vLLM, plain", "vllm", "plain"),
}
"""Contenders without a draft."""
MODEL = {
    "draft": Contender("Slipstream, draft model", "slipstream", "draft"),
    "eagle3": Contender("Slipstream, EAGLE-3 head", "slipstream", "eagle3"),
    "int8_draft": Contender("Slipstream int8, draft model", "slipstream", "int8_draft", exact=False, bits=8),
    "transformers_draft": Contender("transformers, assisted", "transformers", "target"),
    "llamacpp_draft": Contender("llama.cpp F32, draft model", "llamacpp", "F32_draft", note=BINDINGS),
    "llamacpp_f16_draft": Contender("llama.cpp F16, draft model", "llamacpp", "F16_draft", exact=False),
    "llamacpp_q8_draft": Contender("llama.cpp Q8_0, draft model", "llamacpp", "Q8_0_draft", exact=False, bits=8),
    "genai_draft": Contender("OpenVINO GenAI fp32, draft model", "genai", "draft"),
    "vllm_draft": Contender("vLLM, draft model", "vllm_draft", "draft"),
}
"""Contenders with a draft model or head."""
LOOKUP = {
    "suffix": Contender("Slipstream, suffix tree", "slipstream", "suffix"),
    "hybrid": Contender("Slipstream, suffix tree and draft model", "slipstream", "hybrid"),
    "int8_suffix": Contender("Slipstream int8, suffix tree", "slipstream", "int8_suffix", exact=False, bits=8),
    "transformers_lookup": Contender("transformers, prompt lookup", "transformers", "lookup"),
    "llamacpp_lookup": Contender("llama.cpp F32, prompt lookup", "llamacpp", "F32_lookup"),
    "llamacpp_f16_lookup": Contender("llama.cpp F16, prompt lookup", "llamacpp", "F16_lookup", exact=False),
    "llamacpp_q8_lookup": Contender("llama.cpp Q8_0, prompt lookup", "llamacpp", "Q8_0_lookup", exact=False, bits=8),
    "genai_lookup": Contender("OpenVINO GenAI fp32, prompt lookup", "genai", "lookup"),
    "vllm_ngram": Contender("vLLM, n-gram", "vllm_ngram", "ngram"),
}
"""Contenders with a lookup."""


def exports(end: str, words: str) -> dict[str, Contender]:
    """Return OpenVINO GenAI's further contenders of one mode. end: end of the names of its models."""
    exports = {}
    for bits, export in ((16, "fp16"), (8, "int8")):
        for suffix, arithmetic in (("", "f32"), ("_fast", "default")):
            label, model = f"OpenVINO GenAI {export} ({arithmetic}), {words}", export + suffix + end
            exact, note = bits == 16 and not suffix, FAST if suffix and not end else ""
            exports[f"genai_{model}"] = Contender(label, "genai", model, exact=exact, note=note, bits=bits)
    return exports


MODES = {
    "plain": PLAIN | exports("", "plain"),
    "draft model": MODEL | exports("_draft", "draft model"),
    "lookup": LOOKUP | exports("_lookup", "prompt lookup"),
}
LENGTHS: dict[str, tuple[int, ...]] = {"plain": (), "draft model": DRAFT_LENGTHS, "lookup": LOOKUP_LENGTHS}
OURS = {
    (16, "plain"): "plain", (16, "draft model"): "draft", (16, "lookup"): "suffix",
    (8, "plain"): "int8", (8, "draft model"): "int8_draft", (8, "lookup"): "int8_suffix",
}  # fmt: skip
"""Slipstream's contender for each class and mode. It is fixed before the measurement, and is compared with all other
engines."""


@dataclass(frozen=True)
class Match:
    """Two contenders of one class and mode, one of Slipstream (None: there is none) and one of another engine."""

    bits: int
    mode: str
    ours: str | None
    theirs: str


def lineup(draft_tokens: int | None = None, lookup_tokens: int | None = None) -> dict[str, Contender]:
    """Return all contenders, ordered by engine. draft_tokens, lookup_tokens: draft length of all contenders with a
    draft model or lookup; None: each uses its fastest length on other prompts."""
    given = {"plain": None, "draft model": draft_tokens, "lookup": lookup_tokens}
    entries = {}
    for mode, contenders in MODES.items():
        fixed = given[mode]
        for key, who in contenders.items():
            who = replace(who, prompts="both", mode=mode)
            entries[key] = replace(who, lengths=LENGTHS[mode]) if fixed is None else replace(who, draft_tokens=fixed)
    systems = list(dict.fromkeys(SYSTEMS.values()))
    order = sorted(entries, key=lambda key: (systems.index(SYSTEMS[entries[key].worker]), -entries[key].bits))
    return {key: entries[key] for key in order}


def matches(contenders: Mapping[str, Contender]) -> list[Match]:
    """Pair Slipstream's contender of each class and mode with every contender of other engines."""
    rivals = [(key, who) for key, who in contenders.items() if who.worker != "slipstream"]
    matches = [Match(who.bits, who.mode, OURS.get((who.bits, who.mode)), key) for key, who in rivals]
    return sorted(matches, key=lambda match: (-match.bits, list(MODES).index(match.mode)))


def alternating(prompts: Prompts) -> Prompts:
    """Alternate the prompts of both sets (code, edit, code, edit, ...) until one set has no more."""
    pairs = zip_longest(prompts["code"], prompts["edit"])
    return {"both": [prompt for pair in pairs for prompt in pair if prompt is not None]}
