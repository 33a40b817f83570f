"""Text that the target writes for training: after prefixes of data, and conversations of a chat model with itself."""

import re
from pathlib import Path

import numpy as np
import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import ParameterError
from slipstream.training import regenerate as regenerate_module, schedule
from slipstream.training.packing import TokenStream
from slipstream.training.regenerate import make_prefixes, make_self_prompts, regenerate


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", draft_tokens=4, threads=1, max_batch=16)


@pytest.fixture(scope="module")
def tiny(tiny_target: Path) -> LLM:
    return LLM(tiny_target, executor="torch", threads=1, max_batch=16)


def test_prompts_are_conversations_up_to_the_answer_and_repeatable(llm: LLM) -> None:
    write = make_self_prompts(llm)
    prompts = write(np.random.default_rng(5), 6)
    assert prompts == write(np.random.default_rng(5), 6) != write(np.random.default_rng(6), 6)
    assert len({tuple(ids) for ids in prompts}) == len(prompts) > 0
    talk = [{"role": "user", "content": "X"}]
    rendered = llm.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    before, _, after = rendered.partition("X")
    for ids in prompts:
        text = llm.tokenizer.decode(ids)
        assert text.startswith(before)
        assert text.endswith(after)


def test_the_stream_holds_prompts_and_the_answers_of_the_target(llm: LLM, tmp_path: Path) -> None:
    path = regenerate(llm, make_self_prompts(llm), tmp_path / "self.bin", 60, 24, temperatures=(0.0,), shard_size=6)
    for ids, mask in TokenStream.open(path, whole=True).documents():
        assert mask == sorted(mask)
        prompt = ids[: mask.index(True)]
        answer = llm.generate(prompt, SamplingParams(max_tokens=24))[0].token_ids
        assert ids[len(prompt) :] == answer


def test_shards_resume_and_give_the_same_text(tiny: LLM, tiny_data: Path, tmp_path: Path) -> None:
    prompts = make_prefixes([TokenStream.open(tiny_data, whole=False)], (4, 12), 100)

    def made(name: str, **more: object) -> TokenStream:
        path = regenerate(tiny, prompts, tmp_path / name, 200, 10, seed=3, shard_size=8, **more)  # type: ignore[arg-type]
        return TokenStream.open(path, whole=True)

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 100:
            raise Stopped

    whole = made("a.bin")
    assert int(whole.mask.sum()) >= 200
    with pytest.raises(Stopped):
        made("b.bin", say=stop)
    assert list(tmp_path.glob("b-*.bin"))
    assert made("b.bin").tokens.tolist() == whole.tokens.tolist()
    assert not list(tmp_path.glob("b-*"))


def test_a_shard_holds_no_more_than_is_asked_for_and_is_counted_while_it_is_written(tiny, tiny_data, tmp_path) -> None:
    prompts, asked, said = (
        make_prefixes([TokenStream.open(tiny_data, whole=False)], (4, 12), 100),
        list[int](),
        list[int](),
    )

    def few(rng: np.random.Generator, count: int) -> list[list[int]]:
        asked.append(count)
        return prompts(rng, count)

    regenerate(tiny, few, tmp_path / "x.bin", 200, 10, say=lambda done, total: said.append(done))
    assert asked[0] == 20, "of 10 tokens each"
    assert len({done for done in said if done < 160}) > 5
    assert said[-1] >= 200
    regenerate(tiny, few, tmp_path / "y.bin", 40, 10)
    assert asked[-1] == 16


def test_texts_that_all_loop_and_a_target_that_writes_no_message_are_refused(tiny: LLM, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(regenerate_module, "find_looping", lambda answers: True)
    for prompts, said in (
        ([[5]], "each of 1 answers of the target ends in a repetitive loop"),
        ([], "wrote no usable user message"),
    ):
        with pytest.raises(ParameterError, match=said) as refused:
            regenerate(tiny, lambda rng, count, all=prompts: all, tmp_path / "x.bin", 10, 4)
        assert refused.value.why
        assert refused.value.fix


def test_messages_are_counted_while_they_are_written(llm: LLM, capsys, monkeypatch) -> None:
    monkeypatch.setattr(schedule, "PAUSE", 0.0)
    make_self_prompts(llm)(np.random.default_rng(5), 6)
    assert re.search(r"wrote [1-5] of 6 messages, [\d.,]+ messages/s, .* left", capsys.readouterr().out)


def test_a_target_without_a_chat_template_is_refused(tiny: LLM) -> None:
    with pytest.raises(ParameterError, match="no chat template"):
        make_self_prompts(tiny)
