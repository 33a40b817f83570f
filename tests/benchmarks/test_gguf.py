"""`benchmarks.gguf`: who is compared with whom, on which texts, in which kinds; formats of a file beside each other."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gguf import family_logits, kinds, precision
from benchmarks.gguf.__main__ import arguments, figures_of, texts_of
from benchmarks.gguf.lineup import MODELS, bars, sides
from benchmarks.gguf.precision import KINDS, compared, held_out, main, perplexity, table
from benchmarks.protocol import ContenderError
from slipstream import zoo
from slipstream.checkpoints.gguf_header import FILE_TYPES
from slipstream.checkpoints.weight_blocks import FLOATS, READERS
from slipstream.llm import LLM


@pytest.mark.parametrize("model", MODELS)
def test_every_bar_is_between_contenders(model: str) -> None:
    known = sides(model)
    for bar in bars(model):
        assert {bar.top, *bar.bottoms} <= set(known)


def test_a_contender_of_a_much_higher_perplexity_does_not_count() -> None:
    names = [name for bar in bars("smollm2") for name in (bar.top, *bar.bottoms)]
    whats = {bar.what for bar in bars("smollm2")}
    seconds = {name: [[1.0, 1.1], [1.0, 1.1]] for name in names}
    seconds["ik_llama.cpp Q4_K_M"] = [[0.1, 0.11], [0.1, 0.11]]
    seconds["ik_llama.cpp Q8_0"] = [[0.5, 0.55], [0.5, 0.55]]
    quality = {name: {"perplexity": 20.0} for name in names} | {"ik_llama.cpp Q4_K_M": {"perplexity": 134.0}}
    run = SimpleNamespace(facts=quality, seconds=dict.fromkeys(whats, seconds))
    rows = figures_of(run, "smollm2")  # type: ignore[arg-type]
    assert [row["text"] for row in rows if "ik_llama" in row["text"]] == [
        f"{what}: slipstream Q4_1 against ik_llama.cpp Q8_0" for what in ("requests", "prompt of 512")
    ]
    assert rows[0]["value"] == pytest.approx(0.5)
    quality["ik_llama.cpp Q4_K_M"] = {"perplexity": 20.5}
    assert figures_of(run, "smollm2")[0]["value"] == pytest.approx(0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("each", [1, 2])
def test_so_many_prompts_of_each_kind_are_taken(each: int) -> None:
    requests, _ = texts_of(arguments(["--model", "510M", "--each", str(each)]))
    assert [name.split()[0] for name in requests] == [k for k in ("varied", "edit", "code") for _ in range(each)]


def test_every_kind_of_weights_that_our_kernels_run_is_compared() -> None:
    assert set(kinds.KINDS) == {*READERS, *FLOATS} - {"F32"}
    assert all(FILE_TYPES[number].startswith(kind) for kind, number in kinds.KINDS.items())


def test_a_small_target_is_compared_in_every_kind(tmp_path, monkeypatch, capsys):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    monkeypatch.setattr(kinds, "larger", lambda files: zoo.target_dir())
    text = tmp_path / "text.txt"
    text.write_text("\n".join(entry["prompt"] for entry in zoo.prompts("code")[:4]))
    options = f"--text {text} --model 79M --scored 200 --files {tmp_path} --only F16 Q8_0"
    assert kinds.main(options.split()) in (0, 1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows[2:4]] == ["F16", "Q8_0"]
    assert all(float(row[4].split()[0]) == pytest.approx(1, abs=kinds.APART) for row in rows[2:4])
    assert len(rows) == 2 + 2 + 2 + 3


def result(kind: str, factor: float) -> dict[str, Any]:
    """Losses of two texts a set, times `factor`."""
    losses = {"code": [[20.0 * factor, 10], [30.0 * factor, 40]], "edit": [[5.0 * factor, 5], [6.0 * factor, 3]]}
    speed = {"tokens_per_second": {"median": 100.0}, "speedup": {"value": 1.2, "low": 1.1, "high": 1.3}}
    return {
        "kind": kind, "stored": {"Q4_K": 3_000_000, "F32": 1_000_000}, "losses": losses, "plain": speed, "draft": speed,
        "acceptance_rate": 0.5, "perplexity": {name: perplexity(of) for name, of in losses.items()},
    }  # fmt: skip


def test_the_loss_is_compared_text_by_text_and_every_token_counts_alike() -> None:
    assert perplexity([[20.0, 10], [30.0, 40]]) == pytest.approx(2.718281828)
    results = {"rows": [result("f16", 1.0), result("q4_k_m", 1.01)], "provenance": {"processor_time": False}}
    assert compared(results) == (
        "Q4_K_M (75% Q4_K, 25% F32 of the bytes): the negative log-likelihood of the 4 texts is 1.0100 times that of "
        "F16 (1.0100 to 1.0100)."
    )
    assert "| Q4_K_M | 4.0 | 100 | 1.20x (1.10-1.30) | 100 | 1.20x (1.10-1.30) | 50% | 2.746 | 4.010 " in table(results)


def test_a_run_has_every_format(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")

    def two_texts(llm: LLM) -> dict[str, list[precision.Text]]:
        return {name: texts[:2] for name, texts in held_out(llm).items()}

    monkeypatch.setattr(precision, "held_out", two_texts)
    assert main(["--prompts", "1", "--tokens", "4", "--rounds", "1", "--processor-time", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in output["rows"]] == list(KINDS)
    for row in output["rows"]:
        assert 1.5 < row["perplexity"]["code"] < 40
        assert 1.0 < row["perplexity"]["edit"] < 3
        assert 0 < row["acceptance_rate"] <= 1
    sizes = [sum(row["stored"].values()) for row in output["rows"]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_family_at_which_llamacpp_stops_is_a_row_and_the_next_family_follows(tmp_path, monkeypatch):
    class Worker:
        def __init__(self, *_, **__):
            self.close = lambda: None

        def call(self, op, **_):
            raise ContenderError(f"llama.cpp died during {op!r}:\n/a/folder/ops.cpp:7: GGML_ASSERT(x) failed\n")

    monkeypatch.setattr(family_logits, "Worker", Worker)
    (tmp_path / "version.json").write_text('"1"')
    families = ["llama", "gpt2"]
    assert family_logits.main(["--only", *families, "--build", str(tmp_path), "--out", str(tmp_path)]) == 1
    stops = "ops.cpp:7: GGML_ASSERT(x) failed"
    rows = json.loads((tmp_path / "family-logits.json").read_text())["rows"]
    assert rows == [{"family": family, "stops": stops} for family in families]
    assert f"- gpt2: llama.cpp stops: {stops}.\n" in (tmp_path / "family-logits.md").read_text()
