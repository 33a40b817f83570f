"""What can be refused without a model is refused before one is loaded."""

from __future__ import annotations

import pytest

from tests.checkpoints import OTHER_TEXTS, make_model, make_tokenizer

COMMANDS = ("bench", "tune", "doctor", "sweep")


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def refuse(*given, **named):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("slipstream.llm.LLM.__init__", refuse)
    monkeypatch.setattr("slipstream.models.weights.Weights", refuse, raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_prompt_file(cli, pair, command):
    result = cli(command, "nowhere.jsonl", *pair)
    assert result.code == 2
    assert "there is no prompt file 'nowhere.jsonl'" in result.said


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_the_drafter_does_not_have(cli, pair, texts, command):
    result = cli(command, texts, *pair, "--drafter", "ngram:max_ngrams=2")
    assert result.code == 2
    assert "did you mean 'max_ngram'?" in result.said


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_out_of_range(cli, pair, texts, command):
    result = cli(command, texts, *pair, "--drafter", "suffix", "-o", "max_depth=-3")
    assert result.code == 2
    assert "max_depth is -3" in result.said


@pytest.mark.parametrize("drafter", ["ngram", "suffix,model", "model", "bandit"])
def test_an_option_that_generate_does_not_have(cli, pair, drafter):
    result = cli("generate", "x", *pair, "--drafter", drafter, "-o", "max_ngrams=2")
    assert result.code == 2
    assert "max_ngrams" in result.said


def test_options_that_exist_pass_the_check(cli, pair, texts):
    for drafter in ("ngram:max_ngram=2", "model:confidence=0.3", "hybrid:beyond=2", "bandit"):
        with pytest.raises(AssertionError, match="a model is loaded"):
            raise_what(cli, "bench", texts, *pair, "--drafter", drafter)


def raise_what(cli, *arguments):
    """Runs the command; the fault of the loader is an unexpected error of the command line."""
    result = cli(*arguments)
    assert result.code == 1, result.err
    raise AssertionError(result.said)


@pytest.mark.parametrize("command", [*COMMANDS, "trace"])
def test_unequal_vocabularies(cli, pair, texts, tmp_path, command):
    make_model(tmp_path / "other", num_hidden_layers=1)
    make_tokenizer(tmp_path / "other", texts=OTHER_TEXTS)
    given = [] if command == "trace" else [texts]
    result = cli(command, *given, *pair[:2], "-md", tmp_path / "other", "--drafter", "model")
    assert result.code == 2
    assert "do not share a vocabulary" in result.said


def test_unequal_vocabularies_in_generate(cli, pair, tmp_path):
    make_model(tmp_path / "other", num_hidden_layers=1)
    make_tokenizer(tmp_path / "other", texts=OTHER_TEXTS)
    for drafter in ("model", "suffix,model"):
        result = cli("generate", "x", *pair[:2], "-md", tmp_path / "other", "--drafter", drafter)
        assert result.code == 2
        assert "do not share a vocabulary" in result.said


def test_an_unknown_prompt_number_and_category(cli, texts):
    assert "number is 999, but there are" in cli("trace", "--number", "999").said
    assert "there are" in cli("trace", "--kind", "edit", "--number", "999").said
    assert "has no category 'x'" in cli("bench", texts, "--category", "x").said
