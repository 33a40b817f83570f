"""Recommended pairs of target and draft model, their published acceptance rates and speed-ups, and the sources.

Shapes are those of the published config.json files; sizes are computed from them. A figure without a source is None and
is shown as "no published figure".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.params import Strict
from slipstream.plan.roofline import CONTEXT, Hardware, ModelSize, pair_costs, placed
from slipstream.theory.forecast import ASSUMED_ACCEPTANCE, LONGEST_DRAFT, Forecast, Rates, forecast

NOTEBOOK = 'tutorial "Speculative Decoding: 2-3x Faster LLM Inference"'
CHAPTER = 'course chapter "07. Speculative Decoding"'
GPT_FAST = "gpt-fast README: 25.25 to 48.4 tokens/s, both int4, A100, batch 1"


@dataclass(frozen=True)
class KnownModel(Strict):
    """A model of the registry.

    hub     its id on the Hugging Face hub.
    config  the shape from its config.json.
    """

    name: str
    hub: str
    config: Mapping[str, Any]

    @cached_property
    def shape(self) -> DecoderConfig:
        return DecoderConfig.from_dict(self.config)

    @property
    def size(self) -> ModelSize:
        return ModelSize.of(self.shape, self.name)


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size", "max_position_embeddings")  # fmt: skip


def _llama(*sizes: int, **more: Any) -> Any:
    return MappingProxyType({"model_type": "llama"} | dict(zip(_SIZES, sizes, strict=True)) | more)


def _gpt2(width: int, layers: int, heads: int) -> Any:
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return MappingProxyType({"model_type": "gpt2"} | shape)


_TIED = {"tie_word_embeddings": True}
_QWEN = {"model_type": "qwen2", "tie_word_embeddings": False}
_EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

MODELS = {
    model.name: model
    for model in (
        KnownModel("Llama-2-70B", "meta-llama/Llama-2-70b-hf", _llama(8192, 80, 64, 8, 28672, 32000, 4096)),
        KnownModel("Llama-2-7B", "meta-llama/Llama-2-7b-hf", _llama(4096, 32, 32, 32, 11008, 32000, 4096)),
        KnownModel("CodeLlama-70B", "codellama/CodeLlama-70b-hf", _llama(8192, 80, 64, 8, 28672, 32016, 16384)),
        KnownModel("CodeLlama-7B-Python", "codellama/CodeLlama-7b-Python-hf",
                   _llama(4096, 32, 32, 32, 11008, 32000, 16384)),
        KnownModel("Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct", _llama(8192, 80, 64, 8, 28672, 128256, 8192)),
        KnownModel("Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct", _llama(4096, 32, 32, 8, 14336, 128256, 8192)),
        KnownModel("Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct",
                   _llama(8192, 80, 64, 8, 28672, 128256, 131072)),
        KnownModel("Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", _llama(4096, 32, 32, 8, 14336, 128256, 131072)),
        KnownModel("Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct",
                   _llama(3072, 28, 24, 8, 8192, 128256, 131072, **_TIED)),
        KnownModel("Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct",
                   _llama(2048, 16, 32, 8, 8192, 128256, 131072, **_TIED)),
        KnownModel("Mixtral-8x7B", "mistralai/Mixtral-8x7B-Instruct-v0.1",
                   _llama(4096, 32, 32, 8, 14336, 32000, 32768, **_EXPERTS)),
        KnownModel("Mistral-7B", "mistralai/Mistral-7B-Instruct-v0.2",
                   _llama(4096, 32, 32, 8, 14336, 32000, 32768, model_type="mistral", sliding_window=None)),
        KnownModel("Qwen2.5-72B", "Qwen/Qwen2.5-72B-Instruct", _llama(8192, 80, 64, 8, 29568, 152064, 32768, **_QWEN)),
        KnownModel("Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", _llama(3584, 28, 28, 4, 18944, 152064, 32768, **_QWEN)),
        KnownModel("GPT-2-XL", "openai-community/gpt2-xl", _gpt2(1600, 48, 25)),
        KnownModel("GPT-2", "openai-community/gpt2", _gpt2(768, 12, 12)),
        KnownModel("DistilGPT-2", "distilbert/distilgpt2", _gpt2(768, 6, 12)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class KnownPair(Strict):
    """A recommendation.

    source        where it is recommended.
    acceptance    (low, high) of the published acceptance rate, and `acceptance_source`; None: no published figure.
    speedup       the same for the speed-up, with `speedup_source`.
    draft_tokens  draft length used by the source, if given.
    note          a remark, in one sentence.
    """

    target: str
    draft: str
    source: str
    acceptance: tuple[float, float] | None = None
    acceptance_source: str = ""
    speedup: tuple[float, float] | None = None
    speedup_source: str = ""
    draft_tokens: int | None = None
    note: str = ""


PAIRS = (
    KnownPair("Llama-2-70B", "Llama-2-7B", CHAPTER, speedup=(1.92, 1.92), speedup_source=GPT_FAST, draft_tokens=4),
    KnownPair("Llama-3.1-70B", "Llama-3.2-3B", NOTEBOOK, (0.75, 0.80), NOTEBOOK, (2.0, 3.0), NOTEBOOK, 5,
              note="the tutorial writes Meta-Llama-3.2-3B-Instruct; the hub's id has no Meta-"),
    KnownPair("Llama-3.1-70B", "Llama-3.1-8B", NOTEBOOK, speedup=(2.0, 3.0), speedup_source=NOTEBOOK,
              note="the figure is for Llama 3 70B + 8B"),
    KnownPair("Llama-3-70B", "Llama-3-8B", NOTEBOOK, speedup=(2.5, 2.5),
              speedup_source=NOTEBOOK + ": about 20 to 50 tokens/s",
              note="the tutorial also names a Llama 3 7B, which does not exist"),
    KnownPair("Llama-3.2-3B", "Llama-3.2-1B", "Slipstream",
              note="same family and vocabulary, but the draft is more than a third of the target"),
    KnownPair("CodeLlama-70B", "CodeLlama-7B-Python", CHAPTER,
              note="the heads differ by 16 rows (infilling tokens), which is harmless; acceptance will be lower for "
              "other programming languages"),
    KnownPair("Mixtral-8x7B", "Mistral-7B", NOTEBOOK, (0.70, 0.70), NOTEBOOK, (1.5, 2.0), NOTEBOOK,
              note="the draft reads over half of what one row of the target reads, and verifying more tokens reads "
              "more experts"),
    KnownPair("Qwen2.5-72B", "Qwen2.5-7B", NOTEBOOK, (0.75, 0.75), NOTEBOOK, (2.0, 2.5), NOTEBOOK),
    KnownPair("GPT-2-XL", "DistilGPT-2", NOTEBOOK, (0.65, 0.65), NOTEBOOK, (1.5, 1.5), NOTEBOOK, 5,
              note="a demonstration that runs on a CPU"),
    KnownPair("GPT-2-XL", "GPT-2", NOTEBOOK),
    KnownPair("GPT-2", "DistilGPT-2", NOTEBOOK, speedup=(1.5, 1.5),
              speedup_source=NOTEBOOK + ': "modest (~1.5x)" for the GPT-2 family on a CPU', draft_tokens=5,
              note="the draft reads two thirds of the target's bytes, so even on a CPU it saves time only above 66 %"),
)  # fmt: skip


def outlook(
    pair: KnownPair, hardware: Hardware, acceptance: float | None = None, context: int = CONTEXT
) -> tuple[Hardware, Forecast]:
    """The fewest of these devices that hold both models in 16 bits, and the prediction there for one sequence of
    `context` tokens. Raises ParameterError if 64 devices do not hold them."""
    models = MODELS[pair.target].size, MODELS[pair.draft].size
    hardware = placed(models, hardware, context)
    rates = acceptance_rates(pair.target, pair.draft, acceptance)
    return hardware, forecast(rates, pair_costs(*models, hardware, 1, context))


def acceptance_rates(
    target: str | None, draft: str | None, given: float | None = None, longest: int = LONGEST_DRAFT
) -> Rates:
    """The acceptance rate used to predict for this pair: `given`, else the middle of the published range if the
    registry knows the pair, else `ASSUMED_ACCEPTANCE`."""
    if given is not None:
        return Rates.constant(given, "given", longest)
    pair = published(target, draft) if target and draft else None
    if pair is not None and pair.acceptance is not None:
        return Rates.constant(sum(pair.acceptance) / 2, "published", longest)
    return Rates.constant(ASSUMED_ACCEPTANCE, "assumed", longest)


def _key(name: str) -> str:
    """The name without owner, case, punctuation and kind of tuning, which vary between spellings."""
    name = re.sub(r"[^a-z0-9.]", "", name.rstrip("/").rsplit("/", 1)[-1].lower())
    return re.sub(r"^meta|instruct|chat|hf$|v0\.[12]", "", name).removesuffix("hf")


def known_model(name: str) -> KnownModel | None:
    """The registry's model of that name, hub id or folder name, in any spelling; None if there is none."""
    wanted = _key(name)
    return next((m for m in MODELS.values() if wanted in (_key(m.name), _key(m.hub))), None)


def published(target: str, draft: str) -> KnownPair | None:
    """The pair of these two names, hub ids or folders, or None."""
    models = known_model(target), known_model(draft)
    return next((p for p in PAIRS if models == (MODELS[p.target], MODELS[p.draft])), None)
