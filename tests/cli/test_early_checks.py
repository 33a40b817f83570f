"""What can be refused without a model is refused before one is loaded."""

from __future__ import annotations

import json

import pytest

from tests.checkpoints import OTHER_TEXTS, TEXTS, make_model, make_tokenizer

COMMANDS = ("bench", "tune")


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def refuse(*given, **named):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("slipstream.llm.LLM.__init__", refuse)
    monkeypatch.setattr("slipstream.models.weights.Weights.__init__", refuse)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--drafter", "ngram:max_ngrams=2"], "did you mean 'max_ngram'?"),
        (["--drafter", "suffix", "-o", "max_depth=-3"], "max_depth is -3"),
    ],
)
def test_an_option_that_the_drafter_does_not_take(cli, pair, texts, command, given, said):
    result = cli(command, texts, *pair, *given)
    assert result.code == 2
    assert said in result.said


@pytest.mark.parametrize("drafter", ["ngram", "suffix,model", "model", "hybrid"])
def test_an_option_that_generate_does_not_have(cli, pair, drafter):
    result = cli("generate", "x", *pair, "--drafter", drafter, "-o", "max_ngrams=2")
    assert result.code == 2
    assert "max_ngrams" in result.said


def test_options_that_exist_pass_the_check(cli, pair, texts):
    for drafter in ("ngram:max_ngram=2", "model", "hybrid:append_tokens=2", "hybrid"):
        with pytest.raises(AssertionError, match="a model is loaded"):
            raise_what(cli, "bench", texts, *pair, "--drafter", drafter)


def raise_what(cli, *arguments):
    """Runs the command; the fault of the loader is an unexpected error of the command line."""
    result = cli(*arguments)
    assert result.code == 1, result.err
    raise AssertionError(result.said)


@pytest.mark.parametrize("command", [*COMMANDS, "trace", "generate"])
def test_unequal_vocabularies(cli, pair, texts, tmp_path, command):
    make_model(tmp_path / "other", num_hidden_layers=1)
    make_tokenizer(tmp_path / "other", texts=OTHER_TEXTS)
    for drafter in ("model", "suffix,model") if command == "generate" else ("model",):
        given = [] if command == "trace" else [texts]
        result = cli(command, *given, *pair[:2], "-md", tmp_path / "other", "--drafter", drafter)
        assert result.code == 2
        assert "do not share a vocabulary" in result.said


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Repositories are folders of `tmp_path`; weights are never asked for."""

    def download(name, allow_patterns, **more):
        assert not any("safetensors" in pattern and "index" not in pattern for pattern in allow_patterns)
        folder = tmp_path / name
        if not folder.is_dir():
            raise OSError(f"no repository {name}")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for name, texts in (("org/target", TEXTS), ("org/same", TEXTS), ("org/other", OTHER_TEXTS)):
        make_model(tmp_path / name, num_hidden_layers=1)
        make_tokenizer(tmp_path / name, texts=texts)
        (tmp_path / name / "model.safetensors").unlink()
    return tmp_path


@pytest.mark.parametrize("command", [*COMMANDS, "generate", "chat", "trace", "verify"])
def test_unequal_vocabularies_on_the_hub_are_found_without_weights(cli, hub, texts, command):
    given = {"generate": ["x"], "chat": [], "trace": [], "verify": []}.get(command, [texts])
    result = cli(command, *given, "-m", "org/target", "-md", "org/other", "--drafter", "model")
    assert result.code == 2
    assert "do not share a vocabulary" in result.said
    with pytest.raises(AssertionError, match="a model is loaded"):
        raise_what(cli, command, *given, "-m", "org/target", "-md", "org/same", "--drafter", "model")


def test_a_folder_and_a_repository_are_compared_too(cli, hub, pair):
    for given in (["-m", pair[1], "-md", "org/other"], ["-m", "org/other", "-md", pair[3]]):
        assert "do not share a vocabulary" in cli("generate", "x", *given).said


def test_a_repository_that_does_not_exist_is_named(cli, hub):
    result = cli("generate", "x", "-m", "org/target", "-md", "org/nothing")
    assert result.code == 2
    assert "the hub did not provide 'org/nothing'" in result.said


@pytest.mark.parametrize(
    "config", [{"medusa_num_heads": 2}, {"model_type": "llama"}, {"architectures": ["LlamaForCausalLMEagle3"]}]
)
def test_what_may_be_a_head_on_the_hub_is_not_compared(cli, hub, config):
    (hub / "org" / "head").mkdir()
    (hub / "org" / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="a model is loaded"):
        raise_what(cli, "generate", "x", "-m", "org/target", "-md", "org/head")
    result = cli("generate", "x", "-m", "org/target", "-md", "org/head", "-o", "branches=2")
    assert result.code == (1 if "model_type" in config else 2)  # options of a head that is recognised are checked


@pytest.mark.parametrize("command", [*COMMANDS, "trace", "generate", "verify"])
@pytest.mark.parametrize("drafter", ["ngram", "ngram+suffix", "medusa"])
def test_the_quantisation_of_a_draft_model_that_nobody_loads(cli, pair, texts, command, drafter):
    given = {"generate": ["x"], "trace": [], "verify": []}.get(command, [texts])
    named = drafter if given == [texts] or command == "trace" else drafter.replace("+", ",")
    result = cli(command, *given, *pair[:2], "--drafter", named, "--draft-quantize", "int8")
    assert result.code == 2
    assert "--draft-quantize is 'int8', but the drafter" in result.said
    assert "no draft model" in result.said


@pytest.mark.parametrize("drafters", [["model"], ["ngram", "model"], ["hybrid"]])
def test_the_quantisation_of_a_draft_model_that_one_of_the_drafters_loads(cli, pair, texts, drafters):
    named = [word for drafter in drafters for word in ("--drafter", drafter)]
    with pytest.raises(AssertionError, match="a model is loaded"):
        raise_what(cli, "bench", texts, *pair, *named, "--draft-quantize", "int8")
