"""A draft model with another tokenizer as a `Target` of the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Target, TargetOut
from slipstream.core.warp import warp
from slipstream.drafters.model import ModelDrafter
from slipstream.llm import LLM
from slipstream.models.rereading import Reading
from slipstream.models.text import load_tokenizer
from slipstream.targets.decoder import Decoder
from slipstream.targets.translated import TranslatedModel
from tests.checkpoints import Tiny
from tests.core.exact import completed, distance, emitted_distribution, rational, target_distribution, weighed
from tests.core.worlds import Distribution, Shape, Text, World, every_draft, random_world, steady
from tests.drafters.fakes import MultiStepToy
from tests.drafters.foreign_models import OURS, THEIRS, intersection, toy_model, toy_vocabularies, vocabularies
from tests.models.tokenizer_kinds import byte_level, letters
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

SAMPLED = SamplingParams(temperature=1.0)


class Weighted:
    """A draft model whose probabilities after its own text are those of `q`, with its own ids."""

    context, device = 64, torch.device("cpu")

    def __init__(self, vocab: int, q: Seq[Distribution]):
        self.vocab_size, self.q, self.capabilities = vocab, q, Capabilities()

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        rows = [self.q[sum(seq.tokens) % len(self.q)] for seq in seqs]
        return TargetOut(torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64).log())

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


def translated_world(seed: int) -> World:
    """p of a random world over three tokens; q is what the production code draws from: a model of five tokens, of which
    it shares two, and a different one after every text."""
    own = random_world(seed, 3)
    q = [random_world(100 * seed + n, 5).q(()) for n in range(8)]
    q = [tuple((x + Fraction(1, 7)) / (1 + Fraction(5, 7)) for x in row) for row in q]  # each shared token is possible
    model = TranslatedModel(Weighted(5, q), vocabularies(letters(("a", "b", "c")), letters(tuple("xbyaz")), (3, 5)))

    def drawn_from(text: Text) -> Distribution:
        logits = model.run([Sequence([2, *text])], Draft.empty(1)).logits
        return tuple(map(rational, warp(logits, SAMPLED)[0].tolist()))

    return World(3, own.p, drawn_from)


@pytest.mark.parametrize(
    ("rule", "length"),
    [("rejection", 1), ("rejection", 2), ("rejection", 3), ("block", 1), ("block", 2), ("coupled", 1)],
)
def test_the_joint_distribution_of_tokens_is_the_targets(rule: str, length: int) -> None:
    """By enumeration of every draft and every random choice, in fractions."""
    for seed in range(6):
        world = translated_world(seed)
        assert any(world.q(()))
        assert world.q(())[2] == 0, "the target's third token is not the draft model's"
        shape = Shape.chain("s" * length)
        assert emitted_distribution(RULES[rule], world, shape) == target_distribution(world, length + 1)


def test_without_normalisation_the_output_is_biased() -> None:
    """The control: p = (.5, .3, .2), and the draft model gives .4 to each of two shared tokens. Drawn from (.5, .5) but
    verified with (.4, .4), the output is off by 7/60 = .117; with what it was drawn from it is exact."""
    p, drawn, raw = (Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)), Fraction(1, 2), Fraction(2, 5)
    world = steady(p, (drawn, drawn, Fraction(0)))
    truth = target_distribution(world, 2)
    drafts = list(every_draft(world, Shape.chain("s")))
    assert completed(world, weighed(RULES["rejection"], drafts), 2) == truth
    wrong = [replace(made, q=[(raw, raw, Fraction(0))] * len(made.q)) for made in drafts]
    assert distance(completed(world, weighed(RULES["rejection"], wrong), 2), truth) == Fraction(7, 60)


def test_logits_of_shared_tokens_go_to_the_targets_ids() -> None:
    model = intersection()
    out = model.run([Sequence([0, 2])], Draft.empty(1)).logits[0]  # "ab", an open word: a and b
    own = model.model.logits([THEIRS.index("a"), THEIRS.index("b")])
    for id_, token in enumerate(OURS):
        assert out[id_] == (own[THEIRS.index(token)] if token in THEIRS else float("-inf"))


def test_a_word_is_read_in_the_draft_models_own_tokens_when_the_next_one_begins() -> None:
    """The keys and values of its tokens, which were taken one by one, are computed again: the toy model checks."""
    model, seq = intersection(), Sequence([0])
    for token in (2, 1, 0, 2, 3, 1, 2):  # "a", then "b ab" and so on
        model.run([seq], Draft.empty(1))
        model.commit([seq], [[]])
        seq.kv_len = len(seq.tokens)
        seq.tokens.append(token)
    out = model.run([seq], Draft.empty(1)).logits[0]
    reading = Reading(model.both)
    reading.update(seq.tokens, 0)
    assert [THEIRS[id_] for id_ in reading.ids][:3] == ["ab", " ", "ab"]
    assert torch.equal(out[[0, 1, 2, 3]], model.model.logits(reading.ids)[[3, 4, 0, 6]])


def test_a_text_longer_than_the_draft_models_context_is_read_from_a_later_point_on() -> None:
    """The target's tokens fit, the draft model's do not: nothing fails, and drafts go on."""
    target = ToyTarget(2, order=2, seed=3)
    both = vocabularies(letters(("abc", "bca")), letters(("a", "b", "c", "abc")), (2, 4))
    model = ToyTarget(4, order=2, seed=4, context=40)
    llm = LLM(target, ModelDrafter(TranslatedModel(model, both), 2), draft_tokens=3)
    done = llm.generate([[0, 1]], SamplingParams(max_tokens=36))[0]
    assert done.token_ids == Oracle(ToyTarget(2, order=2, seed=3)).greedy([0, 1], 36)
    assert done.stats.drafter_faults == 0
    assert sum(done.drafted[20:]) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_several_steps_in_one_call_draft_what_single_steps_draft(temperature: float, rule: str) -> None:
    def text(kind: type[ToyTarget]) -> list[list[int]]:
        target = ToyTarget(5, order=3, seed=21, sharpness=1.5)
        llm = LLM(target, ModelDrafter(intersection(toy_model(kind)), 5), draft_tokens=4, rule=rule)
        params = [SamplingParams(temperature=temperature, max_tokens=30, seed=n) for n in range(4)]
        done = llm.generate([[n, 1, 2] for n in range(4)], params)
        assert sum(d.stats.accepted for d in done) > 0
        return [[*d.token_ids, d.stats.proposed, d.stats.accepted] for d in done]

    assert text(MultiStepToy) == text(ToyTarget)


def test_it_is_a_target_that_declares_what_the_draft_model_can() -> None:
    model = intersection()
    assert isinstance(model, Target)
    assert (model.capabilities.trees, model.capabilities.multi_step) == (True, None)
    assert intersection(toy_model(MultiStepToy)).capabilities.multi_step is not None
    assert TranslatedModel(ToyTarget(8, trees=False), toy_vocabularies()).capabilities.trees is False


def test_what_was_read_for_an_earlier_text_is_not_computed_again(tiny: Tiny) -> None:
    model = Decoder.load(tiny.draft, executor="torch", dtype="float64")
    ours, theirs = byte_level(), load_tokenizer(tiny.draft)
    translated = TranslatedModel(model, vocabularies(ours, theirs, (len(ours), model.vocab_size)))
    memory = translated.capabilities.memory
    assert memory is not None
    text = ours.encode("def add(first, second):\n    return first + second\n" * 3)
    rows, logits = list[int](), list[torch.Tensor]()
    for _ in range(2):
        seq = Sequence(text)
        memory.begin(seq.id, seq.tokens, len(seq.tokens) - 1)
        rows.append(len(translated.follow(seq).pending))
        logits.append(translated.run([seq], Draft.empty(1)).logits.clone())
        translated.commit([seq], [[]])
        memory.keep(seq.id, seq.tokens)
        translated.release(seq.id)
    assert rows[1] == rows[0] - memory.block
    assert torch.equal(*logits)
