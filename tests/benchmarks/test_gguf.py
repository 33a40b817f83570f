"""`benchmarks.gguf`: who is compared with whom, on which texts, in which kinds."""

from types import SimpleNamespace

import pytest

from benchmarks.gguf import kinds
from benchmarks.gguf.__main__ import arguments, figures_of, texts_of
from benchmarks.gguf.lineup import MODELS, bars, sides
from slipstream import zoo
from slipstream.models.gguf_header import FILE_TYPES
from slipstream.models.weight_blocks import FLOATS, READERS


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
    options = f"--text {text} --model 79M --scored 600 --files {tmp_path} --only F16 Q8_0"
    assert kinds.main(options.split()) in (0, 1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows[2:4]] == ["F16", "Q8_0"]
    assert all(float(row[4].split()[0]) == pytest.approx(1, abs=kinds.APART) for row in rows[2:4])
    assert len(rows) == 2 + 2 + 2 + 3
