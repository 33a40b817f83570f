"""A model and texts of one's own: each method of `slipstream train`, and its result in `generate` and in the server."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import LLM
from slipstream.cli.main import main
from slipstream.training.methods import METHODS
from tests.tiny_checkpoints import make_model, make_tokenizer

pytest.importorskip("uvicorn")

SMALL = {
    "medusa": ["--heads", 2], "eagle3": ["--steps", 2], "dflash": ["--block", 4, "--layers", 1],
    "draft": ["--hidden-size", 32, "--layers", 1, "--heads", 2, "--intermediate", 32], "layerskip": ["--exit", 1],
}  # fmt: skip
PROMPT = "for name in names:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with a tokenizer of its own, and a folder of texts."""
    path = tmp_path_factory.mktemp("model")
    make_model(path / "model", tie_word_embeddings=False)
    make_tokenizer(path / "model")
    (path / "texts").mkdir()
    for i in range(12):
        text = "".join(f"for name{j} in names{i}:\n    print(name{j})\n" for j in range(12))
        (path / "texts" / f"{i}.txt").write_text(text)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Runs a command; returns its standard output and standard error."""

    def command(*words: object) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        shown = capsys.readouterr()
        assert left.value.code == 0, shown.err
        return shown.out, shown.err

    return command


@pytest.mark.parametrize("kind", METHODS)
def test_what_is_trained_for_ones_own_model_drafts_as_the_last_line_says(kind, folder, run, tmp_path):
    from tests.server.hosting import hosted

    shown, noise = run(
        "train", kind, "-m", folder / "model", "--data", folder / "texts", "--out", tmp_path / "run", "--length", 32,
        "--rows", 4, "--budget-tokens", 4 * 128, "--texts", 2, "--text-tokens", 8, "--threads", 1, *SMALL[kind],
    )  # fmt: skip
    assert "warning" not in re.sub("warning: compiling .*", "", noise).lower()
    command = re.search(r"slipstream generate (.*) 'PROMPT'", shown)
    use = shlex.split(command[1])
    plain, _ = run("generate", "-m", use[1], "--drafter", "none", "-n", 12, PROMPT)
    drafted, statistics = run("generate", *use, "-k", 3, "-n", 12, PROMPT)
    assert drafted == plain
    assert "acceptance rate" in statistics
    llm = LLM(use[1], draft=use[3], draft_tokens=3, max_batch=2)
    with hosted(llm) as host:
        answer = host.post("/v1/completions", model="embedded", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == plain.removesuffix("\n")
