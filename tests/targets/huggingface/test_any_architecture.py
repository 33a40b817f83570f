"""Every architecture against transformers' own model, in float64."""

import functools
from collections.abc import Iterator, Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.heads.mtp_names import has_mtp_layers
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface import kinds
from slipstream.targets.huggingface.chains_only import ChainsOnly
from slipstream.targets.huggingface.huggingface_target import of_module
from tests.drafters.scripted_drafters import ScriptedDrafter, replay
from tests.enumeration import enumerate_texts
from tests.oracle import Oracle
from tests.targets.conformance import Case, Conformance
from tests.targets.huggingface.architectures import ARCHITECTURES, ONE_EACH, PACKED, VARIANTS, generated, random_model
from tests.targets.reference import CLOSE, Wide, assert_close, rows_of

PROMPTS = [[5, 9, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8], [60, 61, 2, 17, 17], [11, 11, 40]]
TOKENS = 8


@functools.cache
def model(name: str) -> Any:
    return random_model(name)


@functools.cache
def target(name: str) -> Target:
    return of_module(model(name))


@functools.cache
def texts(name: str) -> list[list[int]]:
    return generated(model(name), PROMPTS, TOKENS)


def logits(name: str, texts: Seq[Seq[int]]) -> list[torch.Tensor]:
    """[n, V] of each text by the model's own forward, without a cache."""
    with torch.no_grad():
        return rows_of(lambda ids: model(name)(input_ids=ids, use_cache=False).logits, texts)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with Wide():
        conformance_case = Case(target(request.param), lambda texts: logits(request.param, texts), CLOSE)
        yield conformance_case
        conformance_case.close()


def test_every_entry_of_the_table_has_a_model_here() -> None:
    known = {model(name).config.model_type for name in ARCHITECTURES}
    causal = {name for name, kind in kinds.ARCHITECTURES.items() if not kind.name.startswith("encoder-decoder")}
    assert {name.split(" (")[0] for name in causal} == known


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_runs_it_is_what_the_tables_say(name: str) -> None:
    if name == "gemma4-shared" and not has_mtp_layers():
        pytest.skip("before transformers 5.23, layers with shared keys run packed; the table is of 5.23")
    runner = target(name)
    kind = kinds.ARCHITECTURES[VARIANTS.get(name, model(name).config.model_type)]
    can = runner.capabilities
    assert (kind.trees, kind.early_exit, can.trees, can.early_exit is not None) == (name in PACKED,) * 4
    assert (kind is kinds.ONE_BY_ONE) == (isinstance(runner, ChainsOnly) and runner.one_by_one)
    assert (kind is kinds.ONE_EACH) == (name in ONE_EACH)
    assert kind.heads == (can.head_host is not None)
    assert isinstance(runner, Decoder if name in PACKED else ChainsOnly)
    assert can.runtime.backend == "transformers"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    """Plainly, and with drafts of which about two thirds are right; windows are crossed within a draft."""
    llm = LLM(target(name), draft_tokens=4, max_batch=5)
    recorded = dict(zip(map(tuple, PROMPTS), texts(name), strict=True))
    for drafter in (None, ScriptedDrafter(recorded, target(name).vocab_size, replay(0.7))):
        llm.use(drafter)
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS))
        assert [c.token_ids for c in done] == texts(name)
    assert all(c.stats.accepted for c in done)
    assert any(c.stats.proposed > c.stats.accepted for c in done)


@pytest.mark.parametrize("case", PACKED, indirect=True)
def test_a_branch_that_is_not_the_first_is_kept(case: Case) -> None:
    Conformance().test_commit_of_a_branch_that_is_not_the_first(case)


@pytest.mark.parametrize("case", ARCHITECTURES, indirect=True)
def test_after_rollbacks_of_differing_depth_the_cache_is_that_of_a_fresh_prefill(case: Case) -> None:
    seq = case.sequence(8)
    case.roll_back(seq)
    case.check_held(seq)


@pytest.mark.parametrize(("case", "name"), [(name, name) for name in ARCHITECTURES], indirect=["case"])
def test_taps_are_the_hidden_states_of_transformers(case: Case, name: str) -> None:
    late = 1 if name in ("mamba", "mamba2") else 0  # their list begins after the first layer

    def hidden(text: list[int]) -> dict[int, torch.Tensor]:
        with torch.no_grad():
            states = model(name)(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        return {late: states[0][0], 1: states[1 - late][0], -1: states[-1][0]}

    case.check_taps((0, 1, case.target.capabilities.head_host.layers, -1), hidden)


def test_a_prompt_has_the_hidden_states_of_all_its_tokens_where_only_its_last_logits_are_needed() -> None:
    """Gemma 4 leaves the other rows out of layers that share the keys of others."""
    of, seq = target("gemma4-shared"), Sequence(PROMPTS[2])
    with torch.no_grad(), Wide():
        hidden = of.run([seq], Draft.empty(1), (4, -1)).hidden
        out = model("gemma4-shared")(torch.tensor([seq.tokens]), output_hidden_states=True, use_cache=False)
        assert_close(hidden[-1], out.hidden_states[-1][0])
        assert_close(model("gemma4-shared").model.norm(hidden[4]), hidden[-1])
    of.release(seq.id)


@pytest.mark.parametrize("name", PACKED)
def test_layers_run_apart_are_the_whole_model(name: str) -> None:
    of = target(name)
    seqs = [Sequence(PROMPTS[2]), Sequence(PROMPTS[1])]
    draft = Draft.trees([([5, 7, 9], [-1, -1, 1]), ([4], [-1])])
    whole = of.run(seqs, draft).logits.clone()
    half = of.exits.run_layers(seqs, draft, (0, 1)).hidden[1].clone()
    rest = of.exits.run_layers(seqs, draft, (1, of.config.layers), half).logits
    assert torch.equal(rest, whole)
    llm = LLM(of, "layerskip", draft_tokens=3, draft_options={"exit": 1})
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS))
    assert [c.token_ids for c in done] == texts(name)
    for seq in seqs:
        of.release(seq.id)


@pytest.mark.parametrize("name", ["gemma2", "deepseek-v3", "gpt-j", *ONE_EACH])
def test_the_model_is_left_as_it_was(name: str) -> None:
    module = random_model(name)
    before = module.config._attn_implementation
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        wanted = module(ids).logits
        LLM(module).generate([PROMPTS[0]], SamplingParams(max_tokens=3))
        assert torch.equal(module(ids).logits, wanted)
    assert module.config._attn_implementation == before
    assert not any("forward" in vars(layer) for layer in module.modules())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "bloom", "lfm2"])
def test_every_text_is_exactly_as_probable_as_in_plain_decoding(name: str) -> None:
    """One model of each kind, with a draft model. The router of DeepSeek computes in float32."""
    how = {"rounding": 1e-6} if name == "deepseek-v3" else {}
    of, draft, params = target(name), random_model(name, noise=0.1), SamplingParams(0.7, top_k=4, max_tokens=4)
    (texts,) = enumerate_texts(lambda: LLM(of, draft, draft_tokens=2), PROMPTS[0], params, after=1, steps=1, **how)
    texts.check(Oracle(of), PROMPTS[0], params)
    assert 0 < texts.accepted < texts.proposed
