"""GGUF files as targets and drafts of our own decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.errors import LoadError, ParameterError, UnsupportedModelError
from slipstream.targets.describe import as_target, describe
from tests.checkpoints.gguf_files import family_config, gguf_model
from tests.checkpoints.odd_gguf_files import ODD, write

PROMPTS = [[5, 9, 33], [7, 8, 7, 8, 7, 8], [1]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_model(tmp_path_factory.mktemp("file"), family_config("llama", tied=True), ("Q4_1", "Q8_0"))[0]


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]


def test_our_own_decoder_runs_a_file_with_the_weights_that_it_holds(file: Path) -> None:
    described = describe(file)
    assert (described.runner, described.refusals, described.kind.name) == ("native", {}, "decoder")
    assert described.weight_bytes == sum(described.stored.values())  # type: ignore[union-attr]
    runtime = as_target(file).capabilities.runtime
    assert (runtime.backend, runtime.quantize, runtime.checkpoint) == ("native", "Q8_0", file)
    assert as_target(file, executor="torch", dtype="float64").capabilities.runtime.dtype == torch.float64


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "lookahead", "layerskip"])
def test_drafts_change_no_text(file: Path, drafter: str) -> None:
    llm = LLM(file, threads=1)
    plain = texts(llm)
    llm.use(drafter)
    llm.draft_tokens = 4
    assert texts(llm) == plain


def test_a_file_drafts_whatever_runs_the_target(file: Path) -> None:
    llm = LLM(file, as_target(file), draft_tokens=3, threads=1)
    assert texts(llm) == texts(LLM(file, threads=1))
    assert llm.generate([5, 9, 33], PARAMS)[0].stats.accepted > 0
    for executor, runner in (("torch", "torch"), ("transformers", "native")):
        assert as_target(file, role="draft", executor=executor).capabilities.runtime.backend == runner


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantize": "int8"}, "quantising them again"),
        ({"role": "draft", "quantize": "int4"}, "draft_quantize='none'"),
        ({"lora": "adapter"}, "lora='adapter' was given with a GGUF file"),
        ({"device_map": "auto"}, "device_map='auto' was given with a GGUF file"),
        ({"executor": "transformers"}, "executor='transformers' was given with a GGUF file"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_settings_that_a_file_does_not_have_are_refused(file: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        as_target(file, **settings)


def test_a_file_of_floating_point_numbers_can_be_quantised(tmp_path: Path) -> None:
    plain, _ = gguf_model(tmp_path, family_config("qwen2"))
    for quantize, name in (("int8", "w8a16"), ("int4", "w4a8"), (None, None)):
        assert as_target(plain, quantize=quantize).capabilities.runtime.quantize == name


def test_an_unknown_kind_of_block_is_named_with_its_tensor(tmp_path: Path) -> None:
    other, _ = gguf_model(tmp_path, family_config("llama"), ("Q8_0",))
    data, name = bytearray(other.read_bytes()), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and both of them
    data[at : at + 4] = (99).to_bytes(4, "little")
    other.write_bytes(data)
    with pytest.raises(LoadError, match=r"Tensor 'blk\.0\.attn_q\.weight' is stored as type 99, not as one of F32"):
        as_target(other)


@pytest.mark.parametrize("executor", ["auto", "native"])
def test_a_file_of_another_architecture_is_refused_with_what_runs_it(executor: str, tmp_path: Path) -> None:
    file, _ = gguf_model(tmp_path, family_config("llama"))
    file.write_bytes(file.read_bytes().replace(b"llama", b"plamo"))
    with pytest.raises(UnsupportedModelError, match="our own decoder does not run") as refused:
        describe(file, LoadSettings(executor=executor))
    assert "Its architecture is 'plamo', not one of llama" in str(refused.value)
    assert all(way in refused.value.fix for way in ("checkpoint", "transformers", "llama-server", "--base-url"))


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_has_one_text_on_every_executor(name: str, tmp_path: Path) -> None:
    odd = write(tmp_path / "odd.gguf", **ODD[name])
    exact = LLM(odd, threads=1, executor="torch", dtype="float64")
    assert texts(LLM(odd, threads=1, executor="native")) == texts(exact)
