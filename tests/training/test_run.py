"""A run of any objective: it learns, is reproducible, resumes after an interruption, and exports what decoding
loads."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from benchmarks.gguf.gguf_writer import convert_to_gguf
from slipstream import LLM, SamplingParams, zoo
from slipstream.checkpoints.config import DecoderConfig
from slipstream.errors import ParameterError, TrainingError
from slipstream.heads.eagle_format import load_eagle
from slipstream.targets.decoder import Decoder
from slipstream.tokens.text import load_tokenizer
from slipstream.training import features, loop, resume_state, run_report
from slipstream.training.eagle3_objective import choose_layers
from slipstream.training.methods import DFlashOptions, DraftOptions, EagleOptions, LayerSkipOptions, MedusaOptions
from slipstream.training.run import TrainingRun, prepare
from slipstream.training.trainable import make_llama, save_model
from slipstream.zoo import head_dir, target_dir
from tests.tiny_checkpoints import make_family
from tests.training.tiny_runs import logged, quiet, run_config, write_data

OPTIONS: dict[str, Any] = {
    "medusa": MedusaOptions(heads=2),
    "eagle3": EagleOptions(steps=2, draft_vocab=40, intermediate=32),
    "dflash": DFlashOptions(block=3, anchors=64),
    "draft": DraftOptions(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate=32, depth=2),
    "layerskip": LayerSkipOptions(exit=1, depth=2),
}


def small(kind: str, target: Path, data: Path, out: Path, **more: Any) -> Any:
    """Few texts and few steps, for tests that do not depend on the head's quality."""
    few = {"budget_tokens": 8 * 256, "texts": 2, "text_tokens": 6, "temperatures": (0.0,)}
    return run_config(kind, OPTIONS[kind], target, data, out, **few | more)


@pytest.fixture
def prepared(tiny_target: Path, tiny_data: Path, tmp_path: Path) -> Callable[..., TrainingRun]:
    """A run of such a configuration, in a folder of this name."""
    return lambda kind, out="", **more: prepare(small(kind, tiny_target, tiny_data, tmp_path / out, **more), quiet)


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    return load_file(run.loop.config.checkpoint)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kind", OPTIONS)
def test_same_seed_same_weights_and_a_resumed_run_equals_an_uninterrupted_one(kind, prepared):
    def trained(out: str, **loop: Any) -> dict[str, torch.Tensor]:
        more = {"optimiser": "muon" if kind in ("eagle3", "dflash") else "adamw", "micro_rows": 4} | loop
        run = prepared(kind, out, **more)
        run.loop.run()
        return weights(run)

    whole = trained("whole")
    assert same(whole, trained("again"))
    trained("parts", max_steps=3)
    assert same(whole, trained("parts", resume=True))
    assert not same(whole, trained("other", seed=1))


def test_an_EAGLE_head_is_trained_on_and_keeps_its_shape_and_vocabulary(prepared, tmp_path, monkeypatch):
    run = prepared("eagle3", "first")
    run.loop.run()
    head = tmp_path / "exported"
    run.loop.objective.export(head, None, {})
    monkeypatch.setitem(OPTIONS, "eagle3", EagleOptions(steps=2, start=str(head)))
    longer = prepared("eagle3", "longer", seed=3).loop.objective.module
    exported = load_eagle(head).state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in longer.state_dict().items())
    assert longer.config.draft_vocab == 40
    for options, refused in (
        ({"layers": 2, "taps": (1,)}, "--start does not work with --layers, --taps"),
        ({"start": str(head_dir("eagle3", target_dir()))}, "training for this target cannot start from the head"),
    ):
        monkeypatch.setitem(OPTIONS, "eagle3", EagleOptions(**{"steps": 2, "start": str(head)} | options))
        with pytest.raises(ParameterError, match=refused):
            prepared("eagle3", "refused")


LONG = {"medusa": {"heads": 7}, "eagle3": {"steps": 7}, "dflash": {"block": 8}, "draft": {"depth": 7}}


@pytest.mark.parametrize("kind", LONG)
def test_windows_that_are_too_short_for_the_draft_are_refused(kind, prepared, monkeypatch):
    monkeypatch.setitem(OPTIONS, kind, replace(OPTIONS[kind], **LONG[kind]))
    with pytest.raises(ParameterError, match="a window of 8 tokens is too short for 7 draft tokens"):
        prepared(kind, length=8)
    assert prepared(kind, length=9).loop.step()[0]["loss"] > 0


def test_the_log_stays_whole_json_on_a_full_disk_and_of_a_run_that_diverged(prepared, tmp_path, monkeypatch, capsys):
    loop = prepared("medusa").loop
    loop.log({"train": float("nan"), "heldout": {"loss": float("inf"), "tau@0": 1.5}})
    original = Path.open

    class Full(io.FileIO):
        def write(self, line: Any) -> int:
            return super().write(line[:5])

    monkeypatch.setattr(Path, "open", lambda path, mode, **more: Full(path, mode.replace("b", "")))
    loop.log({"step": 2})
    monkeypatch.setattr(Path, "open", original)
    loop.log({"step": 3})
    first, last = logged(tmp_path)
    assert (first["train"], first["heldout"]) == (None, {"loss": None, "tau@0": 1.5})
    assert last["step"] == 3
    assert "could not be written" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_disk_keeps_the_old_checkpoint_and_the_run_continues(fault, prepared, tmp_path, monkeypatch, capsys):
    run = prepared("medusa", save_minutes=1e-9)
    original, saves = resume_state.save_file, []

    def save_file(tensors: Any, path: Path, **more: Any) -> None:
        saves.append(run.loop.progress.step)
        if run.loop.progress.step > 3:
            path.write_bytes(b"half of it")
            raise fault
        original(tensors, path, **more)

    monkeypatch.setattr(resume_state, "save_file", save_file)
    with pytest.raises(TrainingError, match=r"could not be written.*The previous checkpoint is kept"):
        run.loop.run()
    assert saves[-1] == 8, "the run went on to its end"
    assert "step 4: the checkpoint" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.undo()
    again = prepared("medusa", save_minutes=1e-9, resume=True)
    assert again.loop.progress.step == 3, "at most the steps since the last checkpoint are lost"


def test_a_run_is_not_overwritten_nor_resumed_as_another(tiny_target: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = small("medusa", tiny_target, tiny_data, tmp_path)
    prepare(config, say=quiet).loop.run()
    with pytest.raises(TrainingError, match="contains a training run already"):
        prepare(config, say=quiet)
    resumed = replace(config, resume=True)
    for other, message in (
        (replace(resumed, length=16), "length was 32, and is now 16"),
        (replace(resumed, kind="eagle3", options=OPTIONS["eagle3"]), "objective was 'medusa', and is now 'eagle3'"),
        (replace(resumed, options=MedusaOptions(heads=3)), r"options was .*'heads': 2"),
        (replace(resumed, out=tmp_path / "nowhere"), "no checkpoint"),
    ):
        with pytest.raises(TrainingError, match=message):
            prepare(other, say=quiet)
    state = resume_state.read_state(config.checkpoint)
    state["progress"] |= {"decay_from": None, "decay_span": None}
    save_file({"x": torch.zeros(1)}, config.checkpoint, metadata={"state": json.dumps(state)})
    with pytest.raises(TrainingError, match="written by another version of Slipstream"):
        prepare(resumed, say=quiet)
    config.checkpoint.write_bytes(b"no safetensors")
    with pytest.raises(TrainingError, match="is not a checkpoint"):
        prepare(resumed, say=quiet)


def test_a_run_continues_in_another_folder_with_its_data_elsewhere(tiny_target, tiny_data, tmp_path):
    """What was typed as a path does not count, only what it holds."""
    config = small("medusa", tiny_target, tiny_data, tmp_path / "run")
    prepare(config, say=quiet).loop.run()
    for name in ("run", "data"):
        shutil.copytree(tmp_path / "run" if name == "run" else tiny_data.parent, tmp_path / "moved" / name)
    moved = replace(config, out=tmp_path / "moved" / "run", data=(str(tmp_path / "moved" / "data" / tiny_data.name),))
    assert prepare(replace(moved, resume=True), say=quiet).loop.progress.step == 8
    write_data(tmp_path / "moved" / "data" / tiny_data.name, seed=1)
    with pytest.raises(TrainingError, match="made from other data: sources differ"):
        prepare(replace(moved, resume=True), say=quiet)


def test_an_unwritable_folder_is_refused_first(tiny_target: Path, tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = small("medusa", Path("no/such/target"), tiny_data, tmp_path / "file" / "out")
    with pytest.raises(TrainingError, match="cannot be written"):
        prepare(config, say=quiet)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 200}, "context holds only 128"), ({"shares": (0.5, 0.5)}, "2 shares were given for 1 sources"),
        ({"budget_minutes": 1.0}, "exactly one budget"), ({"optimiser": "adma"}, "did you mean 'adamw'"),
        ({"rows": 8, "micro_rows": 3}, "multiple of micro_rows=3"), ({"lr": -1.0}, "lr is -1.0"),
        ({"device": "tpu9"}, "device is 'tpu9'"), ({"device": "cuda:1"}, "finds no CUDA device"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(change, message, prepared, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ParameterError, match=message):
        prepared("medusa", **change)


def test_cached_states_give_the_same_training_and_are_computed_once(prepared, monkeypatch):
    streamed = prepared("eagle3", "streamed")
    streamed.train(say=quiet)
    cached = prepared("eagle3", "cached", cache_hidden=True)
    cached.train(say=quiet)
    a, b = weights(streamed), weights(cached)
    close = [float((a[n] - b[n]).abs().max()) for n in a if n.startswith("weights.") and a[n].is_floating_point()]
    assert max(close) < 0.02, "float16 rounds the states, and nothing else differs"
    [cache] = cached.loop.caches.values()
    assert not cache.missing
    assert cache.path.stat().st_size == cache.nbytes

    def refuse(*args: Any) -> Any:
        raise AssertionError("states were made again")

    again = prepared("eagle3", "cached", cache_hidden=True, resume=True, budget_tokens=10 * 256)
    states = cache.path.read_bytes()
    with cache.path.open("ab") as file:
        file.truncate(len(states) // 2 + 1)
    cache.build(3, say=lambda done, total: None)
    assert cache.path.read_bytes() == states, "what is missing is added, whole"
    monkeypatch.setattr(features.Teacher, "read", refuse)
    again.loop.step()


def test_a_disk_without_room_is_refused_before_states_are_made(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    run = prepared("medusa", cache_hidden=True)
    with pytest.raises(TrainingError, match=r"the hidden states take .* free"):
        run.train(say=quiet)
    assert not (tmp_path / "states").exists()


def test_the_estimate_changes_nothing(prepared: Callable[..., TrainingRun]) -> None:
    plain, asked = prepared("draft", "plain"), prepared("draft", "asked")
    plain.loop.run()
    lines = run_report.estimate(asked.loop)
    assert f"{sum(p.numel() for p in asked.loop.objective.module.parameters()):,} parameters" in lines[1]
    assert [line.split()[0] for line in lines] == ["data", "training", "time", "disk"]
    asked.loop.run()
    assert same(weights(plain), weights(asked))


@pytest.mark.parametrize(
    ("features", "has"), [(("avx2",), False), (("avx512bf16",), True), (("amx-bf16",), True), (("neon", "bf16"), True)]
)
def test_bfloat16_products_are_those_of_the_processor(features, has, monkeypatch):
    monkeypatch.setattr(loop.processor, "has", lambda feature: feature in features)
    assert loop.has_bfloat16_products(torch.device("cpu")) is has


@pytest.mark.parametrize("has", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_products_has_none(has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has)
    assert loop.has_bfloat16_products(torch.device("cuda")) is has


@pytest.mark.parametrize(("rate", "seconds", "tokens"), [(10.0, 12.8, 64), (1e3, 0.64, 256)])
def test_the_estimate_takes_at_most_its_limit(rate, seconds, tokens, prepared, monkeypatch):
    """On a slow machine a short pass is enough; on a fast one a whole batch is measured, when memory is allocated."""
    run = prepared("draft")
    clock, sizes, original = 0.0, [], run.loop.objective.forward

    def forward(window: features.Window) -> Any:
        nonlocal clock
        clock += window.tokens.numel() / rate
        sizes.append(window.tokens.numel())
        return original(window)

    monkeypatch.setattr(run.loop.objective, "forward", forward)
    monkeypatch.setattr(run_report.time, "perf_counter", lambda: clock)
    run_report.estimate(run.loop)
    assert run.loop.rate == pytest.approx(rate)
    assert sizes[-1] == sizes[-2] == tokens
    assert clock == pytest.approx(seconds)
    assert clock <= run_report.LIMIT


def test_too_few_tokens_of_its_own_are_refused_before_the_target_writes_them(tiny_target, tiny_data, tmp_path) -> None:
    config = replace(small("medusa", tiny_target, tiny_data, tmp_path / "run"), data=(), self_tokens=40)
    with pytest.raises(ParameterError, match="--self 40 is less than two windows of 32") as refused:
        prepare(config, quiet)
    assert "--self 67" in refused.value.fix
    assert not list(tmp_path.iterdir())


def test_lines_of_a_run_are_in_a_file_at_once(tiny_target, tiny_data, tmp_path, monkeypatch) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        monkeypatch.setattr("sys.stdout", file)
        prepare(small("medusa", tiny_target, tiny_data, tmp_path / "run"))
        assert "held-out texts" in log.read_text()


def test_regenerated_text_becomes_a_source_of_its_own_weight(prepared):
    more = {"answers_only": True, "regenerate": 400, "regenerate_tokens": 12, "regenerate_share": 0.25}
    run = prepared("medusa", **more)
    assert run.loop.orders.shares.tolist() == [0.75, 0.25]
    window = run.loop.read_window([("1", 0)])
    assert 0 < int(window.counts.sum()) < window.counts.numel(), "prompts do not count, answers do"
    run.loop.step()


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral-window"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash", "draft", "layerskip"])
def test_other_kinds_of_targets_can_be_trained_for(kind: str, family: str, tiny_data: Path, tmp_path: Path) -> None:
    target = make_family(family, tmp_path / "target")
    config = small(kind, target, tiny_data, tmp_path / "run", budget_tokens=2 * 256)
    prepare(config, say=quiet).train(say=quiet)
    folder = tmp_path / "run" / "final"
    if kind == "layerskip":
        assert DecoderConfig.load(folder).layers == DecoderConfig.load(target).layers
        Decoder.load(folder, "torch")
        return
    prompt, params = [5, 9, 30, 7], SamplingParams(max_tokens=12)
    llm = LLM(Decoder.load(target, "torch", "float64"), draft_tokens=2)
    plain = llm.generate([prompt], params)[0].token_ids
    llm.use(folder)
    assert llm.generate([prompt], params)[0].token_ids == plain


@pytest.mark.parametrize("kind", ["draft", "layerskip"])
def test_weights_of_a_gguf_file_are_not_trained(kind: str, tiny_target: Path, tiny_data: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    config = small(kind, tiny_target if kind == "draft" else file, tiny_data, tmp_path / "run")
    if kind == "draft":
        config = replace(config, options=DraftOptions(start=str(file)))
    with pytest.raises(ParameterError, match="is a GGUF file"):
        prepare(config, say=quiet)
    assert not config.out.exists()


def test_a_draft_for_a_gguf_file_brings_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="writes the target as a GGUF file")
    file = convert_to_gguf(zoo.target_dir(), tmp_path / "target.gguf", "f16").file
    model = make_llama(
        0, vocab_size=4096, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        intermediate_size=16,
    )  # fmt: skip
    save_model(model, tmp_path / "draft", file)
    assert load_tokenizer(tmp_path / "draft").encode("def f") == load_tokenizer(zoo.target_dir()).encode("def f")


def test_a_draft_continues_from_a_checkpoint(tiny_target: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = small("draft", tiny_target, tiny_data, tmp_path)
    options = DraftOptions(start=str(tiny_target), depth=2)
    run = prepare(replace(config, options=options), say=quiet)
    assert run.loop.evaluate()["loss"] == pytest.approx(0.0, abs=1e-3), "the target itself has its own distributions"
    other = make_family("llama", tmp_path / "other")
    with pytest.raises(Exception, match="96 ids, the target 48"):
        prepare(replace(config, options=DraftOptions(start=str(other))), say=quiet)


def test_taps_of_small_targets_are_different_layers() -> None:
    assert [choose_layers(n) for n in (1, 2, 3, 4, 8, 32)] == [(1,), (1,), (1, 2), (1, 2, 3), (2, 4, 5), (2, 16, 29)]


def test_layerskip_learns_and_reports_what_differs_from_the_original(tiny_target, tiny_data, tmp_path):
    more = {"budget_tokens": 40 * 256, "lr": 2e-3, "texts": 24, "text_tokens": 24}
    run = prepare(run_config("layerskip", OPTIONS["layerskip"], tiny_target, tiny_data, tmp_path, **more), say=quiet)
    before = run.loop.evaluate()
    assert before["loss2"] == pytest.approx(0.0, abs=1e-3), "of the last layer"
    assert before["loss1"] > 0.1, "of the exit"
    figures = run.train(say=quiet)
    assert figures["loss1"] < 0.9 * before["loss1"]
    assert figures["tau@0"] > before["tau@0"] + 0.05
    assert figures["tau@0.8"] > before["tau@0.8"]
