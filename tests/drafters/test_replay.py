"""Replay: a recording is read or refused by line, and its draft tokens are accepted at the set rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.core.params import SamplingParams
from slipstream.drafters.registry import make_drafter
from slipstream.drafters.replay import ReplayConfig, read
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

V = 32
PROMPT = [1, 2, 3]


def target() -> ToyTarget:
    return ToyTarget(V, order=3, seed=1)


def test_a_recording_is_replayed_at_its_rate(tmp_path: Path) -> None:
    """Of 1500 positions, the share of accepted draft tokens among those verified, within 5 standard deviations."""
    text = Oracle(target()).greedy(PROMPT, 1500)
    path = tmp_path / "recorded.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT, "continuation": text}) + "\n\n")
    for rate in (0.0, 0.6, 1.0):
        llm = LLM(target(), "replay", draft_tokens=3, draft_options={"path": path, "rate": rate})
        done = llm.generate(PROMPT, SamplingParams(max_tokens=1500, seed=1))[0]
        assert done.token_ids == text
        verified = sum(min(i + 1, 3) * n for i, n in done.stats.histogram.items()) - done.stats.undrafted
        assert abs(done.stats.accepted / verified - rate) <= 5 * (rate * (1 - rate) / verified) ** 0.5 + 2e-3


def test_a_mapping_works_too_and_nothing_is_drafted_for_unknown_prompts() -> None:
    text = Oracle(target()).greedy(PROMPT, 9)
    drafter = make_drafter("replay", target(), continuations={tuple(PROMPT): text}, rate=1.0)
    done = LLM(target(), drafter, draft_tokens=8).generate([PROMPT, [3, 2, 1]], SamplingParams(max_tokens=9))
    assert done[0].stats.accepted == 7, "the prefill yields the first token, the last needs no draft token"
    assert done[1].stats.proposed == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": [1], "continuation": [2]', "is not JSON"),
        ('{"prompt": [1]}', "has no 'prompt' and 'continuation'"),
        ("[1, 2]", "has no 'prompt' and 'continuation'"),
        ('{"prompt": "text", "continuation": [2]}', "'prompt' that is not a list of token ids"),
        ('{"prompt": [1], "continuation": [2.5]}', "'continuation' that is not a list of token ids"),
        ('{"prompt": [1], "continuation": [-1]}', "'continuation' that is not a list of token ids"),
        ('{"prompt": [true], "continuation": [1]}', "'prompt' that is not a list of token ids"),
        ('{"prompt": [], "continuation": [1]}', "has an empty prompt"),
        ('{"prompt": [7], "continuation": [9]}', "gives a second continuation"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text('{"prompt": [7], "continuation": [8]}\n\n' + line + "\n")
    with pytest.raises(ParameterError, match=f"line 3 of the recording .* {says}"):
        read(path)


def test_an_invalid_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot be read"):
        read(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ParameterError, match="is empty"):
        read(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParameterError, match="cannot be read"):
        read(tmp_path / "binary.jsonl")
    with pytest.raises(ParameterError, match="neither continuations nor a path"):
        make_drafter("replay", target())
    with pytest.raises(ParameterError, match="continuations and a path"):
        ReplayConfig(continuations={(1,): [2]}, path="x.jsonl")
    with pytest.raises(ParameterError, match="rate is 2"):
        make_drafter("replay", target(), continuations={(1,): [2]}, rate=2)
    with pytest.raises(ParameterError, match=rf"id {V}.*0\.\.{V - 1}"):
        make_drafter("replay", target(), continuations={(1,): [V]})
    with pytest.raises(ParameterError, match="did you mean 'path'"):
        make_drafter("replay", target(), pth="x")
