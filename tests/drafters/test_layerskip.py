"""LayerSkip on real (tiny) decoders: one cache for both, the choice of the exit, the warning."""

import functools
import logging

import pytest
import torch
import transformers

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget
from slipstream.core.sequence import Sequence
from slipstream.core.warp import warp
from slipstream.drafters.layerskip import LayerSkipConfig, LayerSkipDrafter
from slipstream.drafters.registry import make_drafter
from slipstream.errors import PairError
from slipstream.targets.decoder import Decoder
from slipstream.targets.target_costs import Exit, measure_exits
from slipstream.theory.closed_forms import speedup
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import random_llama

V, LAYERS = 12, 4
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1]]


@functools.cache
def module(late: float) -> transformers.LlamaForCausalLM:
    """A tiny model whose layers from the third on are scaled by `late`: the smaller, the better the exits agree with
    the full model."""
    model = random_llama(
        5, vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, max_position_embeddings=256,
        initializer_range=0.3, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(late)
            layer.mlp.down_proj.weight.mul_(late)
    return model


def target(late: float = 0.4, executor: str = "torch", chunk: int = 512) -> Decoder:
    dtype = "float32" if executor == "native" else "float64"
    return Decoder.of_module(module(late), LoadSettings(executor=executor, dtype=dtype), chunk)


def drafter(of: Decoder, exit: int | str = 2, **options: object) -> LayerSkipDrafter:
    return LayerSkipDrafter(of, LayerSkipConfig(exit, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("chunk", [512, 4])
def test_greedy_text_equals_plain_decoding_and_draft_tokens_are_accepted(executor: str, chunk: int) -> None:
    of = target(executor=executor, chunk=chunk)
    params = SamplingParams(max_tokens=30)
    prompts = [*PROMPTS, [3] * 11]
    plain = LLM(of, draft_tokens=4).generate(prompts, params)
    done = LLM(of, drafter(of), draft_tokens=3, max_batch=3).generate(prompts, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert sum(c.stats.drafter_faults for c in done) == 0
    assert sum(c.stats.accepted for c in done) > 20
    assert not of.exits.rows


def test_q_is_the_warped_distribution_of_the_exit() -> None:
    of = target()
    params = SamplingParams(temperature=0.7, top_k=4, seed=3)
    seq = Sequence([1, 2, 3], params)
    draft = drafter(of).propose([seq], [Budget(3)])
    whole = of.exits.run_layers([Sequence([1, 2, 3])], Draft.chains([draft.ids]), (0, 2)).logits
    torch.testing.assert_close(draft.q, warp(whole[:-1], params))


def test_later_exits_agree_more_and_auto_takes_the_fastest_exit(caplog):
    of = target(0.15)
    with caplog.at_level(logging.INFO, logger="slipstream"):
        mine = drafter(of, "auto")
    assert [e.layers for e in mine.exits] == [1, 2, 3]
    assert mine.exits[2].agreement > mine.exits[0].agreement
    assert all(0 < e.cost <= 1 for e in mine.exits)
    best = max(mine.exits, key=lambda e: e.speedup)
    assert (mine.exit, mine.traits.longest) == (best.layers, best.gamma)
    assert any(f"exits after {best.layers} of 4 layers" in r.message for r in caplog.records)
    seq = Sequence([1, 2, 3])
    of.run([seq], Draft.empty(1))
    of.commit([seq], [[]])
    seq.kv_len, seq.tokens = 3, [1, 2, 3, 4]
    assert len(mine.propose([seq], [Budget(9)])) == best.gamma
    of.release(seq.id)
    assert not of.executor._pool.tables  # type: ignore[attr-defined]  the measurement kept nothing


def test_agreement_is_the_share_of_equal_first_choices_on_the_given_text() -> None:
    of, text = target(), [1, 5, 2, 7, 7, 3, 0, 11]
    whole = of.run([Sequence(text[:1])], Draft.chains([text[1:]])).logits.argmax(-1)
    for measured in measure_exits(of, text):
        early = of.exits.run_layers([Sequence(text[:1])], Draft.chains([text[1:]]), (0, measured.layers)).logits.argmax(
            -1
        )
        assert measured.agreement == pytest.approx(float((early == whole).double().mean()))


def test_the_predicted_speedup_of_an_exit_is_the_closed_form_at_its_best_length() -> None:
    one_exit = Exit(layers=5, agreement=0.9, cost=0.1)
    assert one_exit.gamma == max(range(1, 40), key=lambda gamma: speedup(0.9, gamma, 0.1))
    assert one_exit.speedup == pytest.approx(speedup(0.9, one_exit.gamma, 0.1))
    assert Exit(layers=5, agreement=0.3, cost=0.6).gamma == 1  # no length is faster: the shortest


def test_auto_warns_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    exits = [Exit(layers=1, agreement=0.1, cost=0.4), Exit(layers=2, agreement=0.35, cost=0.6)]
    monkeypatch.setattr("slipstream.targets.target_costs.measure_exits", lambda target: exits)
    assert drafter(target(), "auto").exit == 2
    assert ["35%" in r.message and "60%" in r.message for r in caplog.records] == [True]


def test_a_target_without_early_exit_is_refused() -> None:
    with pytest.raises(PairError, match="ToyTarget"):
        make_drafter("layerskip", ToyTarget())
