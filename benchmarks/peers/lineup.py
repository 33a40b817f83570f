"""The compared contenders: every engine in each of its ways of decoding, on the same prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.contenders import Contender
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
"""Worker -> name of the system."""
BASE = "plain"
SIXTEEN = "keys, values and the rows that enter a matrix product are rounded to float16"
BINDINGS = "drafts by a second model through the bindings' draft interface; llama.cpp's own loop has no Python binding"

MODEL = {
    "draft": Contender("Slipstream, draft model", "slipstream", "draft"),
    "eagle3": Contender("Slipstream, EAGLE-3 head", "slipstream", "eagle3"),
    "transformers_draft": Contender("transformers, assisted", "transformers", "target"),
    "llamacpp_draft": Contender("llama.cpp F32, draft model", "llamacpp", "draft", note=BINDINGS),
    "genai_draft": Contender("OpenVINO GenAI, draft model", "genai", "draft"),
    "vllm_draft": Contender("vLLM, draft model", "vllm_draft", "draft"),
}
"""Contenders with a draft model or head."""
LOOKUP = {
    "suffix": Contender("Slipstream, suffix tree", "slipstream", "suffix"),
    "hybrid": Contender("Slipstream, suffix tree and draft model", "slipstream", "hybrid"),
    "transformers_lookup": Contender("transformers, prompt lookup", "transformers", "lookup"),
    "llamacpp_lookup": Contender("llama.cpp F32, prompt lookup", "llamacpp", "lookup"),
    "genai_lookup": Contender("OpenVINO GenAI, prompt lookup", "genai", "lookup"),
    "vllm_ngram": Contender("vLLM, n-gram", "vllm_ngram", "ngram"),
}
"""Contenders with a lookup."""
PLAIN = {
    "plain": Contender("Slipstream, plain", "slipstream", "plain"),
    "int8": Contender("Slipstream, plain, int8", "slipstream", "int8", exact=False),
    "transformers": Contender("transformers, plain", "transformers", "target"),
    "llamacpp": Contender("llama.cpp F32, plain", "llamacpp", "F32"),
    "llamacpp_f16": Contender("llama.cpp F16, plain", "llamacpp", "F16", exact=False, note=SIXTEEN),
    "llamacpp_q8": Contender("llama.cpp Q8_0, plain", "llamacpp", "Q8_0", exact=False),
    "llamacpp_q4": Contender("llama.cpp Q4_K_M, plain", "llamacpp", "Q4_K_M", exact=False),
    "genai": Contender("OpenVINO GenAI, plain", "genai", "plain"),
    "vllm": Contender("vLLM, plain", "vllm", "plain"),
}


@dataclass(frozen=True)
class Match:
    """Two contenders that do the same: one of Slipstream and one of another engine."""

    what: str
    ours: str
    theirs: str


MATCHES = (
    *(Match("plain", "plain", key) for key in ("transformers", "llamacpp", "llamacpp_f16", "genai", "vllm")),
    *(Match("draft model", "draft", f"{key}_draft") for key in ("transformers", "llamacpp", "genai", "vllm")),
    *(Match("lookup", "suffix", key)
      for key in ("transformers_lookup", "llamacpp_lookup", "genai_lookup", "vllm_ngram")),
    Match("8 bits", "int8", "llamacpp_q8"),
    Match("fewest bits that each has", "int8", "llamacpp_q4"),
)  # fmt: skip


def lineup(draft_tokens: int, lookup_tokens: int) -> dict[str, Contender]:
    """All contenders, engine by engine; all draft models have one draft length, all lookups another."""
    fixed = PLAIN | {key: replace(who, draft_tokens=draft_tokens) for key, who in MODEL.items()}
    fixed |= {key: replace(who, draft_tokens=lookup_tokens) for key, who in LOOKUP.items()}
    systems = list(dict.fromkeys(SYSTEMS.values()))
    order = sorted(fixed, key=lambda key: systems.index(SYSTEMS[fixed[key].worker]))
    return {key: replace(fixed[key], prompts="both") for key in order}


def both(prompts: Prompts) -> Prompts:
    """Both sets, alternating: code, edit, code, edit, ...; the same number of each."""
    return {"both": [prompt for pair in zip(prompts["code"], prompts["edit"], strict=False) for prompt in pair]}
