"""The side-by-side table: its rows, its text, and the command that creates it, without any other engine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contenders import CONTENDERS, WORKERS, WorkerKind, loads
from benchmarks.peers import __main__ as command
from benchmarks.peers.lineup import MODES, OURS, SYSTEMS, alternating, lineup, matches
from benchmarks.peers.table import assemble, markdown, plot, verdict
from benchmarks.prompts import Prompt
from benchmarks.session import Session
from slipstream.measure.plots import draw_svg

LINEUP = lineup(5, 10)
PROMPTS = {"both": [Prompt([1]), Prompt([2], 64, "edit"), Prompt([3])]}
SECONDS = {
    "plain": 0.5, "draft": 0.25, "suffix": 0.1, "int8": 0.3, "transformers": 1.0, "llamacpp": 0.4, "llamacpp_q8": 0.2,
    "vllm": 0.5, "llamacpp_f16": 0.45, "llamacpp_q4": 0.3,
}  # fmt: skip
LABELS = {key: who.label for key, who in LINEUP.items() if key in {*SECONDS, "genai", "llamacpp_draft"}}
PROVENANCE = {
    "date": "2026-01-01", "commit": "abc", "command": "python -m benchmarks.peers", "threads": 2, "dtype": "float32",
    "machine": {"cpu": "X", "cores": 2}, "versions": {"slipstream": {"torch": "2"}}, "neighbours": 0.01,
}  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    session = Session("t", "d", contenders=LINEUP)
    for key, seconds in SECONDS.items():
        session.cells[key] = [[seconds] * 3] * 3
        session.chosen[key] = LINEUP[key].draft_tokens
        session.outputs[key] = [[5, 6], [7, 8], [9]]
    for key in ("vllm", "int8", "transformers"):
        session.outputs[key] = [[5, 6], [7, 9], [9]]
    session.unstable["suffix"] = {0}
    session.notes["llamacpp_q8"] = "stored as 100% Q8_0"
    session.skip(["genai"], "genai is not installed: run `make peer-genai`")
    session.skip(["llamacpp_draft"], "it died:\nRuntimeError: no memory\n")
    table = assemble(session, PROMPTS, PROVENANCE)
    for row in table["contenders"]:  # as `Session.margins` would have it from transformers
        for each in (row["text"] or {}).get("divergences", []):
            each["margin"] = {"vllm": 1e-5, "transformers": 0.25}.get(row["key"], 1.0)
    return json.loads(json.dumps(table))


def rows(results) -> dict[str, str]:
    return {line.split("|")[1].strip(): line for line in markdown(results, LABELS).splitlines() if line[:1] == "|"}


def test_every_contender_of_both_tables_can_be_loaded_and_nothing_else_is_named():
    everybody = [*CONTENDERS.values(), *LINEUP.values()]
    assert {(who.worker, who.model) for who in everybody} == loads("t", "d").keys()
    assert {who.worker for who in everybody} == WORKERS.keys() == SYSTEMS.keys()


def test_every_worker_can_be_made_by_a_make_target():
    text = (Path(command.ROOT) / "benchmarks" / "make.mk").read_text()
    targets = set(re.findall(r"^(peer-\w+|vllm):", text, re.MULTILINE))
    assert targets == {kind.make for kind in WORKERS.values() if kind.make}
    everything = re.search(r"^peers: (.*)$", text, re.MULTILINE)
    assert set(everything[1].split()) == targets


def test_each_chooses_its_own_draft_length_unless_one_is_given():
    free, half = lineup(), lineup(None, 10)
    for mode, lengths in (("draft model", (2, 3, 4, 5, 6)), ("lookup", (4, 6, 8, 12, 16)), ("plain", ())):
        assert {who.lengths for who in free.values() if who.mode == mode} == {lengths}
        given = {"draft model": 5, "lookup": 10, "plain": 0}[mode]
        assert {who.draft_tokens for who in LINEUP.values() if who.mode == mode} == {given}
    assert (half["draft"].lengths, half["suffix"].lengths, half["suffix"].draft_tokens) == ((2, 3, 4, 5, 6), (), 10)


def test_every_contender_has_a_class_and_a_mode():
    assert {(key, who.mode) for key, who in LINEUP.items()} == {(key, m) for m, keys in MODES.items() for key in keys}
    bits = {key: who.bits for key, who in LINEUP.items()}
    assert {bits[key] for key in ("llamacpp", "llamacpp_f16_draft", "genai_fp16", "genai_fp16_fast_lookup")} == {16}
    assert {bits[key] for key in ("int8", "int8_suffix", "llamacpp_q8_lookup", "genai_int8_fast_draft")} == {8}


def test_matches_stay_within_a_class_and_mode_and_code_and_edits_take_turns():
    pairs = matches(LINEUP)
    for match in pairs:
        rival = LINEUP[match.theirs]
        assert (match.bits, match.mode) == (rival.bits, rival.mode)
        if match.ours:
            slipstream = LINEUP[match.ours]
            assert (slipstream.worker, slipstream.bits, slipstream.mode) == ("slipstream", rival.bits, rival.mode)
    assert {match.theirs for match in pairs} == {key for key, who in LINEUP.items() if who.worker != "slipstream"}
    assert [match.theirs for match in pairs if match.ours is None] == ["llamacpp_q4"]
    assert {match.ours for match in pairs} == {*OURS.values(), None}
    sets = {"code": [Prompt([1]), Prompt([2]), Prompt([3])], "edit": [Prompt([4]), Prompt([5])]}
    assert [p.ids for p in alternating(sets)["both"]] == [[1], [4], [2], [5], [3]]


def test_a_missing_peer_has_a_row_with_the_reason_and_a_measured_one_its_notes(results):
    table = rows(results)
    assert "not measured: genai is not installed: run `make peer-genai`" in table["OpenVINO GenAI fp32, plain"]
    assert "not measured: RuntimeError: no memory" in table["llama.cpp F32, draft model"]
    assert table.keys() >= set(LABELS.values())
    assert "vLLM, n-gram" not in table  # nobody asked for it
    assert "- llama.cpp Q8_0, plain: stored as 100% Q8_0" in markdown(results, LABELS)
    drawing = draw_svg(plot(results))
    assert all(LABELS[key] in drawing for key in SECONDS)


def test_where_slipstream_is_slower_is_stated_first_and_a_class_that_it_lacks_is_named(results):
    text = markdown(results, LABELS)
    lines = [line for line in text.splitlines() if line.startswith("| 16 bits | plain |")]
    assert any("llama.cpp F32, plain: 320 / 160" in line and "0.80x" in line and "**slower**" in line for line in lines)
    assert any("transformers, plain" in line and "2.00x" in line and "faster" in line for line in lines)
    assert any("vLLM" in line and "no difference shown" in line for line in lines)
    table = text.split("\n\n")[1].splitlines()
    said = [line.split("|")[-2].strip() for line in table[2:]]
    order = ["**slower**", "no difference shown", "faster", "Slipstream has none", "not measured"]
    assert [order.index(each) for each in said] == sorted(order.index(each) for each in said)
    assert {"**slower**", "not measured"} <= set(said)
    assert "| 4 bits | plain | - | llama.cpp Q4_K_M, plain: 427 / 213 |  | Slipstream has none |" in table


def test_the_table_takes_the_fastest_setting_and_says_how_prompts_were_chosen(results):
    best = {(row["bits"], row["mode"], row["system"]): row["theirs"] for row in results["best"]}
    assert len(best) == len(results["best"])
    assert best[16, "plain", "llama.cpp"] == "llamacpp"  # 0.4 s; F16 has 0.45 s here
    assert best[8, "plain", "llama.cpp"] == "llamacpp_q8"
    assert any(row["theirs"] == "llamacpp_f16" for row in results["matches"])
    assert "not chosen by whether their outputs loop. In this run 0 of 3 outputs" in markdown(results, LABELS)
    counts = {"code": {"kept": 4, "examined": 17}}
    results["provenance"]["choice"] = {"criterion": "no tail", "examined": counts, "sha256": "1f"}
    assert "Prompts: no tail (code: 4 of 17 qualify). choice.json has the digest 1f." in markdown(results, LABELS)


def test_different_texts_are_classified_by_the_logit_gap_at_the_first_difference(results):
    rows = {row["key"]: row for row in results["contenders"]}
    assert {key: verdict(rows[key]) for key in ("plain", "draft", "suffix", "vllm", "int8", "transformers")} == {
        "plain": "the reference", "draft": "identical", "suffix": "identical; not stable over rounds",
        "vllm": "1 of 3 differ, at near-ties (gap up to 1e-05)", "int8": "1 of 3 differ: other weights or arithmetic",
        "transformers": "**1 of 3 differ, at a gap of 0.25**",
    }  # fmt: skip
    del rows["vllm"]["text"]["divergences"][0]["margin"]
    assert verdict(rows["vllm"]) == "1 of 3 differ, gaps unknown"


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """The command with a fake worker for all engines, except OpenVINO GenAI, which is missing."""
    fake, absent = WorkerKind("tests.benchmarks.fake_peer"), WorkerKind("", Path("/nowhere"), "peer-genai")
    kinds = {name: absent if name == "genai" else fake for name in WORKERS}
    monkeypatch.setattr(command, "WORKERS", kinds)
    monkeypatch.setattr(Session, "margins", lambda self, ours, prompts, divergences: None)
    return lambda *words: command.main(["--out", str(tmp_path), "--prompts", "1", "--tokens", "3", *words])


def test_the_command_writes_table_plot_and_document(faked, tmp_path, capsys):
    only = ("draft", "transformers", "vllm_ngram", "genai")
    assert faked("--rounds", "2", "--lookup-tokens", "10", "--only", *only) == 0
    document = json.loads((tmp_path / "peers.json").read_text())
    assert [row["key"] for row in document["contenders"]] == ["plain", "draft", "transformers", "vllm_ngram"]
    assert document["skipped"] == {"genai": "genai is not installed: run `make peer-genai`"}
    assert document["provenance"]["command"].endswith("genai")
    assert set(document["provenance"]["versions"]["slipstream"]) >= {"python"}
    assert (tmp_path / "peers.svg").read_text().count("vLLM, n-gram") >= 1
    assert (tmp_path / "peers.md").read_text() in capsys.readouterr().out
    rows = {row["key"]: row for row in document["contenders"]}
    fast = rows["vllm_ngram"]
    assert (rows["draft"]["draft_tokens"], len(rows["draft"]["tuning_seconds_per_token"])) == (6, 5)  # the longest
    assert document["provenance"]["choice"] is None
    assert fast["over_plain"]["value"] == pytest.approx(11.0)  # the fake is 1 + draft length times as fast


def test_an_output_folder_that_cannot_be_created_is_refused_first(faked, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        command.main(["--out", str(tmp_path / "file" / "folder")])
    assert not (tmp_path / "peers.json").exists()
