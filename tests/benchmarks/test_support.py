"""Each cell of docs/support.md is true, and the page shows what the code declares."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.architectures.support import HEADING, architectures, page, quantisations
from benchmarks.architectures.table import PAGE
from slipstream import LLM, BeamParams, SamplingParams, Structured
from slipstream.backends.torch.torch_heads import TorchDFlash, TorchEagle
from slipstream.checkpoints.families import FAMILIES
from slipstream.core.target import Target, require
from slipstream.drafters.dflash import DFlashDrafter
from slipstream.drafters.eagle import EagleDraftConfig, EagleDrafter
from slipstream.drafters.medusa import MedusaDraftConfig, MedusaDrafter
from slipstream.drafters.registry import DRAFTERS, Needs, make_drafter
from slipstream.errors import PairError, ParameterError
from slipstream.settings import RULES
from slipstream.targets.describe import as_target
from slipstream.targets.huggingface.kinds import KINDS
from tests.heads.tiny_heads import config, dflash_config, dflash_head, head, tiny_heads
from tests.heads.tiny_mtp import random_drafter
from tests.targets.huggingface.architectures import VOCAB, random_model
from tests.targets.huggingface.encoder_decoders import random_encoder_decoder
from tests.tiny_checkpoints import random_llama

MODELS: dict[str, Callable[[], Any]] = {
    "decoder": lambda: random_llama(vocab_size=VOCAB, hidden_size=32, eos_token_id=None).double(),
    "packed": lambda: random_model("stablelm"), "one each": lambda: random_model("bloom"),
    "states": lambda: random_model("lfm2"), "one by one": lambda: random_model("jamba"),
    "encoder-decoder": lambda: random_encoder_decoder("t5"),
    "encoder-decoder, one each": lambda: random_encoder_decoder("mvp", max_position_embeddings=256),
}  # fmt: skip
PROMPTS = [[5, 9, 33], [7, 8, 7, 8, 7, 8], [1]]
PARAMS = SamplingParams(max_tokens=8)


@functools.cache
def target(kind: str) -> Target:
    return as_target(MODELS[kind]())


@functools.cache
def plain(kind: str) -> list[list[int]]:
    return [one.token_ids for one in LLM(target(kind)).generate(PROMPTS, PARAMS)]


def drafter(name: str, of: Target, kind: str) -> Any:
    """What `LLM` takes for a drafter of the registry, with what it needs."""
    spec = DRAFTERS[name]
    if name == "medusa":
        require(of.capabilities.head_host, of, "hidden states", name)
        return MedusaDrafter(tiny_heads(32, VOCAB, 4, seed=5), VOCAB, MedusaDraftConfig())
    if spec.needs is Needs.DRAFT_HEAD:
        require(of.capabilities.head_host, of, "hidden states", name)
        if name == "dflash":
            dflash = dflash_head(dflash_config(VOCAB, width=32, target=32), 3)
            return DFlashDrafter(TorchDFlash(dflash), VOCAB)
        head_config = config(1 if name == "eagle" else 3, VOCAB, width=32, target=32, draft_vocab=VOCAB)
        return EagleDrafter(TorchEagle(head(head_config, 3)), VOCAB, EagleDraftConfig())
    if spec.needs is Needs.MTP_LAYERS:
        require(of.capabilities.head_host, of, "hidden states", name)
        return random_drafter(VOCAB, 32)
    if spec.needs in (Needs.DRAFT_MODEL, Needs.MEMBERS):
        return make_drafter(name, of, model=target("packed" if of.capabilities.encoder is None else kind))
    return make_drafter(name, of, **({"exit": 1} if name == "layerskip" else {}))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_drafter_works_with_each_kind_of_target_or_is_refused(kind: Any, name: str) -> None:
    of = target(kind.name)
    if DRAFTERS[name].refusal(kind):
        with pytest.raises(PairError):
            drafter(name, of, kind.name)
        return
    done = LLM(of, drafter(name, of, kind.name), draft_tokens=4).generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in done] == plain(kind.name)
    assert all(one.stats.drafter_faults == 0 for one in done)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_rule_works_with_each_kind_of_target(kind: Any, rule: str) -> None:
    done = LLM(target(kind.name), "lookahead", draft_tokens=4, rule=rule).generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in done] == plain(kind.name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_beams_work_with_each_kind_of_target(kind: Any) -> None:
    llm = LLM(target(kind.name))
    several = llm.beam_search(PROMPTS[:2], BeamParams(beams=3, n=3, max_tokens=4))
    for prompt, beams in zip(PROMPTS[:2], several, strict=True):
        for beam in beams:
            given = Structured(tokens=beam.token_ids)
            params = SamplingParams(max_tokens=len(beam.token_ids), logprobs=0, structured=given)
            (text,) = llm.generate([prompt], params)
            assert text.token_ids == beam.token_ids
            assert beam.logprob == pytest.approx(sum(each.logprob for each in text.logprobs or ()), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_quantisation_that_is_refused_raises(kind: Any) -> None:
    for name, need in quantisations(kind).items():
        if need.startswith("refused"):
            with pytest.raises(ParameterError, match="quantize"):
                as_target(MODELS[kind.name](), quantize=name)


def test_the_page_is_what_make_support_writes_and_lists_every_family() -> None:
    assert {name for name, kind in architectures().items() if kind.name == "decoder"} == set(FAMILIES)
    assert PAGE.read_text(encoding="utf-8").split(HEADING)[0] == page(), "run `make support`"
