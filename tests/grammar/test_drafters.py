"""Structured output with every drafter of the registry, every rule, in mixed batches, and with other parameters."""

import re
from functools import cache
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams, Structured, Trigger
from slipstream.core.step import _certain
from slipstream.drafters.guard import Guard
from slipstream.drafters.registry import DRAFTERS
from slipstream.grammar.compiler import Grammars
from slipstream.grammar.text_constraint import TextConstraint
from tests.core.letter_tokenizer import constraint_of, letter_tokenizer
from tests.drafters.conformance import Case
from tests.drafters.makers import VARIANTS, V, maker, target
from tests.enumeration import enumerate_texts
from tests.heads.tiny_heads import eagle_drafter
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget
from tests.tokens.tokenizer_kinds import letters

FORM = Structured(regex="(a[bcd]|b[ac]+d|c(a|b|d)|d[a-e]|e[ab])+")  # always goes on
CALLS = Structured(regex="a(bc|cb|d)", trigger=Trigger(["a"], repeats=True))
CONTINUED = Structured(regex="(ab[cde]|c[abd]|d[a-e])+")  # after a comes b, then a choice
FORCED = Structured(regex="(abc[de]ab|b(cad|eba)|c)+")  # after a comes bc
SMALL_TREE = {"small tree": lambda target: eagle_drafter(V, 3, shape="tree", width=2, nodes=3)}
MAKERS = {**{name: maker(name) for name in DRAFTERS}, **VARIANTS, **SMALL_TREE}
CONTINUING = ("ngram", "suffix", "hybrid", "hybrid, continued")
TRIGGERED = ("suffix", "model", "eagle tree, drawn", "medusa", "eagle3")


def llm_of(name: str, **how: object) -> LLM:
    toy = target()
    return LLM(toy, MAKERS[name](toy), tokenizer=letter_tokenizer(V), **{"draft_tokens": 4} | how)  # type: ignore[arg-type]


@cache
def plain(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The first maxima of what the form allows: a second implementation of constrained greedy decoding."""
    oracle, output = Oracle(target()), list[int]()
    constraint = constraint_of(params, V)
    while len(output) < params.max_tokens and not constraint.complete([], output):
        row = oracle.logits([*prompt, *output])
        may = constraint.find_allowed([], [output])[0]
        output.append(max(range(V), key=lambda t: (bool(may[t]), float(row[t]))))
    return output


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, FORM) for name in MAKERS),
        *((name, CALLS) for name in TRIGGERED),
        *((name, FORCED) for name in MAKERS),
        *((name, CONTINUED) for name in CONTINUING),
    ],
)
def test_greedy_text_is_that_of_plain_constrained_decoding(name: str, form: Structured) -> None:
    params = SamplingParams(structured=form, max_tokens=30)
    prompts = Case(target, MAKERS[name]).prompts(5)
    for draft_tokens in (1, 5):
        llm = llm_of(name, draft_tokens=draft_tokens, max_batch=2)
        done = llm.generate(prompts, params)
        assert [each.token_ids for each in done] == [plain(tuple(prompt), params) for prompt in prompts]
        assert not any(each.stats.drafter_faults for each in done)
        assert form is not CALLS or all(re.fullmatch("([b-e]|a(bc|cb|d))*(a[bc]?)?", each.text) for each in done)


DRAWING = ("model", "suffix", "medusa", "eagle3", "small tree")
REJECTION = [(name, "rejection", FORM, 2) for name in DRAWING]
LONGER = [(name, rule, FORM, 3) for name in ("model", "suffix") for rule in ("rejection", "block")]
CALLED = [("suffix", "rejection", CALLS, 4), ("small tree", "rejection", CALLS, 2)]
FORCED_TEXT = [(name, rule, FORCED, 3) for name in ("none", "suffix", "model") for rule in ("rejection", "block")]
CONTINUED_TEXT = [(name, rule, 3) for name in ("ngram", "suffix", "hybrid") for rule in ("rejection", "block")]
PROMPT = [0, 1, 2, 0, 1, 2, 0]
REPEATED = [3, 0, 1, 2, 3, 0, 1, 2, 3]  # d a b is a match of three


@pytest.mark.parametrize(("name", "rule", "form", "steps"), REJECTION + LONGER + CALLED + FORCED_TEXT)
def test_every_text_is_exactly_as_probable_as_in_plain_decoding(name: str, rule: str, form: Structured, steps: int):
    """By enumeration of the first token and so many steps. Of calls, a second one may begin in the text."""
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=2 + steps, structured=form)
    (texts,) = enumerate_texts(lambda: llm_of(name, draft_tokens=2, rule=rule), PROMPT, params, steps=steps)
    texts.check(Oracle(target()), PROMPT, params)
    assert texts.accepted > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_every_text_is_as_probable_if_forced_text_is_drafted_in_the_tokens_of_earlier_text(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Each request learns from its own text only, so that runs can be repeated."""
    tokenizer, drafted = letters(("a", "b", "c", "ab", "bc")), set[tuple[int, ...]]()
    find_forced, make_constraint = TextConstraint.find_forced, Grammars.make_constraint

    def spelled(self: TextConstraint, output: list[int], as_before: bool = False) -> Any:
        forced = find_forced(self, output, True)
        drafted.add(tuple(forced.tokens))
        return forced

    def make_alone(params: SamplingParams, *_: object) -> Any:
        return make_constraint(Grammars(tokenizer, V), params.structured, frozenset())  # type: ignore[arg-type]

    params = SamplingParams(temperature=1.0, max_tokens=7, structured=Structured(regex="((a|b)abc)+"))
    monkeypatch.setattr(TextConstraint, "find_forced", spelled)
    monkeypatch.setattr(Grammars, "make_constraint", lambda *_: make_alone(params))
    monkeypatch.setattr("tests.end_to_end.sampling.constraint_of", make_alone)
    monkeypatch.setattr("tests.oracle.constraint_of", cache(make_alone))
    llm = LLM(target(), tokenizer=tokenizer, draft_tokens=2, rule=rule)
    (texts,) = enumerate_texts(lambda: llm, PROMPT, params, steps=5, share_form=False)
    texts.check(Oracle(target()), PROMPT, params)
    assert texts.accepted > 0
    assert {(0, 1), (0, 4)} <= {draft[:2] for draft in drafted}, "in the tokenizer's tokens, and in the target's"


@pytest.mark.parametrize(("name", "rule", "steps"), CONTINUED_TEXT)
def test_a_lookup_after_forced_tokens_leaves_every_text_as_probable(
    monkeypatch: pytest.MonkeyPatch, name: str, rule: str, steps: int
) -> None:
    found, continue_from = list[int](), Guard.continue_from

    def counted(self: Guard, *given: Any) -> list[tuple[int, str]]:
        tokens = continue_from(self, *given)
        found.append(len(tokens))
        return tokens

    monkeypatch.setattr(Guard, "continue_from", counted)
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=2 + steps, structured=CONTINUED)
    (texts,) = enumerate_texts(lambda: llm_of(name, draft_tokens=3, rule=rule), REPEATED, params, steps=steps)
    texts.check(Oracle(target()), REPEATED, params)
    assert sum(found) > 0
    assert texts.accepted > 0


def test_control_a_drawn_token_that_is_cut_because_it_is_forbidden_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model draws without the form here."""
    monkeypatch.setattr("slipstream.drafters.chains.distributions_after", lambda logits, *_: torch.softmax(logits, -1))
    params = SamplingParams(temperature=1.0, max_tokens=4, structured=FORM)
    for certain, found in ((_certain, False), (lambda draft, i: True, True)):
        monkeypatch.setattr("slipstream.core.step._certain", certain)
        (texts,) = enumerate_texts(lambda: llm_of("model", draft_tokens=2), PROMPT, params)
        assert (texts.error(Oracle(target()), PROMPT, params) > 1e-3) == found


@cache
def coupled(name: str, form: Structured) -> list[list[int]]:
    each = [SamplingParams(temperature=1.0, seed=seed, max_tokens=16, structured=form) for seed in range(60)]
    done = llm_of(name, rule="coupled", max_batch=60).generate([PROMPT] * 60, each)
    assert name == "none" or any(one.stats.accepted for one in done)
    return [one.token_ids for one in done]


@pytest.mark.parametrize(
    ("name", "form"), [*((name, FORM) for name in DRAWING), *((name, CONTINUED) for name in CONTINUING)]
)
def test_coupled_text_is_that_of_plain_constrained_decoding(name: str, form: Structured) -> None:
    assert coupled(name, form) == coupled("none", form)


@pytest.mark.parametrize("name", ["none", "model", "suffix", "eagle3", "medusa", "lookahead"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_in_a_batch_get_the_texts_that_they_get_alone(name: str, temperature: float) -> None:
    prompts = Case(target, MAKERS[name]).prompts(6)
    forms = [None, FORM, None, Structured(choice=["abab", "abad", "cadee"]), Structured(regex="[^a]+"), None]
    each = [
        SamplingParams(structured=form, temperature=temperature, seed=i, max_tokens=20, logprobs=2 if i % 2 else None)
        for i, form in enumerate(forms)
    ]
    alone = [llm_of(name).generate([p], params)[0] for p, params in zip(prompts, each, strict=True)]
    together = llm_of(name).generate(prompts, each)
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    assert [done.logprobs for done in together] == [done.logprobs for done in alone]
    assert together[3].text in ("abab", "abad", "cadee")
    assert together[3].finish_reason == "stop"


STOP = 4  # e


@pytest.fixture(params=["none", "suffix", "model"])
def llm(request: pytest.FixtureRequest) -> LLM:
    toy = ToyTarget(V, order=3, seed=21, sharpness=1.5, eos_ids=(STOP,))
    return LLM(toy, MAKERS[request.param](toy), tokenizer=letter_tokenizer(V), draft_tokens=4)


def texts(llm: LLM, form: Structured, **more: object) -> list[tuple[str, str]]:
    params = [SamplingParams(structured=form, temperature=1.0, seed=seed, **more) for seed in range(20)]  # type: ignore[arg-type]
    return [(done.text, done.finish_reason) for done in llm.generate([[0, 1, 2]] * 20, params)]


def test_eos_ends_a_text_only_where_it_has_the_form(llm: LLM) -> None:
    for text, finish in texts(llm, Structured(regex="(ab|cd)+"), max_tokens=9):
        assert finish == "length" or re.fullmatch("(ab|cd)+e", text), text
    assert any(finish == "stop" for _, finish in texts(llm, Structured(regex="(ab|cd)+"), max_tokens=9))


def test_a_complete_text_ends_also_where_eos_is_ignored_and_stop_strings_and_ids_end_one_as_usual(llm: LLM) -> None:
    form = Structured(choice=["ab", "abc", "dcb"])
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 8}):
        completions = texts(llm, form, **more)
        assert {finish for _, finish in completions} == {"stop"}
        assert {text.removesuffix("e") for text, _ in completions} <= {"ab", "abc", "dcb"}
        if more:
            assert "ab" not in {text for text, _ in completions}, "it may go on, so it does without EOS"
    assert {text for text, _ in texts(llm, Structured(regex="a[bc]*d"), stop=["b", "c", "d"])} == {"a"}
    for text, finish in texts(llm, Structured(regex="(a[bcd])+"), stop_token_ids=[3], max_tokens=12):
        assert finish == "length" or re.fullmatch("(a[bc])+[de]", text), text


def test_a_free_part_ends_where_it_says_and_the_rest_has_the_form(llm: LLM) -> None:
    ended = 0
    for text, finish in texts(llm, Structured(choice=["aab", "ddc"], after="a"), max_tokens=60):
        free, end, rest = text.partition("a")
        begun = finish == "length" and any(word.startswith(rest) for word in ("aab", "ddc"))
        assert not end or begun or rest in ("aab", "ddc")
        assert end or finish == "length" or free.endswith("e")
        ended += bool(end) and finish == "stop"
    assert ended
