"""`MemoryPlan`: bytes before loading are those after loading, and what cannot fit is refused early."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.drafters.draft_plan import DraftPlan
from slipstream.drafters.registry import make_drafter
from slipstream.errors import LoadError, ParameterError
from slipstream.heads.dflash_format import save_dflash
from slipstream.heads.eagle_format import save_eagle
from slipstream.heads.recognition import recognise
from slipstream.host.machine import available_bytes
from slipstream.kv.blocks import BLOCK
from slipstream.targets.decoder import Decoder
from slipstream.targets.describe import describe
from slipstream.targets.described import MemoryPlan, plan
from tests.heads.tiny_heads import config, dflash_config, dflash_head, head
from tests.heads.tiny_mtp import write
from tests.tiny_checkpoints import Tiny

CPU = {"executor": "torch", "device": "cpu", "dtype": "float64"}


def test_the_bytes_before_loading_are_those_after_loading_and_fewer_with_fewer_bits(tiny: Tiny) -> None:
    settings = LoadSettings(**CPU)
    seen = plan(describe(tiny.target, settings), 320, [describe(tiny.draft, settings.of_draft())])
    target, draft = (Decoder.load(folder, **CPU, kv_tokens=320) for folder in (tiny.target, tiny.draft))
    for model, bytes_ in ((target, seen.weights), (draft, seen.draft)):
        assert bytes_ == pytest.approx(model.executor.memory()["weights"], rel=0.05)
    assert seen.kv == 320 * seen.per_token
    assert seen.headroom == seen.available - seen.weights - seen.draft - seen.kv

    def of(**load: Any) -> MemoryPlan:
        return plan(describe(tiny.target, LoadSettings(executor="native", device="cpu", **load)), 64)

    assert of().draft == 0
    assert of(kv_dtype="float16").per_token * 2 == of().per_token
    small = Decoder.load(tiny.target, "native", kv_dtype="q8_0", kv_tokens=64).executor
    assert of(kv_dtype="q8_0").per_token * BLOCK == small._blocks.block_bytes
    assert of(quantize="w8a16").weights < of().weights


@pytest.mark.parametrize("count", [1, 2])
def test_mtp_layers_count_with_a_cache_of_their_own(count: int, tmp_path: Path) -> None:
    folder = write("glm4_moe", tmp_path, count)
    target = describe(folder, LoadSettings(device="cpu", dtype="float64"))
    without, seen = (plan(target, 320, *DraftPlan.of(d).ready(target, target.settings).loads) for d in ("ngram", "mtp"))
    drafter = make_drafter("mtp", target.load())
    LLM(folder, drafter, device="cpu", dtype="float64").generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    blocks = drafter.layers._blocks
    assert seen.per_token - without.per_token == blocks.nbytes // blocks.layers[0].shape[1]
    weights = sum(weight.nbytes for weight in drafter.layers.model.layers.parameters())
    assert without.draft == 0
    assert seen.draft == pytest.approx(weights, rel=0.3)


WIDE = {"decoder": {"heads": 6, "head_dim": 64, "intermediate_size": 1024}}
"""Sizes of layers for the embedded target."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An EAGLE-1 and a DFlash head, never trained, for the embedded target."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("eagle", "dflash")}
    save_eagle(head(config(1, 4096, 384, 384, **WIDE)), places["eagle"])
    save_dflash(dflash_head(dflash_config(4096, 384, 384, taps=(1, 2, 3), **WIDE)), places["dflash"])
    return places


@pytest.mark.parametrize(
    ("name", "executor", "of_target", "quantize"),
    [*((name, "native", None, bits) for name in ("eagle3", "medusa", "eagle", "dflash") for bits in (None, "int4")),
     ("eagle3", "native", "int8", None), *((name, "torch", None, None) for name in ("eagle3", "eagle", "dflash"))],
)  # fmt: skip
def test_the_bytes_of_a_head_are_those_of_its_runtime(name, executor, of_target, quantize, heads) -> None:
    """eagle3 and medusa: those that ship, without a path."""
    settings = LoadSettings(executor=executor, device="cpu", quantize=of_target)
    options = {"head": str(heads[name])} if name in heads else {}
    target = describe("embedded", settings)
    needed, without = (
        plan(target, 0, *DraftPlan.of(draft).ready(target, settings.of_draft()).loads)
        for draft in ((name, options | {"quantize": quantize}), None)
    )
    drafter = make_drafter(name, target.load(), quantize=quantize, **options)
    runtime = drafter.heads if name == "medusa" else drafter.runtime
    blocks = runtime._layout.nbytes if executor == "native" else sum(tensor.nbytes for tensor in tensors_of(runtime))
    assert needed.draft == pytest.approx(blocks, rel=0.01)
    assert without.draft == 0
    layers = 0 if name == "medusa" else runtime.config.decoder.layers
    assert needed.per_token - without.per_token == layers * 2 * 2 * 64 * 4  # two KV heads


def tensors_of(runtime: Any) -> list[torch.Tensor]:
    """Weights of a head in PyTorch, and the tables of the target that it has copies of."""
    tables = getattr(runtime.head, "_borrowed", ())  # an EAGLE head reads them when it first needs them
    borrowed = map(runtime.head.borrowed, tables) if isinstance(tables, dict) else tables
    return list({t.data_ptr(): t for t in (*runtime.head.parameters(), *borrowed) if t is not None}.values())


def test_the_largest_cache_leaves_a_tenth_free() -> None:
    memory_plan = MemoryPlan(weights=400, draft=100, per_token=1, kv_tokens=0, available=1000)
    assert memory_plan.most_tokens == 384  # (900 - 500) in blocks of 32
    assert MemoryPlan(950, 0, 1, 0, 1000).most_tokens == MemoryPlan(2000, 0, 0, 0, 1000).most_tokens == 0


def test_states_of_recurrent_layers_count_and_one_that_is_larger_than_memory_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = describe(checkpoint("qwen3.5"), LoadSettings(executor="native"))
    seen = plan(target, 3200, [describe(checkpoint("lfm2"), LoadSettings(executor="native"))], sequences=3)
    states, of_draft = (Decoder.load(checkpoint(name), "native").executor._states for name in ("qwen3.5", "lfm2"))
    assert seen.per_sequence == states.bytes_each + of_draft.bytes_each
    assert seen.states == 3 * seen.per_sequence
    assert seen.snapshots == min(seen.kv, 64 * seen.per_sequence)
    assert seen.headroom == seen.available - seen.weights - seen.draft - seen.kv - seen.states - seen.snapshots
    largest = replace(seen, kv_tokens=seen.most_tokens)
    assert 0 <= largest.headroom - 0.1 * seen.available < 2 * 32 * seen.per_token
    assert plan(describe(checkpoint("qwen3.5"), LoadSettings(executor="transformers")), 64).per_sequence == 0
    free = seen.weights + states.bytes_each // 2
    monkeypatch.setattr("slipstream.targets.described.available_bytes", lambda device: free)
    with pytest.raises(
        LoadError, match=r"for weights, \S+ kB for the recurrent states of a sequence \(\S+ kB each\) are needed"
    ):
        LLM(target)


def test_what_cannot_fit_is_refused_before_anything_is_read(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.targets.described.available_bytes", lambda device: 2**20)
    monkeypatch.setattr("slipstream.targets.decoder.load_weights", lambda *_, **__: pytest.fail("loaded"))
    said = r"1\.0 MB of memory are free, but .*.* weights, .* the draft's weights, .* a KV cache for 100000 tokens"
    with pytest.raises(LoadError, match=said):
        LLM(tiny.target, tiny.draft, **CPU, kv_tokens=100_000)
    with pytest.raises(LoadError, match=r"for weights, \S+ .B for a KV cache"):
        LLM(tiny.target, **CPU, kv_tokens=100_000)


def test_the_kind_of_a_file_that_is_larger_than_memory_is_known(tmp_path: Path) -> None:
    """Its weights are not read: their size is what refuses it."""
    size = 4 * available_bytes(torch.device("cpu"))
    table = json.dumps({"norm.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(table)) + table)
        file.truncate(8 + len(table) + size)  # holes take no room
    (tmp_path / "config.json").write_text("{}")
    assert recognise(Checkpoint.open(tmp_path)) is None


@pytest.mark.parametrize("wrong", [0, 31, -1, 1.5, "many"])
def test_a_size_that_holds_no_block_is_refused(tiny: Tiny, wrong: Any) -> None:
    with pytest.raises((ParameterError, LoadError), match="kv_tokens"):
        LLM(tiny.target, **CPU, kv_tokens=wrong)


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_every_backend_has_the_size_that_was_asked_for(executor: str) -> None:
    llm = LLM("embedded", "embedded", executor=executor, device="cpu", threads=1, kv_tokens=100)
    memory = llm.target.capabilities.memory
    assert (memory.block, memory.capacity) == (32, 4)
