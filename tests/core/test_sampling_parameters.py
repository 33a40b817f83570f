"""Each sampling parameter: its declaration is correct, and in a mixed batch each request gets the same result as alone.

A batch is warped at once where the keys of its requests are equal. A parameter missing in the key would silently be
taken from the first request of the batch, so everything here runs over the fields of `SamplingParams` themselves.
"""

import importlib.util
import random
import re
import sys
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from slipstream.cli.option_groups import expand_groups
from slipstream.cli.options import sampling_options
from slipstream.core import params as params_module
from slipstream.core.declaration import Effect, declared
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.warp import distributions, distributions_after, warp
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from tests.core.changed_parameters import CHANGED, visible
from tests.core.letter_tokenizer import constraint_of, letter_tokenizer
from tests.drafters.fakes import MultiStepToy
from tests.targets.toy import ToyTarget

V, EOS = 12, 11
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [7, 8, 9, 0, 6, 2]]
TEMPERATURES = [0.0, 0.8]

NAMES = [f.name for f in fields(SamplingParams)]


def pair(name: str, temperature: float) -> tuple[SamplingParams, SamplingParams]:
    """Two requests that differ in `name` alone."""
    assert name in CHANGED, f"give {name} a value in CHANGED"
    base = SamplingParams(temperature=temperature, seed=7, max_tokens=24)
    return base, replace(base, **{name: CHANGED[name]})


def test_every_parameter_has_a_value_to_test_it_with() -> None:
    assert list(CHANGED) == NAMES
    base = SamplingParams()
    assert all(getattr(replace(base, **{name: CHANGED[name]}), name) != getattr(base, name) for name in NAMES)


@cache
def engine(drafter: str) -> LLM:
    target = ToyTarget(V, order=2, seed=11, sharpness=1.5, eos_ids=(EOS,))
    small = {"vocab": V, "order": 2, "seed": 11, "sharpness": 1.2}  # the same tokens are likely, other probabilities
    engines = {
        "none": NoDrafter,
        "model": lambda: ModelDrafter(ToyTarget(**small), V),
        "model, one call": lambda: ModelDrafter(MultiStepToy(**small), V),
    }
    return LLM(target, engines[drafter](), draft_tokens=4, tokenizer=letter_tokenizer(V))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("drafter", ["none", "model", "model, one call"])
def test_requests_that_differ_in_one_parameter_decode_together_as_alone(drafter, temperature, name) -> None:
    each = pair(name, temperature)
    told_apart = 0
    for prompt in PROMPTS:
        alone = [visible(engine(drafter).generate([prompt], params)[0]) for params in each]
        for order in ((0, 1), (1, 0)):
            together = engine(drafter).generate([prompt, prompt], [each[i] for i in order])
            assert [visible(completion) for completion in together] == [alone[i] for i in order]
        told_apart += alone[0] != alone[1]
    if temperature and (name != "draft_tokens" or drafter != "none"):
        assert told_apart, f"{name} has no effect here: the test would not notice that it was ignored"


DRAFTS = ([3, 1, 6], [5, 2, 2])


def sequences(each: Seq[SamplingParams]) -> list[Sequence]:
    stops = frozenset({EOS, 0})
    seqs = [Sequence(PROMPT, params, stop_ids=stops, constraint=constraint_of(params, V, stops)) for params in each]
    for seq in seqs:
        seq.tokens += [5, 6, 1]
    return seqs


def logits(rows: int) -> torch.Tensor:
    return 2 * torch.randn(rows, V, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_mixed_batch_is_warped_bit_for_bit_as_each_request_alone(temperature, name) -> None:
    for each in (pair(name, temperature), pair(name, temperature)[::-1]):
        x = logits(8)
        probs = distributions(x, sequences(each), Draft.chains(DRAFTS))
        alone = [
            distributions(x[4 * b : 4 * b + 4], [seq], Draft.chains([DRAFTS[b]]))
            for b, seq in enumerate(sequences(each))
        ]
        assert torch.equal(probs, torch.cat(alone))
        probs = distributions_after(x[:2], sequences(each), DRAFTS)
        alone = [distributions_after(x[b : b + 1], [seq], [DRAFTS[b]]) for b, seq in enumerate(sequences(each))]
        assert torch.equal(probs, torch.cat(alone))


R = 12
PROMPT = [1, 2, 3, 1]
OUTPUTS = [random.Random(r).choices(range(V), k=r) for r in range(R)]
OTHER_OUTPUTS = [random.Random(r).choices(range(V), k=r + 10) for r in range(R)]


def warped(params: SamplingParams, outputs: Seq[Seq[int]] = OUTPUTS) -> torch.Tensor:
    """float64 [R, V]: each row follows an output of its own."""
    stops = frozenset({EOS, 0, 3})
    constraint = constraint_of(params, V, stops)
    return warp(logits(R), params, PROMPT, outputs, stops, constraint and constraint.find_allowed([], outputs))


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_key_holds_a_parameter_exactly_if_the_distribution_depends_on_it(name) -> None:
    one, other = pair(name, 0.8)
    assert (one.distribution_key != other.distribution_key) == (not torch.equal(warped(one), warped(other)))
    hash(other.distribution_key)


@pytest.mark.parametrize("name", NAMES)
def test_needs_history_tells_whether_earlier_tokens_change_the_distribution(name) -> None:
    params = pair(name, 0.8)[1]
    changes = not torch.equal(warped(params), warped(params, OTHER_OUTPUTS))
    assert params.needs_history == replace(params, temperature=0.0).needs_history == changes
    if not changes:
        assert torch.equal(warp(logits(R), params), warped(params))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_argmax_only_tells_whether_the_argmax_of_the_raw_logits_is_taken(temperature, name) -> None:
    params = pair(name, temperature)[1]
    argmax = torch.zeros(R, V, dtype=torch.float64).scatter_(1, logits(R).argmax(-1, keepdim=True), 1.0)
    assert params.argmax_only == torch.equal(warped(params), argmax)


@pytest.mark.parametrize("name", NAMES)
def test_temperature_only_tells_whether_the_distribution_is_a_softmax_of_the_raw_logits(name) -> None:
    params = pair(name, 0.8)[1]
    assert params.temperature_only == torch.equal(warped(params), torch.softmax(logits(R) / params.temperature, -1))
    greedy = replace(params, temperature=0.0)
    assert greedy.temperature_only == greedy.argmax_only


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_unfiltered_is_the_softmax_of_the_edited_logits(temperature, name) -> None:
    params = pair(name, temperature)[1]
    assert params.edits_logits == (declared(SamplingParams)[name].effect in (Effect.EDITS_LOGITS, Effect.NEEDS_HISTORY))
    bare = torch.softmax(logits(R), -1)
    assert torch.equal(warped(params.unfiltered), bare) == (not params.edits_logits)
    if params.edits_logits:
        assert torch.equal(warped(params.unfiltered), warped(replace(params, temperature=1.0)))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_described_in_the_docstring(name) -> None:
    assert re.search(rf"^    {name}  +\w", SamplingParams.__doc__ or "", re.MULTILINE)


def with_a_field(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`core/params.py` imported again, with one line more at the end of the fields."""
    source = Path(params_module.__file__).read_text(encoding="utf-8")
    before, after = source.split("    def _uses", 1)
    file = folder / "params_with_a_field.py"
    file.write_text(f"{before}    {line}\n\n    def _uses{after}", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_one_declared_field_reaches_the_check_the_batch_key_and_the_command_line(tmp_path, monkeypatch) -> None:
    how = '0.0, number(0, 1), Effect.FILTERS_PROBABILITIES, "Top-a filter.", "--top-a", "-a"'
    line = f"top_a: float = parameter({how})"
    more = with_a_field(line, tmp_path, monkeypatch).SamplingParams
    with pytest.raises(ParameterError, match=r"top_a is 2, but must be a finite number in \[0, 1\]"):
        more(top_a=2)
    assert more(temperature=0.8).temperature_only
    assert not more(temperature=0.8, top_a=0.2).temperature_only
    assert more(top_a=0.2).argmax_only
    assert more(top_a=0.2).distribution_key != more().distribution_key
    assert more(top_a=0.2).unfiltered.top_a == 0.0
    options, made = sampling_options(more), []

    def command(sampling: Any) -> None:
        made.append(sampling.params())

    command.__annotations__["sampling"] = options
    app = typer.Typer(add_completion=False)
    app.command()(expand_groups(command))
    app(["-a", "0.25", "--temperature", "0.8"], standalone_mode=False)
    app([], standalone_mode=False)
    assert made == [more(temperature=0.8, top_a=0.25), more()]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("top_a: float = 0.0", r"SamplingParams\.top_a has no effect"),
        ("top_a: float = parameter(0.0, number(0, 1))", "effect"),
        ("top_a: float = parameter(0.0, number(0, 1), Effect.FILTERS_PROBABILITIES)", "help"),
    ],
)
def test_a_field_without_an_effect_or_help_fails_at_import(line, fault, tmp_path, monkeypatch) -> None:
    with pytest.raises(TypeError, match=fault):
        with_a_field(line, tmp_path, monkeypatch)
