"""The package in an interactive session: `dir(slipstream)` and `repr(LLM(...))`."""

import subprocess
import sys

import slipstream
from slipstream import LLM
from tests.checkpoints import Tiny
from tests.targets.toy import ToyTarget


def test_dir_lists_the_public_names_and_each_of_them_exists() -> None:
    assert dir(slipstream) == sorted(slipstream.__all__)
    assert {"LLM", "SamplingParams", "SpeculativeDecoder", "check_pair", "load_model_pair"} <= set(dir(slipstream))
    for name in dir(slipstream):
        assert getattr(slipstream, name) is not None


def test_dir_does_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import slipstream, sys; dir(slipstream); assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_repr_of_an_llm_is_one_line_that_names_its_parts(tiny: Tiny) -> None:
    llm = LLM(tiny.target, tiny.draft, draft_tokens=3, rule="coupled", executor="torch", dtype="float64", device="cpu")
    assert repr(llm) == (
        f"LLM(target={str(tiny.target)!r}, backend='torch', dtype='float64', drafter='model', draft_tokens=3, "
        "rule='coupled')"
    )


def test_the_repr_of_an_llm_shows_quantised_weights(tiny: Tiny) -> None:
    llm = LLM(tiny.target, "ngram", executor="native", quantize="int8", device="cpu", draft_tokens=4)
    assert "dtype='float32', quantize='w8a16', drafter='ngram', draft_tokens=4," in repr(llm)


def test_the_repr_of_an_llm_around_a_target_from_memory_is_one_line(tiny: Tiny) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.target)
    assert repr(LLM(model, executor="torch", draft_tokens=4)).startswith(
        "LLM(target='Decoder', backend='torch', dtype='float32', "
    )
    assert (
        repr(LLM(ToyTarget(), draft_tokens=4))
        == "LLM(target='ToyTarget', drafter='none', draft_tokens=4, rule='rejection')"
    )
