"""`benchmarks.gguf`: who is compared with whom."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.gguf.__main__ import figures_of
from benchmarks.gguf.lineup import MODELS, bars, sides


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
    run = SimpleNamespace(found=quality, seconds=dict.fromkeys(whats, seconds))
    made = figures_of(run, "smollm2")  # type: ignore[arg-type]
    assert [row["text"] for row in made if "ik_llama" in row["text"]] == [
        f"{what}: slipstream Q4_1 against ik_llama.cpp Q8_0" for what in ("requests", "prompt of 512")
    ]
    assert made[0]["value"] == pytest.approx(0.5)
    quality["ik_llama.cpp Q4_K_M"] = {"perplexity": 20.5}
    assert figures_of(run, "smollm2")[0]["value"] == pytest.approx(0.1)  # type: ignore[arg-type]
