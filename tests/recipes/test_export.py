from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.embedded.agreement import compare, draft_agreement, exit_agreement
from recipes.embedded.compact import CompactLlama
from recipes.embedded.corpus import Package
from recipes.embedded.export import Run, export
from recipes.embedded.trainer import train_base
from tests.recipes.conftest import tiny_run

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def exported(packages: list[Package], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Do not change it."""
    folder = tmp_path_factory.mktemp("exported")
    train_base(replace(tiny_run(folder / "run"), lr=2e-2), packages)
    export(folder / "run", folder / "model", extra={"top-1 agreement": "12 %"})
    return Run.open(folder / "run"), folder / "model"


def test_transformers_computes_the_same_logits(exported: tuple[Run, Path]) -> None:
    run, folder = exported
    ids = torch.randint(4, 400, (2, 100), generator=torch.Generator().manual_seed(0))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.float16
    with torch.no_grad():
        half = CompactLlama(run.model.shape)
        half.load_state_dict({k: v.half().float() for k, v in run.model.state_dict().items()})
        expected = half(ids)
        logits = loaded.float()(ids).logits
    assert float(expected.abs().max()) > 0.5  # else the comparison says nothing
    assert torch.allclose(expected, logits, atol=1e-3)


def test_chat_template_and_end_tokens_and_the_card_states_the_facts(exported: tuple[Run, Path]) -> None:
    _, folder = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\nhi<|end|>\n<|assistant|>\n"
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    assert tokenizer.decode(tokenizer("x = 12\n    y").input_ids) == "x = 12\n    y"
    card = (exported[1] / "README.md").read_text()
    for fact in ("alpha | 1.0 | MIT", "held-out loss", "seed", "recipes.embedded.train", "3,072 in 12 steps", "12 %"):
        assert fact in card


def test_skipped_layers_and_taps(exported: tuple[Run, Path]) -> None:
    model = exported[0].model
    ids = torch.randint(4, 400, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tapped, last = model.hidden(ids, taps=[0])
        early = model.hidden(ids, keep=[True, False, False])[-1]
    assert torch.equal(tapped, early)
    assert not torch.equal(early, last)


def test_agreement_of_a_model_with_itself_and_with_a_point_mass(exported: tuple[Run, Path]) -> None:
    model = exported[0].model
    ids = torch.randint(4, 400, (2, 20), generator=torch.Generator().manual_seed(0))
    same = draft_agreement(model, model, ids)
    assert (same.top1, same.positions) == (1.0, 40)
    assert same.overlap == pytest.approx(1.0, abs=1e-6)
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 60.0]])
    assert compare(iter([(p, q)])).overlap == pytest.approx(0.5)
    assert set(exit_agreement(model, ids)) == {1, 2}
