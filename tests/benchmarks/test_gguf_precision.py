"""`benchmarks.gguf.precision`: formats of a GGUF file beside each other."""

import json
from typing import Any

import pytest

from benchmarks.gguf import precision
from benchmarks.gguf.precision import KINDS, compared, held_out, main, perplexity, table
from slipstream.llm import LLM


def result(kind: str, factor: float) -> dict[str, Any]:
    """Losses of two texts a set, times `factor`."""
    losses = {"code": [[20.0 * factor, 10], [30.0 * factor, 40]], "edit": [[5.0 * factor, 5], [6.0 * factor, 3]]}
    speed = {"tokens_per_second": {"median": 100.0}, "speedup": {"value": 1.2, "low": 1.1, "high": 1.3}}
    return {
        "kind": kind, "stored": {"Q4_K": 3_000_000, "F32": 1_000_000}, "losses": losses, "plain": speed, "draft": speed,
        "acceptance_rate": 0.5, "perplexity": {name: perplexity(of) for name, of in losses.items()},
    }  # fmt: skip


def test_every_token_counts_alike() -> None:
    assert perplexity([[20.0, 10], [30.0, 40]]) == pytest.approx(2.718281828)


def test_the_loss_is_compared_text_by_text() -> None:
    results = {"rows": [result("f16", 1.0), result("q4_k_m", 1.01)], "provenance": {"processor_time": False}}
    assert compared(results) == (
        "Q4_K_M (75% Q4_K, 25% F32 of the bytes): the negative log-likelihood of the 4 texts is 1.0100 times that of "
        "F16 (1.0100 to 1.0100)."
    )
    assert "| Q4_K_M | 4.0 | 100 | 1.20x (1.10-1.30) | 100 | 1.20x (1.10-1.30) | 50% | 2.746 | 4.010 |" in table(
        results
    )


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
