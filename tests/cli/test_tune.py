"""`slipstream tune`, and the file that it writes."""

from __future__ import annotations

import json

from slipstream.cli.tune import TuneModels
from tests.models.gguf_files import family_config, gguf_model

QUICK = ["-n", "8", "--rounds", "1", "--confirm", "1"]


def test_the_choice_is_shown_and_written_and_read_again(cli, pair, texts, tmp_path):
    out, page, choice = (tmp_path / name for name in ("r.json", "r.html", "choice.json"))
    given = ["--drafter", "model", "--drafter", "ngram", "-k", "3", "--out", out, "--write", choice]
    result = cli("tune", texts, *pair, *QUICK, *given)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    for part in ("Measured at the longest draft", "Measured against plain decoding", "Choice: ", "vllm: ",
                 "sglang: ", "llama-server: ", "transformers: ", "What limits the speed-up",
                 "plain step", "rows per pass 1 2 4 8 16 32 64"):  # fmt: skip
        assert part in said
    data = json.loads(out.read_text())["data"]
    written = json.loads(choice.read_text())
    assert written == data["configs"]["slipstream"]
    assert (written["executor"], written["dtype"]) == ("torch", "float64")
    assert written["drafter"] == ("none" if data["choice"] is None else data["choice"]["drafter"])
    assert cli("report", out, "-o", page).code == 0
    assert "Which drafter and draft length?" in page.read_text()
    again = cli("generate", "for x in", "--config", choice, "-n", "4", "--json")
    assert again.code == 0, again.err
    plain = cli("generate", "for x in", *pair, "--drafter", "none", "-n", "4", "--json")
    assert json.loads(again.out)["text"] == json.loads(plain.out)["text"]


def test_what_is_tried_by_default():
    assert [(c.label, c.draft_tokens) for c in TuneModels().longest()] == [
        ("model", 8), ("ngram", 10), ("suffix", 10), ("model quantize=int8", 8), ("model quantize=int4", 8)
    ]  # fmt: skip
    assert [c.label for c in TuneModels(target="elsewhere").longest()] == ["ngram", "suffix"]
    assert [c.draft_tokens for c in TuneModels(draft_tokens=3).longest()] == [3] * 5
    assert [c.label for c in TuneModels(drafter=["suffix"]).longest()] == ["suffix"]


def test_formats_of_the_draft_are_tried_that_our_kernels_run(tiny, tmp_path):
    def tried(**options):
        return [c.options["quantize"] for c in TuneModels(**options).longest() if "quantize" in c.options]

    assert tried() == ["int8", "int4"]
    assert tried(quantize="int8") == ["none", "int4"]
    assert tried(draft_quantize="int8") == tried(drafter=["model"]) == tried(executor="torch") == []
    file, _ = gguf_model(tmp_path, family_config("llama"), ("Q8_0",))
    assert tried(target=str(tiny.target), draft=str(file)) == []  # its weights are quantised


def test_a_choice_in_another_format_is_read_again(cli, texts, tmp_path):
    choice = tmp_path / "choice.json"
    given = ["--drafter", "model:quantize=int4", "-k", "2", "--write", choice, "--json"]
    result = cli("tune", texts, *QUICK, *given)
    assert result.code == 0, result.err
    assert json.loads(result.out)["data"]["drafters"][0]["label"] == "model quantize=int4"
    choice.write_text(json.dumps({"drafter": "model", "draft_tokens": 2, "drafter_option": ["quantize=int4"]}))
    assert cli("generate", "def add", "--config", choice, "-n", "4").code == 0


# --- generate --config ---------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_file(cli, pair, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"drafter": "ngram", "draft_tokens": 3, "drafter_option": "max_ngram=2", "seed": 1}))
    result = cli("generate", "for x in", *pair, "--config", path, "-n", "3")
    assert "ngram drafter, 3 draft tokens" in result.said
    result = cli("generate", "for x in", *pair, "--config", path, "-n", "3", "-k", "2")
    assert "ngram drafter, 2 draft tokens" in result.said


def test_bad_input_is_refused_in_one_message(cli):
    result = cli("tune", "--concurrency", "1")
    assert (result.code, result.out, result.said.count("error: ")) == (2, "", 1)
    assert "concurrency is given without a server. Fix: start one: --engine vllm" in result.said
