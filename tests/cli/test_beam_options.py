"""`slipstream generate --beams`."""

import json

import pytest

from slipstream import LLM, BeamParams
from slipstream.core.beams import Beam
from tests.checkpoints import Tiny


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(tiny.target, executor="torch", dtype="float64", device="cpu")


@pytest.fixture
def target(tiny: Tiny) -> list[object]:
    return ["-m", tiny.target, "--executor", "torch", "--dtype", "float64", "--device", "cpu"]


def best(llm: LLM, prompt: str = "def add(", **how) -> list[Beam]:
    return llm.beam_search([prompt], BeamParams(**{"beams": 3, "max_tokens": 8} | how))[0]


def test_the_best_text_goes_out_and_the_rest_to_standard_error(cli, target, llm):
    result = cli("generate", "def add(", "--beams", "3", "-n", "8", *target)
    (beam,) = best(llm)
    assert (result.code, result.out) == (0, beam.text)
    assert f"beam search, 3 beams: score {beam.score:.3f}, 8 tokens, finish reason length" in result.said
    assert "plain decoding" in result.said
    assert cli("generate", "def add(", "--num-beams", "3", "-n", "8", "-q", *target).err == ""


def test_several_texts_each_have_a_line(cli, target, llm):
    result = cli("generate", "def add(", "--beams", "3", "--beam-texts", "2", "-n", "8", *target)
    beams = best(llm, n=2)
    assert result.out == "".join(beam.text + ("" if beam.text.endswith("\n") else "\n") for beam in beams)
    assert "text 2 of 2, score" in result.said


def test_json(cli, target, llm):
    more = ["--beams", "3", "--beam-texts", "2", "-n", "8", "--length-penalty", "-1.5", "--early-stopping", "never"]
    how = {"n": 2, "length_penalty": -1.5, "early_stopping": "never"}
    wanted = [beam.token_ids for beam in best(llm, "def add(", **how)]
    found = json.loads(cli("generate", "def add(", "--json", *more, *target).out)
    assert [beam["token_ids"] for beam in found["beams"]] == wanted
    assert found["beams"][0].keys() == {"token_ids", "text", "score", "logprob", "finish_reason", "stop_cause"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--length-penalty", "2"], "length_penalty was given without beams"),
        (["--beams", "1"], "greedy decoding"),
        (["--beams", "2", "--beam-texts", "3"], "n is 3, but 2 beams"),
        (["--beams", "2", "--early-stopping", "always"], "early_stopping is 'always'"),
        (["--beams", "2", "--temperature", "0.5"], "temperature was given with beams"),
        (["--beams", "2", "--stop", "x"], "stop was given with beams"),
        (["--beams", "2", "--regex", "x"], "structured was given with beams"),
        (["--beams", "2", "--logprobs", "1"], "logprobs was given with beams"),
        (["--beams", "2", "--drafter", "ngram"], "drafter was given with beams"),
        (["--beams", "2", "-md", "embedded"], "draft was given with beams"),
        (["--beams", "2", "-k", "4"], "draft_tokens was given with beams"),
        (["--beams", "2", "--rule", "block"], "rule was given with beams"),
    ],
)
def test_what_a_search_would_ignore_is_refused_by_name(cli, options, said):
    result = cli("generate", "x", *options)
    assert result.code == 2
    assert said in result.said


@pytest.mark.parametrize("options", [["--drafter", "none"], ["-k", "0"]])
def test_speculation_may_be_turned_off_by_hand(cli, target, llm, options):
    assert cli("generate", "def add(", "--beams", "3", "-n", "8", "-q", *options, *target).out == best(llm)[0].text
