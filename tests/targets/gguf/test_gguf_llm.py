"""`LLM` on GGUF models: every drafter that needs no hidden states, draft models of any kind, batches, samples."""

import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gguf.gguf_writer import convert_to_gguf
from slipstream import LLM, SamplingParams
from slipstream.checkpoints import llamacpp_library
from slipstream.checkpoints.gguf_header import read_header
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import LoadError, PairError, ParameterError, SlipstreamError, TargetError, UnsupportedModelError
from slipstream.measure.provenance import describe_engine
from slipstream.targets.describe import as_target
from slipstream.targets.gguf.gguf_target import GgufTarget
from slipstream.targets.gguf.llama_context import IDS
from tests.checkpoints.gguf_files import tiny_model
from tests.enumeration import enumerate_texts
from tests.oracle import Oracle
from tests.tiny_checkpoints import Tiny

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

PROMPTS = [
    "def add(first, second):\n    return", "naïve café 🎈", "for name in names:\n    print(name)\nfor name in", "x",
]  # fmt: skip
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def files(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny target and draft as GGUF files in float32."""
    folder = tmp_path_factory.mktemp("pair")
    for role in ("target", "draft"):
        convert_to_gguf(getattr(tiny, role), folder / f"{role}.gguf", "f32")
    return Tiny(folder / "target.gguf", folder / "draft.gguf")


@pytest.fixture(scope="module")
def llm(files: Tiny) -> LLM:
    return LLM(files.target, executor="llamacpp", threads=1)


@pytest.fixture(scope="module")
def small(files: Tiny) -> GgufTarget:
    return as_target(files.draft, executor="llamacpp", threads=1)


@pytest.fixture(scope="module")
def texts(tiny: Tiny) -> list[str]:
    """What our own decoder writes."""
    return [one.text for one in LLM(tiny.target, executor="torch").generate(PROMPTS, PARAMS)]


def test_plain_texts_are_those_of_our_own_decoder(llm: LLM, texts: list[str]) -> None:
    llm.use(None)
    assert [one.text for one in llm.generate(PROMPTS, PARAMS)] == texts
    assert [llm.generate(prompt, PARAMS)[0].text for prompt in PROMPTS] == texts
    assert "".join(chunk.text for chunk in llm.stream(PROMPTS[1], PARAMS)) == texts[1]
    assert repr(llm).startswith("LLM(target=")
    assert "backend='llamacpp'" in repr(llm)


def test_drafts_of_our_own_and_of_gguf_models_change_no_text(files: Tiny, tiny: Tiny, texts: list[str]) -> None:
    for target, draft in ((files.target, files.draft), (files.target, tiny.draft), (tiny.target, files.draft)):
        runs_on = "torch" if target == tiny.target else "llamacpp"
        done = LLM(target, draft, draft_tokens=4, threads=1, executor=runs_on).generate(PROMPTS, PARAMS)
        assert [one.text for one in done] == texts
        assert sum(one.stats.accepted for one in done) > 10
        assert all(one.stats.drafter_faults == 0 for one in done)


def test_texts_are_as_probable_as_in_plain_decoding_up_to_float32(llm: LLM, small: GgufTarget, tiny: Tiny) -> None:
    params, prompt = SamplingParams(temperature=0.7, top_k=4, max_tokens=4), llm.tokenizer.encode(PROMPTS[0])
    how = {"after": 1, "steps": 1, "rounding": 1e-5}
    (texts,) = enumerate_texts(lambda: LLM(llm.target, small, draft_tokens=2), prompt, params, **how)
    texts.check(Oracle(LLM(tiny.target, executor="torch", dtype="float64").target), prompt, params)
    assert 0 < texts.accepted < texts.proposed


def test_requests_that_do_not_fit_into_the_cache_wait(files: Tiny, texts: list[str]) -> None:
    """And a cache that is smaller than what a pass could take is enough."""
    llm = LLM(files.target, "lookahead", executor="llamacpp", draft_tokens=9, threads=1, kv_tokens=32, max_batch=24)
    memory = llm.target.capabilities.memory
    assert memory.capacity == 512 // memory.block
    done = llm.generate([p for p in PROMPTS for _ in range(6)], PARAMS)
    assert [one.text for one in done] == [text for text in texts for _ in range(6)]


def test_more_requests_than_llamacpp_has_ids_wait(files: Tiny, texts: list[str]) -> None:
    llm = LLM(files.target, executor="llamacpp", threads=1, kv_tokens=32 * 300, max_batch=IDS + 4)
    params = SamplingParams(max_tokens=2)
    done = llm.generate([PROMPTS[3]] * (IDS + 4), params)
    assert {one.finish_reason for one in done} == {"length"}
    assert {one.text for one in done} == {llm.generate(PROMPTS[3], params)[0].text}


def test_requests_come_and_go_and_each_text_is_that_of_the_request_alone(llm: LLM, files: Tiny) -> None:
    """Served with a prefix cache that is too small for them: beginnings that are shared, drafts, cancelled requests."""
    chosen = random.Random(4)
    llm.use(None)
    stems = [[chosen.randrange(90) for _ in range(length)] for length in (33, 64, 100)]
    for drafter in ("lookahead", files.draft):
        served = LLM(files.target, drafter, executor="llamacpp", draft_tokens=5, threads=1, kv_tokens=512, max_batch=24)
        engine, seqs = served.engine(), list[Sequence]()
        for turn in range(40):
            if turn < 24:
                stem = chosen.choice(stems)
                ids = stem[: chosen.randrange(1, len(stem) + 1)] + [chosen.randrange(90)] * chosen.choice([0, 1, 20])
                seqs.append(served.sequence(ids, SamplingParams(max_tokens=chosen.choice([1, 5, 16]), ignore_eos=True)))
                engine.add(seqs[-1])
            if turn % 9 == 8:
                engine.abort(seqs.pop(chosen.randrange(len(seqs))))
            if engine.unfinished:
                engine.step()
        while engine.unfinished:
            engine.step()
        wanted = llm.generate([one.tokens[: one.prompt] for one in seqs], [one.params for one in seqs])
        assert [one.output for one in seqs] == [one.token_ids for one in wanted]
        assert sum(one.cached > 0 for one in seqs) >= 4
        assert not engine.stats.errors
        usage = served.target.capabilities.memory.usage  # type: ignore[union-attr]
        assert usage.used == 0
        assert 0 < usage.kept <= usage.capacity


def test_two_models_of_one_file_run_in_two_threads(files: Tiny, texts: list[str]) -> None:
    """One as a draft model of the other, too."""
    drafts = {"suffix": {}, files.target: {"draft_tokens": 4}}
    both = [LLM(files.target, draft, executor="llamacpp", threads=1, **more) for draft, more in drafts.items()]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda one: one.generate(PROMPTS * 2, PARAMS), both):
            assert [one.text for one in done] == texts * 2


def test_prompts_of_very_different_length_and_a_full_context(llm: LLM) -> None:
    llm.use("suffix")
    llm.draft_tokens = 5
    prompts = [[5 + i % 80 for i in range(length)] for length in (1, llm.target.context - 2, 2, 90, 33)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    together = [one.token_ids for one in llm.generate(prompts, params)]
    assert together == [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert list(map(len, together)) == [12, 2, 12, 12, 12]


def test_what_a_measurement_notes_of_a_gguf_model(llm: LLM) -> None:
    seen = describe_engine(llm)
    assert seen["target"]["name"] == "target.gguf"
    assert len(seen["target"]["sha256"]) == 16
    assert (seen["executor"], seen["quantize"], seen["kv_dtype"]) == ("llamacpp", None, "float32")


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"quantize": "int8"}, "llama-quantize"), ({"dtype": "bfloat16"}, "leave it out"),
        ({"device": "cuda"}, "leave it out"), ({"device": "nonesuch"}, "leave it out"),
        ({"kv_dtype": "int4"}, "float32"), ({"kv_tokens": 3}, ""), ({"threads": 0}, ""),
    ],
)  # fmt: skip
def test_settings_that_a_gguf_model_does_not_have_are_refused(files: Tiny, settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ParameterError) as error:
        LLM(files.target, executor="llamacpp", **settings)
    assert next(iter(settings)) in error.value.what
    assert fix in str(error.value)


def test_quantisation_of_a_gguf_draft_is_refused_not_ignored(files: Tiny, tiny: Tiny) -> None:
    with pytest.raises(ParameterError, match=r"quantize='w8a8' was asked of a model that llama\.cpp runs"):
        LLM(files.target, files.draft, executor="llamacpp", draft_quantize="w8a8")


def test_a_draft_of_other_tokens_is_refused(files: Tiny, tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(8)]
    other = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 8}
    (tmp_path / "other.gguf").write_bytes(tiny_model(**other))
    with pytest.raises(PairError, match="do not share a vocabulary"):
        LLM(files.target, tmp_path / "other.gguf", executor="llamacpp", threads=1)


def test_weights_that_are_no_numbers_are_an_error_that_names_what_a_gguf_model_has(files: Tiny, tmp_path: Path) -> None:
    header = read_header(files.target)
    norm = next(tensor for tensor in header.tensors if tensor.name == "output_norm.weight")
    data, at = bytearray(files.target.read_bytes()), norm.begin
    data[at : at + 4] = np.float32("nan").tobytes()
    (tmp_path / "nan.gguf").write_bytes(data)
    with pytest.raises(TargetError, match=r"not finite .* kv_dtype='float32'"):
        LLM(tmp_path / "nan.gguf", executor="llamacpp", threads=1).generate(PROMPTS[0], PARAMS)


def refused(file: Path, data: bytes, kind: type[SlipstreamError], match: str) -> None:
    file.write_bytes(data)
    with pytest.raises(kind, match=match) as error:
        LLM(file, executor="llamacpp", threads=1)
    assert error.value.fix


def test_models_that_llamacpp_refuses_are_one_clear_error(tmp_path, capfd, caplog):
    """And nothing of llama.cpp's own log is printed, neither here nor for models that load."""
    caplog.set_level(logging.WARNING)
    unknown = {"general.architecture": "nonesuch"}
    refused(tmp_path / "a.gguf", tiny_model(**unknown), LoadError, "does not say how large")
    unknown |= {"nonesuch.block_count": 1, "nonesuch.embedding_length": 32}
    refused(tmp_path / "b.gguf", tiny_model(**unknown), UnsupportedModelError, "unknown model architecture: 'nonesuch'")
    refused(tmp_path / "c.gguf", tiny_model(**{"llama.block_count": 2}), LoadError, r"blk\.1")
    refused(tmp_path / "d.gguf", tiny_model()[:-64], LoadError, "not a whole GGUF file")
    refused(tmp_path / "e.gguf", tiny_model(**{"tokenizer.ggml.model": None}), LoadError, "tokenizer")
    (tmp_path / "f.gguf").write_bytes(tiny_model())
    LLM(tmp_path / "f.gguf", executor="llamacpp", threads=1).generate([[1]], SamplingParams(max_tokens=2))
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_an_architecture_whose_state_cannot_be_rolled_back_is_named(files, monkeypatch):
    monkeypatch.setattr(llamacpp_library.llama_cpp(), "llama_model_is_recurrent", lambda model: True)
    with pytest.raises(UnsupportedModelError, match="'llama' cannot be rolled back"):
        as_target(files.target, executor="llamacpp", threads=1)


def test_weights_of_less_precision_are_close(gguf_file: Callable[..., Path]) -> None:
    """float16 and Q8_0 differ from float32 a little, and not much; four bits more."""
    logits = {}
    for kind, noted in (("f32", None), ("f16", "F16"), ("q8_0", "Q8_0"), ("q4_k_m", "Q4_K_M")):
        target = as_target(gguf_file("llama", kind), executor="llamacpp", threads=1)
        runtime = target.capabilities.runtime
        assert (runtime.quantize, runtime.kv_dtype) == (noted, "float16" if noted else "float32")
        logits[kind] = target.run([Sequence(list(range(1, 40)))], Draft.empty(1)).logits.clone()
    wanted = logits["f32"]
    errors = [float((each - wanted).abs().max() / wanted.abs().max()) for each in logits.values()]
    assert 0 == errors[0] < errors[1] < errors[2] < errors[3] < 0.5
