"""examples/vllm-70b.json and examples/ray/vllm_app.py: what vLLM is told, and that the plan behind it holds. What
examples import exists.

tests/vllm/test_examples.py gives them to vLLM itself."""

import ast
import importlib
import json
from itertools import pairwise

import pytest

from slipstream.cli.main import main
from slipstream.measure.configs import DrafterChoice, vllm
from tests.examples.served import EXAMPLES, vllm_of

CONFIG = EXAMPLES / "vllm-70b.json"


def test_the_settings_of_the_70b_model_are_those_of_its_choice() -> None:
    values = vllm_of(CONFIG).values
    schedule = values["speculative_config"].pop("num_speculative_tokens_per_batch_size")
    chosen = DrafterChoice("model", 5, "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-3B-Instruct")
    assert values.items() >= (vllm(chosen).values or {}).items()
    assert values["tensor_parallel_size"] == 2
    assert schedule[0][0] == 1
    assert all(end + 1 == begin for (_, end, _), (begin, _, _) in pairwise(schedule))
    assert schedule[-1][1] == values["max_num_seqs"]
    assert schedule[0][2] == chosen.draft_tokens


def test_the_schedule_gains_at_every_load_and_fits_into_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """By `slipstream simulate`, on the hardware that docs/production.md names."""
    schedule = vllm_of(CONFIG).values["speculative_config"]["num_speculative_tokens_per_batch_size"]
    for begin, end, length in schedule:
        with pytest.raises(SystemExit):
            main([
                *("simulate", "--hardware", "h200", "--gpus", "2", "-m", "Llama-3.1-70B", "-md", "Llama-3.2-3B"),
                *("-k", str(length), "--context", "2048", "--batch", f"{begin},{end}", "--json"),
            ])  # fmt: skip
        for load in json.loads(capsys.readouterr().out)["loads"]:
            assert load["fits"]
            assert load["speedup"] > 1.3


def test_the_replicas_of_ray_have_the_settings_of_the_plug_in() -> None:
    tree = ast.parse((EXAMPLES / "ray" / "vllm_app.py").read_text(encoding="utf-8"))
    (given,) = [ast.literal_eval(node.value) for node in ast.walk(tree)
                if isinstance(node, ast.keyword) and node.arg == "engine_kwargs"]  # fmt: skip
    assert given.items() >= (vllm(DrafterChoice("suffix", 16)).values or {}).items()


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_what_an_example_imports_of_slipstream_exists(path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream."):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)
