"""`benchmarks.gguf.shapes`: files of random weights of published shapes, and what is said of their speed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gguf import shapes, slipstream_worker
from benchmarks.gguf.random_models import FIRST, MIXTURE, SHAPES, Shape, kind_of, write_random_model
from benchmarks.gguf.shapes_report import figures_of
from slipstream import LLM, SamplingParams
from slipstream.checkpoints.config import DecoderConfig

SMALL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "full_attn_idxs": [1, 3],
}  # fmt: skip


def smaller(shape: Shape) -> Shape:
    """The same family with all its parts, and few weights."""
    return replace(shape, config={**shape.config, **{key: SMALL[key] for key in SMALL if key in shape.config}})


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_a_published_shape_is_that_model_and_its_text_counts_up(name: str, tmp_path: Path) -> None:
    shape, file = smaller(SHAPES[name]), tmp_path / "model.gguf"
    write_random_model(shape, file)
    read = DecoderConfig.load(file)
    assert read.shapes() == shape.decoder.shapes()
    assert [layer.recurrence is None for layer in read.described] == [
        layer.recurrence is None for layer in shape.decoder.described
    ]
    output = LLM(file, threads=1).generate([[FIRST + 9, FIRST + 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert output.token_ids == [FIRST + 4, FIRST + 5, FIRST + 6, FIRST + 7]


def test_blocks_are_those_of_llamacpp_where_rows_do_not_divide() -> None:
    assert kind_of("blk.3.ffn_up.weight", (512, 1152), 26, MIXTURE) == "Q5_0"
    assert kind_of("token_embd.weight", (512, 1152), 26, MIXTURE) == "Q8_0"
    assert kind_of("blk.3.ffn_up.weight", (512, 1024), 26, MIXTURE) == "Q4_K"
    assert kind_of("blk.0.ffn_down_exps.weight", (8, 512, 768), 26, MIXTURE) == "Q6_K"
    assert kind_of("blk.0.shortconv.in_proj.weight", (512, 1024), 26, MIXTURE) == "Q4_K"


class WithinThisProcess:
    """A worker without a process of its own."""

    def call(self, op: str, **given: Any) -> dict[str, Any]:
        given |= {"gigabytes": 0.01} if op == "bandwidth" else {}
        reply: dict[str, Any] = getattr(slipstream_worker, op)(**given)
        return reply

    def close(self) -> None:
        slipstream_worker.models.clear()


def test_slipstream_alone_is_measured_and_kept_by_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "started", lambda who: WithinThisProcess())
    words = ["--models", "tiny", "--only", "slipstream", "--rounds", "1", "--tokens", "8", "--files", str(tmp_path)]
    words += ["--out", str(tmp_path)]
    assert shapes.main(words) == 0
    results = (tmp_path / "shapes.json").read_text()
    assert json.loads(results)["models"]["tiny"]["seconds"]["decoding"].keys() == {"slipstream"}
    table = (tmp_path / "shapes.md").read_text()
    assert "| tiny | 2 | slipstream | 0.00 |" in table
    assert capsys.readouterr().out.strip() == table.strip()
    assert shapes.main(words) == 0
    assert (tmp_path / "shapes.json").read_text() == results


def measured(**more: Any) -> dict[str, Any]:
    decoding = {"slipstream": [0.01] * 3, "ik_llama.cpp": [0.012] * 3, "llama.cpp": [0.02] * 3}
    times = {"decoding": decoding, "prompt of 512": {"slipstream": [0.01] * 3, "llama.cpp": [0.0125] * 3}}
    sizes = {form: {"always": 4e7, "token": size, "expert": 1e6} for form, size in (("file", 9e7), ("packed", 1e8))}
    return {"seconds": times, "sizes": sizes, "bandwidth": 2e10, "copies": {}, **more}


def test_the_better_rival_counts() -> None:
    rows = figures_of({"Gemma-3-1B": measured()})
    assert [(row["text"], round(row["value"], 3), row["reached"]) for row in rows] == [
        ("Gemma-3-1B, decoding: speed over ik_llama.cpp", 1.2, True),
        ("Gemma-3-1B, prompt of 512: speed over llama.cpp", 1.25, True),
        ("Gemma-3-1B: share of the read bandwidth, decoding", 0.5, False),
    ]


def test_a_pass_of_several_rows_is_held_against_the_bytes_that_it_reads() -> None:
    passes = {"1": {"milliseconds": 10.0, "bytes": 1e8}, "4": {"milliseconds": 33.0, "bytes": 3e8}}
    row = figures_of({"gpt-oss-20b": measured(passes=passes)})[-1]
    assert row["value"] == pytest.approx(1.1)
    assert "(3.00x)" in row["text"]


def test_copies_are_held_against_the_fastest_drafter_of_the_rival() -> None:
    seconds = {
        "llama.cpp plain": 0.001, "llama.cpp ngram-mod": 0.02, "llama.cpp ngram-simple": 0.01,
        "slipstream prompt": 0.008, "slipstream prediction": 0.005,
    }  # fmt: skip
    copies = {who: {"seconds": [each], "right": True} for who, each in seconds.items()}
    row = figures_of({"LFM2-1.2B": measured(copies=copies)})[-1]
    assert row["text"] == "LFM2-1.2B, copies: speed over llama.cpp ngram-simple"
    assert (row["value"], row["reached"]) == (pytest.approx(2.0), True)


def test_a_model_that_only_we_run_has_no_figure_against_rivals() -> None:
    alone = measured()
    alone["seconds"] = {what: {"slipstream": times["slipstream"]} for what, times in alone["seconds"].items()}
    assert figures_of({"SmolLM3-3B": alone}) == []
