"""DFlash heads on the native backend against those on torch (tests/drafters/test_dflash.py recomputes these)."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.backends.native.native_heads import NativeDFlash
from slipstream.backends.native.packed_weights import Layout, SharedTables
from slipstream.backends.native.quantise import quantise_blocks, quantise_rows
from slipstream.backends.table import backend_for_head
from slipstream.backends.torch.torch_heads import TorchDFlash
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.errors import ParameterError, TargetError
from slipstream.executor.executor import Batch
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_rows import DFlashRuntime
from tests.backends.native.models import forest
from tests.heads.tiny_heads import dflash_config, dflash_head, head_host
from tests.targets.reference import assert_close

V, TARGET = 40, 6
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {}, "causal": {"causal": True}, "own tables": {"own_embedding": True, "own_lm_head": True},
    "dspark": {"from_anchor": True, "markov_rank": 3},
    "one layer, two taps": {"taps": (1, 2), "decoder": {"layers": 1, "windows": (None,)}},
    "one key": {"decoder": {"kv_heads": 1}}, "a key for each query": {"decoder": {"kv_heads": 4, "qk_norm": False}},
    "biases": {"decoder": {"qkv_bias": True, "o_bias": True, "mlp_bias": True}},
    "one layer with a window": {"decoder": {"windows": (5, None)}, "causal_windows": True},
    "windows on both sides": {"decoder": {"windows": (4, 33)}},
    "causal windows, a draft vocabulary": {
        "decoder": {"windows": (4, 33)}, "causal": True, "draft_vocab": 24, "own_lm_head": True, "markov_rank": 3,
    },
}  # fmt: skip


WIDE: dict[str, Any] = {
    "width": 32, "decoder": {"intermediate_size": 64}, "target_hidden": 32, "markov_rank": 32,
}  # fmt: skip
"""Rows that every format can hold."""


def made(kind: str = "dspark", spread: float = 0.4, width: int = 8, **changes: Any) -> DFlashHead:
    return dflash_head(dflash_config(V, width, TARGET, **KINDS[kind] | changes), spread=spread)


def taps_of(head: DFlashHead, rows: int, seed: int = 0) -> Tensor:
    width = len(head.config.taps) * head.config.target_hidden
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def read(runtime: DFlashRuntime, parts: list[tuple[int, int, Tensor]], begin: int = 0) -> None:
    """Run context rows: (sequence, slot of the first, taps) of each. begin: position of slot 0."""
    batch = forest([(seq, at, [0] * len(taps), []) for seq, at, taps in parts])
    batch = replace(batch, positions=[begin + at for at in batch.positions])
    runtime.extend(batch, torch.cat([taps for _, _, taps in parts]))


def blocks(runtime: DFlashRuntime, last: dict[int, tuple[int, int]], steps: int = 0, begin: int = 0) -> Tensor:
    """Logits [B, steps or K, V] of blocks; last: of each sequence, (rows of its context, last token)."""
    c = runtime.config
    n, sees = c.block, None if c.causal else torch.ones(c.block, c.block, dtype=torch.bool)
    batch = Batch(
        [*last], torch.tensor([t for _, token in last.values() for t in [token] + [c.mask_token] * (n - 1)]),
        [begin + at + i for at, _ in last.values() for i in range(n)], range(0, n * len(last) + 1, n),
        [at for at, _ in last.values()], [sees] * len(last),
        [n * (b + 1) - c.depth + k for b in range(len(last)) for k in range(steps or c.depth)],
    )  # fmt: skip
    return runtime.run_blocks(batch).view(len(last), steps or c.depth, -1).clone()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_torch_after_every_change_of_the_context(kind: str) -> None:
    """Ragged, across KV blocks: context that is taken back, rows of an earlier block that are overwritten, a sequence
    that is released and one that begins later."""
    head = made(kind)
    runtimes: list[Any] = [NativeDFlash(head), TorchDFlash(head)]
    first, second, third = (taps_of(head, rows, seed) for seed, rows in enumerate((90, 33, 12)))
    compared = []
    for runtime in runtimes:
        logits = []
        read(runtime, [(0, 0, first[:60]), (1, 0, second[:1])])
        logits.append(blocks(runtime, {0: (60, 3), 1: (1, 7)}))
        read(runtime, [(1, 1, second[1:33]), (0, 60, first[60:71])])
        logits.append(blocks(runtime, {1: (33, 5), 0: (71, 2)}, 2))
        read(runtime, [(0, 55, first[55:90])])  # from an earlier row on
        runtime.release(1)
        read(runtime, [(1, 0, third)])
        logits.append(blocks(runtime, {0: (90, 1), 1: (12, 1)}))
        compared.append([*logits, runtime.kv(0, 90), runtime.kv(1, 12)])
        runtime.release(0)
        read(runtime, [(0, 0, first[:40])], begin=50)  # first seen in its middle
        compared[-1].append(blocks(runtime, {0: (40, 1)}, begin=50))
        if head.config.markov_rank:
            after = runtime.after(logits[0][:, 1], torch.tensor([4, 39]))
            assert (after.isinf().sum(-1) == V - (head.config.draft_vocab or V)).all()
            compared[-1].append(after.nan_to_num(neginf=0.0))
    for actual, wanted in zip(*compared, strict=True):
        assert_close(actual, wanted, 2e-5)


@pytest.mark.parametrize("quantize", [None, "w8a16", "w8a8", "w4a8"])
def test_a_row_is_the_same_bit_for_bit_for_any_batch_and_number_of_threads(quantize: str | None) -> None:
    head = made(**WIDE)
    form = LoadSettings(quantize=quantize).weight_format
    one, three = NativeDFlash(head, 1, form), NativeDFlash(head, 3, form)
    three._workspace._small = False
    texts = [taps_of(head, rows, seed) for seed, rows in enumerate((7, 60, 12))]
    for runtime in (one, three):
        read(runtime, [(b, 0, taps) for b, taps in enumerate(texts)])
    last = {b: (len(taps), b) for b, taps in enumerate(texts)}
    together = blocks(one, last)
    assert torch.equal(blocks(three, last), together)
    after = one.after(together[:, 1], torch.tensor([5, 6, 7]))
    assert torch.equal(three.after(together[:, 1], torch.tensor([5, 6, 7])), after)
    for b, taps in enumerate(texts):
        one.release(b)
        for i in range(len(taps)):
            read(one, [(b, i, taps[i : i + 1])])
        assert torch.equal(blocks(one, {b: last[b]})[0], together[b])
        assert torch.equal(one.after(together[b : b + 1, 1], torch.tensor([5 + b]))[0], after[b])


@pytest.mark.parametrize(("quantize", "tolerance"), [(None, 2e-5), ("w8a16", 1e-3), ("int8", 5e-2), ("int4", 5e-2)])
def test_a_head_beside_a_native_target_reads_its_tables_and_has_its_own_weights_in_few_bits(quantize, tolerance):
    head = made(**WIDE)
    layout, (embedding, output) = Layout(), (head.embedding, head.output_head)
    tables = SharedTables(layout.embedding({"": embedding}, ""), layout.matrix(output, "float32"), layout)
    host = head_host(32, 3, V, torch.float32, output, "native", tables)
    backend, settings = backend_for_head(head.config.decoder, host, quantize)
    runtime: Any = backend.dflash(head, host, settings)
    record = runtime._head[0]["decoder"]
    assert (record["embed"], record["head"]) == (tables.embedding, tables.head)  # not stored twice
    for matrix in (p for p in head.parameters() if p.ndim == 2 and quantize):
        if matrix is not head.markov_head["markov_w1"].weight:  # an embedding
            values, scale = quantise_rows(matrix)
            few = torch.from_numpy(quantise_blocks(matrix, 4).floats()) if quantize == "int4" else None
            matrix.copy_(values * scale if few is None else few)
    exact, taps = TorchDFlash(head), taps_of(head, 9)
    for each in (runtime, exact):
        read(each, [(0, 0, taps)])
    actual, wanted = (blocks(each, {0: (9, 5)})[0] for each in (runtime, exact))
    assert_close(actual, wanted, tolerance)
    actual, added = (each.after(wanted, torch.arange(6)) for each in (runtime, exact))
    assert_close(actual - wanted, added - wanted, tolerance)


def test_weights_need_the_memory_of_their_bits_and_those_of_16_bits_are_exact() -> None:
    """Rows are as long as the groups of every format, which a shorter row is padded to; processors differ in them."""
    formats = [LoadSettings(quantize=name).weight_format for name in (None, "w8a16", "w8a8", "w4a8")]
    whole = math.lcm(*(form.group or form.step for form in formats if form is not None))
    head = made(**WIDE | dict.fromkeys(("width", "target_hidden", "markov_rank"), whole))
    sizes = [NativeDFlash(head, None, form)._layout.nbytes for form in formats]
    for parameter in head.parameters():
        parameter.copy_(parameter.bfloat16())
    head.borrow(head.embedding.bfloat16(), head.output_head.bfloat16().double())
    runtimes: list[Any] = [NativeDFlash(head), TorchDFlash(head)]
    for runtime in runtimes:
        read(runtime, [(0, 0, taps_of(head, 9))])
    assert_close(*(blocks(runtime, {0: (9, 5)}) for runtime in runtimes), 2e-5)
    halves = runtimes[0]._layout.nbytes
    assert halves < 0.6 * sizes[0]
    assert sizes[1] == sizes[2] < 0.65 * halves
    assert sizes[3] < 0.75 * sizes[2]


def test_bits_follow_those_of_the_target_and_unsupported_heads_run_on_torch(caplog: pytest.LogCaptureFixture) -> None:
    head = made().float()
    host = head_host(8, 3, V, torch.float32, torch.zeros(V, 8), "native")
    for stored, wanted in ((None, None), ("w8a16", "int8"), ("Q4_K_M", "int4")):
        quantised = replace(host, runtime=replace(host.runtime, quantize=stored))
        assert backend_for_head(head.config.decoder, quantised)[1].quantize == wanted
    narrow = made(decoder={"head_dim": 4}).float()
    backend, settings = backend_for_head(narrow.config.decoder, host)
    assert backend.dflash(narrow, host, settings).name == "torch"
    assert "heads of 4 values are not a multiple of 16" in caplog.text
    backend, settings = backend_for_head(narrow.config.decoder, host, "int8")
    with pytest.raises(ParameterError, match="quantize='int8' was asked of a head that torch runs"):
        backend.dflash(narrow, host, settings)


@pytest.mark.parametrize("runs", [NativeDFlash, TorchDFlash])
def test_a_token_outside_of_the_embedding_is_refused(runs: Any) -> None:
    runtime = runs(made())
    for token in (-1, V, 1 << 40):
        with pytest.raises(TargetError, match="outside the model's embedding"):
            blocks(runtime, {0: (0, token)})
    assert blocks(runtime, {0: (0, V - 1)}).isfinite().all()
