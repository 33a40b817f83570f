"""The examples of CONTRIBUTING.md and docs/new-family.md work as described."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.backends.table import Backend
from slipstream.checkpoints.families import FAMILIES
from slipstream.core.declaration import OPTION, Effect, parameter
from slipstream.core.dice import Dice
from slipstream.core.draft import Draft
from slipstream.core.params import number
from slipstream.core.rules import Decision, Rule
from slipstream.core.sequence import Sequence
from slipstream.drafters.registry import DrafterSpec, Needs
from slipstream.errors import UnsupportedModelError
from slipstream.targets.decoder import Decoder
from tests.core.exact import emitted_distribution, target_distribution
from tests.core.worlds import Shape, random_world
from tests.drafters.conformance import Case, Conformance
from tests.targets.reference import Reference
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import make_family, rewrite

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(first: str) -> str:
    """The Python example of the guide that begins with this line."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if code.startswith(first)]
    return str(block)


def module(name: str, code: str, **names: Any) -> ModuleType:
    """`code` as a module."""
    module_of_code = ModuleType(name)
    module_of_code.__dict__.update(names)
    sys.modules[name] = module_of_code  # dataclasses look their module up
    exec(compile(code, f"<{name}>", "exec"), module_of_code.__dict__)
    return module_of_code


class TestTheDrafterOfTheGuide(Conformance):
    """It passes the conformance suite of drafters."""

    @pytest.fixture
    def case(self) -> Case:
        drafter = module("documented_drafter", block("# slipstream/drafters/bigram.py"))
        return Case(lambda: ToyTarget(5, order=3, seed=21, sharpness=1.5), drafter.make)


def test_the_table_lines_and_the_backend_of_the_guide_are_valid_and_its_rule_is_lossless() -> None:
    """The line of the drafter's table and the declaration of a sampling parameter."""
    names = {"DrafterSpec": DrafterSpec, "Needs": Needs, "parameter": parameter, "number": number, "Effect": Effect}
    (spec,) = re.findall(r"^    (DrafterSpec\(.*\)),$", GUIDE, re.MULTILINE)
    assert eval(spec, names).weightless
    (declaration,) = re.findall(r"top_a: float = (parameter\(.*?\n    \))", GUIDE, re.DOTALL)
    assert eval(declaration, names).metadata[OPTION].help
    code = "from __future__ import annotations\n" + block("# slipstream/backends/mlx/mlx_backend.py")
    backend = module("documented_backend", code).BACKEND
    methods = {name for name, value in vars(Backend).items() if callable(value) and not name.startswith("_")}
    assert len(methods) > 3
    assert not [name for name in {*methods, *Backend.__annotations__} if not hasattr(backend, name)]
    names = {"Draft": Draft, "Tensor": Tensor, "Dice": Dice, "Decision": Decision, "_rule": lambda decide: decide}
    decide = module("documented_rule", block("@_rule\ndef nothing("), **names).nothing
    for shape in (Shape.chain("ss"), Shape((-1, -1, 0), "wwp")):
        world = random_world(1, 3)
        emitted = emitted_distribution(Rule("nothing", decide), world, shape)
        assert emitted == target_distribution(world, shape.height + 1)


def test_one_entry_is_enough_for_a_family_of_parts_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of docs/new-family.md, for a checkpoint that is one of Cohere 2's layers' kinds."""
    guide = (ROOT / "docs" / "new-family.md").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^```python\n# a family\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    code = "\n".join(
        (
            "from slipstream.checkpoints.config_values import count_of, layer_kinds, positive, rope_parameters",
            "from slipstream.checkpoints.families.family import Family, common, describe",
            entry,
        )
    )
    family = module("documented_family", code).FAMILY
    folder, ids = make_family("qwen3", tmp_path), list(range(3, 40))
    wanted = Reference(folder, torch.float64)([ids])[0][-1]  # [V]

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_norm." in name]:
            tensors[name.replace("q_norm", "query_layernorm").replace("k_norm", "key_layernorm")] = tensors.pop(name)

    kinds = ["sliding_attention"] * 3
    rewrite(folder, rename, model_type="newllama", layer_types=kinds, sliding_window=100, residual_multiplier=1.0)
    with pytest.raises(UnsupportedModelError, match="'newllama'"):
        Decoder.load(folder)
    monkeypatch.setitem(FAMILIES, "newllama", family)  # type: ignore[arg-type]
    logits = Decoder.load(folder, "native").run([Sequence(ids)], Draft.empty(1)).logits[0].double()  # [V]
    assert torch.allclose(logits, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
