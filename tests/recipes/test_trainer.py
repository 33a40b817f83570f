import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from recipes.embedded.corpus import Package
from recipes.embedded.export import export
from recipes.embedded.trainer import BaseConfig, Trainer, train_base
from slipstream.errors import ParameterError


def test_resumed_run_equals_uninterrupted(tiny: BaseConfig, packages: list[Package], tmp_path: Path) -> None:
    train_base(tiny, packages)
    halves = replace(tiny, out=tmp_path / "halves", max_steps=5)
    train_base(halves, packages)
    train_base(replace(halves, resume=True, max_steps=None), packages)
    one, two = (load_file(out / "checkpoint.safetensors") for out in (tiny.out, halves.out))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_log_and_loss(tiny: BaseConfig, packages: list[Package]) -> None:
    train_base(replace(tiny, budget_tokens=60 * 256), packages)
    entries = [json.loads(line) for line in (tiny.out / "log.jsonl").read_text().splitlines()]
    assert entries[-1]["finished"]
    assert entries[-1]["heldout"]["raw"] < entries[1]["heldout"]["raw"] < 6.0


def test_draft_learns_from_teacher(tiny: BaseConfig, packages: list[Package], tmp_path: Path) -> None:
    train_base(tiny, packages)
    draft = replace(
        tiny, out=tmp_path / "draft", role="draft", shape=replace(tiny.shape, num_hidden_layers=1), teacher=tiny.out,
        budget_tokens=40 * 256,
    )  # fmt: skip
    trainer = Trainer(draft)
    tokens = trainer.batches.draw(0, 4, 64)
    before = float(trainer.micro_loss(tokens)[0].detach())
    for _ in range(20):
        trainer.step()
    assert float(trainer.micro_loss(tokens)[0].detach()) < before
    assert all(p.grad is None for p in trainer.teacher.parameters())  # type: ignore[union-attr]


def test_distillation_loss_is_zero_kl_at_the_teacher(tiny: BaseConfig, packages: list[Package], tmp_path: Path) -> None:
    tiny = replace(tiny, data=None)
    train_base(replace(tiny, max_steps=2), packages)
    same = replace(tiny, out=tmp_path / "same", role="draft", teacher=tiny.out, kl_weight=1.0)
    trainer = Trainer(same)
    trainer.model.load_state_dict(trainer.teacher.state_dict())  # type: ignore[union-attr]
    loss, _ = trainer.micro_loss(trainer.batches.draw(0, 4, 64))
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)


def test_a_tokenizer_of_its_own_is_refused_beside_a_teacher(tiny: BaseConfig) -> None:
    with pytest.raises(ParameterError, match="over the same tokens"):
        replace(tiny, role="draft", teacher=tiny.out, pre_tokenizer="gpt2")
    with pytest.raises(ParameterError, match="use one of code, gpt2"):
        replace(tiny, pre_tokenizer="bert")


def test_sigterm_saves_and_exits(tiny: BaseConfig, packages: list[Package], monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.step

    def step(self: Trainer) -> tuple[float, float]:
        if self.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(Trainer, "step", step)
    train_base(tiny, packages)
    assert Trainer(replace(tiny, resume=True)).progress.step == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget_minutes": 1.0}, "budget"), ({"role": "judge"}, "judge"), ({"length": 60}, "60"),
        ({"role": "draft", "teacher": Path("nowhere")}, "nowhere"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(tiny: BaseConfig, change: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Trainer(replace(tiny, **change))  # type: ignore[arg-type]


def test_a_model_that_starts_from_another_keeps_its_layers_and_the_tokens_that_both_have(tiny, packages, tmp_path):
    """Each other token is the mean of those that wrote it."""
    train_base(replace(tiny, max_steps=1), packages)
    export(tiny.out, tmp_path / "model")
    other = replace(tiny, out=tmp_path / "b", data=None, role="draft", pre_tokenizer="gpt2", start=tmp_path / "model")
    trainer = Trainer(other, packages)
    old, new = load_file(tmp_path / "model" / "model.safetensors"), trainer.model.state_dict()
    before, after = Tokenizer.from_file(str(tiny.data / "tokenizer.json")), trainer.tokenizer
    assert all(torch.equal(new[name], old[name].float()) for name in old if "embed" not in name)
    table, rows = (w["model.embed_tokens.weight"].float() for w in (old, new))
    shared = before.get_vocab().keys() & after.get_vocab().keys()
    assert {"<|user|>", "Ġ", "return"} <= shared
    for token in shared:
        torch.testing.assert_close(rows[after.token_to_id(token)], table[before.token_to_id(token)])
    added = next(token for token in after.get_vocab() if token not in shared and token.isascii())
    pieces = before.encode(added).ids
    assert len(pieces) > 1
    torch.testing.assert_close(rows[after.token_to_id(added)], table[pieces].mean(0))
    with pytest.raises(ParameterError, match="exported model"):
        replace(other, start=tmp_path)
