"""Options: names, aliases, what is refused before anything is loaded."""

import shlex
import textwrap

import pytest

from slipstream.cli import options
from slipstream.cli.loading import check_arguments
from slipstream.cli.main import canonical, main, parser
from slipstream.cli.options import ModelOptions, SamplingOptions, parse_options
from slipstream.core.declaration import declared
from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError


def test_defaults_are_those_of_the_library():
    assert SamplingOptions().params() == SamplingParams()


SAMPLING = {
    "temperature": (["--temperature"], 0.0), "top_k": (["--top-k"], 0), "top_p": (["--top-p"], 1.0),
    "min_p": (["--min-p"], 0.0), "repetition_penalty": (["--repetition-penalty"], None),
    "frequency_penalty": (["--frequency-penalty"], 0.0), "presence_penalty": (["--presence-penalty"], 0.0),
    "min_tokens": (["--min-new-tokens"], 0), "max_tokens": (["--max-new-tokens", "-n"], 128),
    "stop": (["--stop"], None), "ignore_eos": (["--ignore-eos"], False), "seed": (["--seed"], None),
    "logprobs": (["--logprobs"], None),
}  # fmt: skip


@pytest.mark.parametrize("command", ["generate", "chat", "verify", "trace", "tune"])
def test_sampling_options_keep_their_names_and_defaults(command):
    known = parser().commands[command].params
    sampling = [p for p in known if getattr(p, "rich_help_panel", None) == "Sampling"]
    assert all(not p.default for p in sampling), "who gave none is known: the checkpoint may say it"
    shown = {name: (names, str(default)) for name, (names, default) in SAMPLING.items()}
    if command == "chat":
        shown["max_tokens"] = (["--max-new-tokens", "-n"], "as many as fit into the context")
    defaults = (p.show_default if isinstance(p.show_default, str) else str(p.default) for p in sampling)
    declared_options = {p.name: (p.opts, shown) for p, shown in zip(sampling, defaults, strict=True)}
    assert declared_options == shown
    assert not any(p.secondary_opts for p in known)


def test_sampling_parameters_without_an_option_are_the_structured_ones():
    assert set(declared(SamplingParams)) - set(SAMPLING) == {
        "logit_bias", "bad_words", "structured", "stop_token_ids", "draft_tokens",
    }  # fmt: skip


def test_the_defaults_of_models_and_drafters():
    assert (ModelOptions().draft_model, ModelOptions().method, ModelOptions().fixed_length) == ("embedded", "model", 4)
    models = ModelOptions(target="somewhere")
    assert (models.draft_model, models.method, models.fixed_length) == (None, "suffix", 10)
    assert ModelOptions(target="somewhere", draft="d", draft_tokens="2").length == 2
    assert ModelOptions(target="smollm2").names == ("suffix", "eagle3")  # a head ships for it
    assert [ModelOptions(drafter=name).method for name in ("none", "suffix,eagle3")] == ["none", "suffix,eagle3"]
    assert ModelOptions(drafter="ngram", draft_tokens="0").length == 0


def test_the_draft_length_is_chosen_in_each_step_unless_a_number_is_given():
    assert ModelOptions().length == "auto"
    assert (ModelOptions().fixed_length, ModelOptions(drafter="ngram").fixed_length) == (4, 10)
    assert (ModelOptions(draft_tokens="3").length, ModelOptions(draft_tokens="3").fixed_length) == (3, 3)
    with pytest.raises(ParameterError, match="needs a fixed draft length"):
        ModelOptions(draft_tokens="auto").fixed_length  # noqa: B018
    for wrong in ("-1", "many", "2.5", "257"):
        with pytest.raises(ParameterError, match="draft_tokens is"):
            ModelOptions(draft_tokens=wrong)


def test_options_of_other_programs_are_understood():
    given = ["generate", "--model-draft", "d", "--num-speculative-tokens=3", "--max-tokens", "5", "--", "--model"]
    known = ["generate", "--draft", "d", "--draft-tokens=3", "--max-new-tokens", "5", "--", "--model"]
    assert canonical(given) == known
    assert all(new.startswith("--") and new not in options.ALIASES for new in options.ALIASES.values())


def list_commands():
    top = parser().commands
    return [([name], each) for name, each in top.items() if name != "train"] + [
        (["train", name], each) for name, each in top["train"].commands.items()
    ]


@pytest.mark.parametrize(("names", "command"), list_commands(), ids=lambda each: str(each)[:20])
def test_help_ends_with_an_example_that_the_command_takes(names, command):
    words = shlex.split(command.epilog)
    assert words[: 2 + len(names)] == ["Example:", "slipstream", *names]
    assert parser().main([*words[2:], "--help"], standalone_mode=False) == 0


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "verify"])
def test_help_shows_the_options_of_loading_last(command):
    panels = [getattr(p, "rich_help_panel", None) for p in parser().commands[command].params]
    assert panels[-1] == "Loading"
    assert panels.index("Loading") == len(panels) - panels.count("Loading")


@pytest.mark.parametrize("arguments", [[], ["train"]])
def test_without_a_command_there_is_help_and_no_error(cli, arguments):
    result = cli(*arguments)
    assert "Usage: slipstream" in result.out
    assert "error" not in result.err


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "verify", "demo", "trace", "tune"])
def test_every_command_that_loads_a_target_has_the_options_of_models(command):
    known = {p.opts[0] for p in parser().commands[command].params}
    assert {"--device-map", "--trust-remote-code"} <= known


def test_the_map_is_for_the_target_and_code_is_never_trusted_for_a_draft():
    *_, given = check_arguments(ModelOptions(device_map="auto", trust_remote_code=True))
    assert (given["device_map"], given["trust_remote_code"]) == ("auto", True)
    assert not any(name.startswith("draft") and ("map" in name or "remote" in name) for name in given)


def test_drafter_options():
    assert parse_options(["max-ngram=3", "row_cost=0.5", "x=y"]) == {"max_ngram": 3, "row_cost": 0.5, "x": "y"}
    assert parse_options(["across=false", "sampled=True"]) == {"across": False, "sampled": True}
    with pytest.raises(ParameterError, match="NAME=VALUE"):
        parse_options(["=3"])


def test_a_bug_is_reported_as_such_and_shows_its_traceback_with_debug_only(cli, monkeypatch, capfd):
    monkeypatch.setattr("slipstream.targets.describe.describe", lambda model: 1 / 0)
    said = cli("info", "x", code=1).said
    assert "ZeroDivisionError" in said
    assert "--debug" in said
    with pytest.raises(SystemExit):
        main(["--debug", "info", "x"])
    assert "Traceback" in capfd.readouterr().err


COMMANDS = {(name,): made for name, made in parser().commands.items()}
COMMANDS |= {("train", name): made for name, made in COMMANDS["train",].commands.items()}


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_text_of_help_is_wrapped_once(cli, monkeypatch, command, columns):
    """A line ends where the terminal does, not where the docstring had an end of line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = [line.strip() for line in cli(*command, "--help").out.splitlines()]
    for paragraph in COMMANDS[command].help.split("\n\n"):
        lines = textwrap.wrap(paragraph, columns - 2, break_on_hyphens=False)
        assert shown[shown.index(lines[0]) :][: len(lines)] == lines


@pytest.mark.parametrize("command", ["generate", "bench", "tune", "trace"])
def test_options_are_named_in_full_at_80_columns(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(command, "--help").out
    for parameter in parser().commands[command].params:
        assert parameter.opts[0].lstrip("-") in shown
