"""What can be refused without a model is refused before one is loaded."""

import json
import shlex

import pytest

from tests.tiny_checkpoints import OTHER_TEXTS, TEXTS, make_model, make_tokenizer

MEASURING = ("bench {texts}", "tune {texts}")
LOADING = (*MEASURING, "trace", "generate x", "verify")
NO_VOCABULARY = "do not share a vocabulary"

REFUSED = [
    *((f"{each} {{pair}} --drafter ngram:max_ngrams=2", "did you mean 'max_ngram'?") for each in MEASURING),
    *((f"{each} {{pair}} --drafter suffix -o max_depth=-3", "max_depth is -3") for each in MEASURING),
    *(
        (f"generate x {{pair}} --drafter {name} -o max_ngrams=2", "max_ngrams")
        for name in ("ngram", "suffix,model", "model", "hybrid")
    ),
    *((f"{each} -m {{target}} -md {{other}} --drafter model", NO_VOCABULARY) for each in LOADING),
    ("generate x -m {target} -md {other} --drafter suffix,model", NO_VOCABULARY),
    # of models on the hub, too
    *((f"{each} -m org/target -md org/other --drafter model", NO_VOCABULARY) for each in (*LOADING, "chat")),
    ("generate x -m {target} -md org/other", NO_VOCABULARY),
    ("generate x -m org/other -md {draft}", NO_VOCABULARY),
    ("generate x -m org/target -md org/nothing", "the hub did not provide 'org/nothing'"),
    ("generate x -m smolm2 -md {draft}", "write 'smollm2' if you mean that model"),
    *(
        (f"{each} -m {{target}} --drafter {name} --draft-quantize int8", f"--draft-quantize is 'int8', but the {what}")
        for each in LOADING
        for name, what in (("ngram", "drafter 'ngram' loads no draft model"), ("medusa", "drafter 'medusa' loads no"))
    ),
    ("bench {texts} -m {target} --drafter ngram+suffix --draft-quantize int8", "loads no draft model"),
    ("generate x -m {target} --drafter ngram,suffix --draft-quantize int8", "loads no draft model"),
]
"""Command lines, and what is said."""

PASSING = [
    *(
        f"bench {{texts}} {{pair}} --drafter {name}"
        for name in ("ngram:max_ngram=2", "model", "hybrid:append_tokens=2", "hybrid")
    ),
    *(f"{each} -m org/target -md org/same --drafter model" for each in (*LOADING, "chat")),
    *(
        f"bench {{texts}} -m {{target}} -md {{draft}} {named} --draft-quantize int8"
        for named in ("--drafter model", "--drafter ngram --drafter model", "--drafter hybrid")
    ),
]
"""Command lines that load a model."""


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def refuse(*given, **named):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("slipstream.llm.LLM.__init__", refuse)
    monkeypatch.setattr("slipstream.checkpoints.weights.Weights.__init__", refuse)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    for name, texts in (("org/target", TEXTS), ("org/same", TEXTS), ("org/other", OTHER_TEXTS)):
        make_model(folder / name, num_hidden_layers=1)
        make_tokenizer(folder / name, texts=texts)
        (folder / name / "model.safetensors").unlink()
    return folder


@pytest.fixture
def hub(monkeypatch, repositories):
    """The folder of the repositories; weights are never asked for."""

    def download(name, allow_patterns, **more):
        assert not any("safetensors" in pattern and "index" not in pattern for pattern in allow_patterns)
        if not (repositories / name).is_dir():
            raise OSError(f"no repository {name}")
        return str(repositories / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return repositories


@pytest.fixture
def run(cli, hub, pair, texts, tiny):
    """A command line, with {pair} for the options of the tiny pair, {other} for a folder with another vocabulary."""
    places = {"pair": shlex.join(map(str, pair)), "texts": texts, "target": tiny.target, "draft": tiny.draft}
    return lambda line, **how: cli(*shlex.split(line.format(**places, other=hub / "org" / "other")), **how)


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_what_is_wrong_is_refused_without_a_model(run, line, said):
    assert said in run(line, code=2).said


@pytest.mark.parametrize("line", PASSING)
def test_what_is_right_is_loaded(run, line):
    assert "a model is loaded" in run(line, code=1).said


@pytest.mark.parametrize(
    "config", [{"medusa_num_heads": 2}, {"model_type": "llama"}, {"architectures": ["LlamaForCausalLMEagle3"]}]
)
def test_what_may_be_a_head_on_the_hub_is_not_compared(run, hub, config):
    head = f"org/{next(iter(config))}"
    (hub / head).mkdir()
    (hub / head / "config.json").write_text(json.dumps(config))
    assert "a model is loaded" in run(f"generate x -m org/target -md {head}").said
    code = 1 if "model_type" in config else 2  # options of a head that is recognised are checked
    run(f"generate x -m org/target -md {head} -o branches=2", code=code)
