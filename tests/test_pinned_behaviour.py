"""Behaviour that users see does not change: texts, statistics, exit codes, names. `tests/pinned` holds the recording.

A difference is a bug or an intended change. After an intended change, record again: `python -m tests.pinned.record`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import LLM, Completion
from tests.pinned import cases
from tests.pinned.cases import COURSE, EDITED, EXECUTORS, GREEDY, SAMPLED, ask, course_of, invoke, pinned, text_of

TEXTS, SAMPLES, OUTCOMES, NAMES = (pinned(name) for name in ("greedy", "sampled", "commands", "names"))
RECORDING = cases.recording_of(TEXTS["greedy"]["texts"])
NO_FILES = cases.speculations(Path())
DRAFTERS = tuple(NO_FILES)
KINDS = {"greedy": GREEDY, "edited": EDITED}
THOROUGH = ("none", "model", "lookahead", "medusa", "eagle3", "eagle3, tree", "hybrid")
"""Tested on torch in every way."""


def asked(executor: str, drafter: str, way: str) -> bool:
    """Whether to test this: everything natively; on torch, which is slower, every drafter in the default way and some
    in all ways."""
    usual = way in ("greedy", "rejection")
    return executor == "native" or usual or drafter in THOROUGH


TEXTS_ASKED = [(e, name, kind) for e in EXECUTORS for name in DRAFTERS for kind in KINDS if asked(e, name, kind)]
SAMPLES_ASKED = [
    (executor, name, rule)
    for executor in EXECUTORS
    for name in DRAFTERS
    for rule in cases.rules(name)
    if asked(executor, name, rule)
]

_loaded: dict[str, LLM] = {}
_drafts: dict[str, str] = {}


def engine(executor: str) -> LLM:
    """The embedded target on one thread, loaded once."""
    if executor not in _loaded:
        _loaded[executor] = LLM("embedded", executor=executor, dtype="float32", threads=1, draft_tokens=4)
    return _loaded[executor]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.make_scratch(tmp_path_factory.mktemp("scratch"), RECORDING)


@pytest.fixture(scope="module")
def drafting(scratch: Path) -> Callable[..., LLM]:
    """The engine with a drafter and a rule. A drafter is kept until the next one is requested: creating one takes
    longer than a text."""
    known = cases.speculations(scratch)

    def engine_with(executor: str, drafter: str, rule: str = "rejection") -> LLM:
        llm = engine(executor)
        if _drafts.get(executor) != drafter:
            cases.set_up(llm, known[drafter])
            _drafts[executor] = drafter
        llm.rule = rule
        return llm

    return engine_with


def check_course(done: Completion, expected: list[Any]) -> None:
    """Compare statistics; those that are not pinned follow from others by their definitions."""
    assert course_of(done) == dict(zip(COURSE, expected, strict=True))
    said = done.stats.as_dict()
    assert {name: said[name] for name in cases.derived(done)} == cases.derived(done)
    assert sum(done.drafted) == done.stats.accepted


@pytest.mark.parametrize(("executor", "drafter", "kind"), TEXTS_ASKED)
def test_greedy_texts_and_their_statistics_are_those_that_were_pinned(drafting, executor, drafter, kind):
    """Three requests in one batch; if nothing edits the logits also each request alone."""
    expected = TEXTS[kind]
    llm, wanted = drafting(executor, drafter), KINDS[kind]
    single = [] if kind == "edited" else ["short"] if executor == "torch" else list(wanted)
    alone = ask(llm, {name: wanted[name] for name in single}, alone=True)
    for name, done in [*ask(llm, wanted).items(), *alone.items()]:
        assert text_of(done) == expected["texts"][name]
        check_course(done, expected["courses"][drafter][name])
        if name in expected["logprobs"]:
            assert [each.id for each in done.logprobs or ()] == done.token_ids
            assert [each.logprob for each in done.logprobs or ()] == pytest.approx(expected["logprobs"][name], abs=2e-3)


@pytest.mark.parametrize(("executor", "drafter", "rule"), SAMPLES_ASKED)
def test_seeded_samples_and_their_statistics_are_those_that_were_pinned(drafting, executor, drafter, rule):
    """Three requests in one batch; under the default rule, natively, also each request alone."""
    expected = SAMPLES[drafter][rule]
    wanted = {name: replace(params, seed=expected[name]["seed"]) for name, params in SAMPLED.items()}
    for alone in (False, True) if (executor, rule) == ("native", "rejection") else (False,):
        for name, done in ask(drafting(executor, drafter, rule), wanted, alone).items():
            assert done.token_ids == expected[name]["ids"]
            check_course(done, expected[name]["course"])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_threads_give_the_text_of_one(executor: str) -> None:
    llm = LLM("embedded", "embedded", executor=executor, dtype="float32", threads=2, draft_tokens=4)
    for name, done in ask(llm, {"short": GREEDY["short"]}).items():
        assert text_of(done) == TEXTS["greedy"]["texts"][name]
        check_course(done, TEXTS["greedy"]["courses"]["model"][name])
    expected = SAMPLES["model"]["rejection"]["code"]
    (done,) = ask(llm, {"code": replace(SAMPLED["code"], seed=expected["seed"])}).values()
    assert done.token_ids == expected["ids"]


@pytest.mark.parametrize("line", cases.COMMANDS)
def test_a_command_ends_as_it_was_pinned(scratch: Path, line: str) -> None:
    """The exit code, whether there is text, help or JSON, whether there is an error, and no traceback. The wording may
    change, and JSON may have further keys."""
    code, out, err = cases.run_command(line, scratch)
    assert "Traceback" not in out + err
    seen, expected = cases.kind_of(code, out, err), dict(OUTCOMES[line])
    assert set(expected.pop("keys", ())) <= set(seen.pop("keys", ()))
    assert seen == expected, err


@pytest.mark.parametrize("command", cases.SUBCOMMANDS)
def test_a_command_accepts_every_recorded_option(command: str) -> None:
    """With --help, a command parses all options and then only shows its help."""
    shown = [*command.split(), "--help"]
    options = [[name, *["1"] * count] for name, count in NAMES["options"][command].items()]
    if invoke([*shown, *(word for words in options for word in words)])[0]:
        refused = [words[0] for words in options if invoke([*shown, *words])[0]]
        pytest.fail(f"`slipstream {command}` no longer takes {', '.join(refused)}")
    assert invoke([*shown, "--an-option-that-there-is-not"])[0] == 2, "help hides what is refused"


def test_options_of_other_programs_and_every_exported_name_still_exist() -> None:
    given = [word for name in cases.ALIASES for word in (name, "1")]
    assert invoke(["generate", "--help", *given])[0] == 0
    assert set(NAMES["exports"]) <= set(slipstream.__all__)
    for name in NAMES["exports"]:
        assert set(NAMES["members"][name]) <= set(cases.members_of(name, engine("native"))), name


@pytest.mark.parametrize("path", cases.CALLABLES)
def test_parameters_keep_their_names_their_order_and_their_defaults(path: str) -> None:
    expected, seen = NAMES["parameters"][path], cases.parameters_of(path)
    assert [name for name in seen if name in expected] == list(expected)
    assert {name: seen[name] for name in expected} == expected


def test_an_error_is_caught_as_what_it_was() -> None:
    families = cases.error_families()
    assert all(set(NAMES["errors"][name]) <= set(families[name]) for name in NAMES["errors"])
