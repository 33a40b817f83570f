"""The comparison of the CPU backends: line-up, verdicts, tables and checkpoints, without a worker of a backend."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.backend import models
from benchmarks.backend.lineup import CONTENDERS, FIGURES, GROUPS, PROMPT, Figure, FirstUse, Group, chosen
from benchmarks.backend.report import assemble, judge, judge_first_use, markdown
from benchmarks.backend.session import Place, Session, hide, places, reason_of
from benchmarks.protocol import ROOT, ContenderError

PROVENANCE = {
    "date": "2026-01-01T00:00:00+00:00", "command": "python -m benchmarks.backend", "commit": "abc", "before": "def",
    "machine": {"cpu": "X", "cores": 2, "vector": ["avx2"]}, "threads": 2, "versions": {"now": {"torch": "2"}},
    "neighbours": 0.01,
}  # fmt: skip
SERIES = {
    "14M": {
        "before_openvino_int8": {"1": [2.0, 2.2, 2.1], "8": [4.0, 4.0, 4.0]},
        "native_w8a16": {"1": [1.0, 1.1, 1.05], "8": [3.9, 3.9, 3.9]},
    }
}
LOGITS = {"14M": {"before_openvino_int8": [1.0, -1.0], "native_w8a16": [1.0, -0.9]}}
SKIPPED = {"14M native_w8a8": "ParameterError: quantize is 'w8a8'"}
USES = {"now": [{"cached": False, "seconds": s} for s in (20.0, 24.0)] + [{"cached": True, "seconds": 0.6}]}


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(json.dumps(assemble(SERIES, LOGITS, SKIPPED, USES, {}, PROVENANCE)))


def test_every_figure_compares_passes_that_both_sides_run():
    for figure in FIGURES:
        for name in (figure.top, figure.bottom):
            assert figure.rows in GROUPS[figure.group].passes[name]
    assert all(name in CONTENDERS for group in GROUPS.values() for name in group.passes)
    assert all(group.model in models.MODELS for group in GROUPS.values())


def test_options_choose_groups_contenders_and_passes():
    groups = chosen(["1B"], ["native", "native_w8a8"], [8], prompt=True)
    assert groups["1B"].passes == {"native_w8a8": (8,), "native": (8, PROMPT)}
    assert chosen(["gpt2"], ["native"], [4, 8], prompt=False)["gpt2"].passes == {"native": (8, 4)}
    assert chosen(["gpt2"], ["llamacpp_f16"], [8], prompt=False) == {}


def test_a_ratio_is_compared_with_its_bound():
    row = judge(Figure("14M", "native_w8a16", "before_openvino_int8", 1, 0.8), SERIES, {})
    assert (row["verdict"], row["value"]) == ("reached", pytest.approx(0.5))
    assert row["low"] <= row["value"] <= row["high"]
    assert judge(Figure("14M", "native_w8a16", "before_openvino_int8", 8, 0.9), SERIES, {})["verdict"] == "missed"
    assert judge(Figure("14M", "native_w8a8", "native_w8a16", 8, 0.9), SERIES, SKIPPED)["verdict"] == "not measured"


def test_first_uses_are_compared_by_their_median():
    assert judge_first_use(FirstUse(False, 25.0), USES["now"], None)["value"] == 22.0
    assert judge_first_use(FirstUse(True, 0.5), USES["now"], None)["verdict"] == "missed"
    assert judge_first_use(FirstUse(True, 0.5), [], "no Numba")["reason"] == "no Numba"


def test_the_table_begins_with_missed_bounds_and_is_complete(results):
    text = markdown(results)
    verdicts = [line.split("|")[-2].strip().strip("*") for line in text.splitlines() if " | at most " in line]
    assert len(verdicts) == len(FIGURES) + 2
    assert verdicts == sorted(verdicts, key=["missed", "not measured", "reached"].index)
    assert "0.97x (0.97x to 0.97x) | **missed**" in text
    assert "native, w8a8: not available, see below" in text
    assert "ParameterError: quantize is 'w8a8'" in text
    assert "| 1 row | native, w8a16 | 1.05e+03 (1.02e+03 to 1.08e+03) | 0.50 (0.50 to 0.50) | 7.1 % |" in text


def test_a_report_of_a_run_in_which_nothing_could_be_measured():
    text = markdown(assemble({}, {}, {"first_use now": "no Numba"}, {"now": []}, {}, PROVENANCE))
    assert "no Numba | not measured" in text
    assert "no rounds" in text


def test_workers_that_cannot_be_started_are_reported_with_the_reason(tmp_path):
    assert "--before" in str(places(None)["before"].missing)
    with pytest.raises(ContenderError, match="no environment"):
        places(tmp_path)["before"].start("x")
    session = Session(places(None), lambda model, worker: tmp_path)
    session.measure("14M", Group("14M", "14M", {"before_native": (1,)}), 0.0)
    assert session.skipped == {"14M before_native": "no earlier checkout was given: use --before FOLDER"}
    assert session.series == {"14M": {}}


def test_contenders_are_timed_in_interleaved_rounds_and_one_that_fails_is_left_out(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "from benchmarks.protocol import serve\n"
        "me = {}\n"
        "def load(path, past, most, **options):\n"
        "    me.update(options)\n"
        "    return {'logits': [1.0]}\n"
        "def forwards(rows, past, most, repeats, warmups, limit):\n"
        "    if me.get('quantize') and rows == 8:\n"
        "        raise ValueError('no such kernel')\n"
        "    return {'seconds': [0.5 * rows] * repeats}\n"
        "serve({'load': load, 'forwards': forwards, 'info': lambda: {'versions': {}}})\n"
    )
    said: list[str] = []
    session = Session({"now": Place(worker, Path(sys.executable), ROOT)}, lambda *_: tmp_path, said.append)
    session.measure("g", Group("G", "14M", dict.fromkeys(("native", "native_w8a8", "native_one_thread"), (1, 8))), 0.0)
    assert session.series["g"] == {name: {"1": [0.5] * 3, "8": [4.0] * 3} for name in ("native", "native_one_thread")}
    assert session.skipped == {"g native_w8a8": "ValueError: no such kernel"}
    rounds = [s for s in said if ", round " in s]
    assert rounds[0] == "G, round 1: native, float32, 1 row"
    assert rounds[4] == "G, round 2: native, float32, threads=1, 1 row"


def test_reasons_are_the_exception_and_name_no_folder():
    report = "it failed:\nTraceback:\n  File x\nslipstream.errors.LoadError: /home/me/x is gone\n  fix: look\n"
    assert reason_of(report) == "slipstream.errors.LoadError: /home/me/x is gone"
    assert reason_of("") == "it gave no reason"
    assert hide("/home/me/x is gone", [Path("/home"), Path("/home/me")]) == ".../x is gone"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_random_checkpoints_load_and_are_written_once(tmp_path, kind):
    from slipstream.targets.decoder import Decoder

    small = {
        "llama": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32,
                  "vocab_size": 40, "max_position_embeddings": 64},
        "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 40, "n_positions": 64},
    }[kind]  # fmt: skip
    path = models.write(models.Model("small", kind, small), tmp_path / "small")
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert models.write(models.Model("small", kind, small), path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    wide = models.widened(path, tmp_path / "wide")
    narrow_weights, wide_weights = (
        Decoder.load(each, executor="torch", dtype=torch.float32).weights for each in (path, wide)
    )
    assert narrow_weights.keys() == wide_weights.keys()
    assert all(torch.equal(narrow_weights[name], wide_weights[name]) for name in narrow_weights)
    with safe_open(wide / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118
