"""`verify` of a target with a KV cache in q8_0: its reference, the same target without drafts, has such a cache too. So
nothing is reported because the cache is quantised, and a fault in it is found."""

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.backends.native import paged
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.kv.blocks import BLOCK
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.verify.verification import VerifyConfig, verify

PROMPTS = PromptSet("made up", [Prompt([5, 6, 7], "a", "one"), Prompt([40, 41, 42, 43], "b", "two")], "0")
CONFIG = VerifyConfig(SamplingParams(max_tokens=16, ignore_eos=True), ("greedy",))


def keep_stale_scales(executor: NativeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is written again, after its draft token was rejected, keeps the scales of that token."""
    forward, ends = executor.forward, dict[int, int]()

    def run(batch: Any, *args: Any) -> Any:
        again: list[int] = []
        for b, (seq_id, past) in enumerate(zip(batch.seq_ids, batch.past, strict=True)):
            end = past + batch.splits[b + 1] - batch.splits[b]
            held = len(executor._pool.tables.get(seq_id, ())) * BLOCK
            again += executor._pool.places(seq_id, range(past, min(ends.get(seq_id, 0), end, held))) if held else []
            ends[seq_id] = end
        blocks, slots = [place // BLOCK for place in again], [place % BLOCK for place in again]
        keys = [data["scales"] for data in executor._blocks.keys]
        kept = [scales[blocks, :, :, slots] for scales in keys]
        out = forward(batch, *args)
        for scales, old in zip(keys, kept, strict=True):
            scales[blocks, :, :, slots] = old
        return out

    monkeypatch.setattr(executor, "forward", run)


def move_integers_alone(executor: NativeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of a tree that is kept leaves its scales behind."""
    views = paged._by_slot
    monkeypatch.setattr(paged, "_by_slot", lambda data, axis: views(data, axis)[:1])


FAULTS = {"": None, "stale scales": keep_stale_scales, "moves without scales": move_integers_alone}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_scales_is_found_and_nothing_without_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("embedded", "eagle3", executor="native", threads=1, kv_dtype="q8_0", draft_tokens=4)
    llm.use("eagle3", shape="tree", width=2, nodes=8)
    plant = FAULTS[fault]
    if plant is not None:
        plant(llm.target.executor, monkeypatch)  # type: ignore[attr-defined]
    result = verify(llm, PROMPTS, CONFIG)
    assert result.data.control.verdict == "identical"
    assert result.provenance["kv_dtype"] == "q8_0"
    assert result.data.verdict == ("BUG" if fault else "ok")
