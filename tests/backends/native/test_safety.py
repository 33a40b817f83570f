"""No prompt, draft or pair of models makes a kernel read memory outside the model."""

import contextlib
import ctypes
import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backends.native import native_executor as native_executor, paged
from slipstream.backends.native.kernels import processor
from slipstream.backends.native.native_heads import NativeEagle
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import ParameterError, TargetError
from slipstream.models.executor import Batch
from slipstream.targets.decoder import Decoder
from tests.backends.native.models import (
    VOCAB,
    chain,
    executor,
    forest,
    ids,
    needs_bfloat16,
    tree,
)
from tests.checkpoints import Tiny, make_model
from tests.heads.tiny_heads import config as head_config, head

OUTSIDE = [-1, -VOCAB, VOCAB, VOCAB + 5, VOCAB + 1000, 1 << 40, -(1 << 62)]
FORMS = ["float32", "float16", "w8a8", pytest.param("bfloat16 products", marks=needs_bfloat16)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["llama", "qwen"])  # untied and tied embeddings
def test_a_token_outside_of_the_vocabulary_is_an_error_and_nothing_is_read(shape: str, form: str) -> None:
    model, text = executor(shape, form), ids(6)
    want = model.forward(chain(0, 0, text)).logits.clone()
    for token in OUTSIDE:
        for batch in (
            chain(0, 0, [token]),
            chain(0, 0, [*text[:5], token]),
            tree(0, 3, [3, token, 4], [-1, -1]),
            forest([(0, 0, [3], []), (1, 0, [token], [])]),
        ):
            with pytest.raises(TargetError, match="outside the model's embedding"):
                model.forward(batch)
            if all(t is None for t in batch.trees):
                with pytest.raises(TargetError, match="outside the model's embedding"):
                    model.decode_steps(batch, 2)
    assert torch.equal(model.forward(chain(0, 0, text)).logits, want)
    assert model.forward(chain(0, 0, [VOCAB - 1, 0])).logits.isfinite().all()


def test_a_learned_position_after_the_last_one_is_an_error() -> None:
    model = executor("gpt2", context=20)
    text = ids(22)
    model.forward(chain(0, 0, text[:20]))
    for batch in (chain(0, 0, text[:21]), chain(0, 20, text[20:21]), tree(0, 18, text[:4], [-1, 0, 1])):
        with pytest.raises(TargetError, match="after the last one"):
            model.forward(batch)
    with pytest.raises(TargetError, match="after the last one"):
        model.decode_steps(chain(0, 17, text[17:19]), 3)
    model.decode_steps(chain(0, 17, text[17:19]), 2)
    negative = Batch([0], torch.tensor([3]), [-1], [0, 1], [0], [None], [0])
    with pytest.raises(TargetError, match="after the last one"):
        model.forward(negative)
    with pytest.raises(TargetError, match="20 learned positions"):
        Decoder(model).run([Sequence([1] * 21)], _no_draft())


def _no_draft() -> Draft:
    return Draft.empty(1)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("own", [True, False])
def test_a_head_refuses_tokens_outside_of_its_embedding(version: int, own: bool) -> None:
    changes = {"own_embedding": own, "draft_vocab": 24} if version == 3 else {}
    made = head_config(version, 40, target=8, decoder={"head_dim": 16}, **changes)
    runtime = NativeEagle(head(made))
    width = len(made.taps) * made.target_hidden
    batch = forest([(0, 0, [3, 4, 5], [])])
    fine = runtime.decode_steps(_last(batch), torch.ones(3, width), 2)[1].clone()
    for token in (-1, 40, 45, 1040, 1 << 40):
        bad = _last(forest([(0, 0, [3, token, 5], [])]))
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.decode_steps(bad, torch.ones(3, width), 2)
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.extend(bad, torch.ones(3, width))
        with pytest.raises(TargetError, match="outside the model's embedding"):
            runtime.extend(bad, torch.ones(3, made.hidden_size), own=True)
    assert torch.equal(runtime.decode_steps(_last(batch), torch.ones(3, width), 2)[1], fine)


def _last(batch: Batch) -> Batch:
    return dataclasses.replace(batch, select=[s - 1 for s in batch.splits[1:]])


def test_hidden_states_that_overflow_are_refused() -> None:
    model = executor()
    embed = model._model[0]["embed"]
    row = (ctypes.c_float * (5 * int(embed["width"]))).from_address(int(embed["values"]))
    row[4 * int(embed["width"])] = math.inf  # of token 4
    with pytest.raises(TargetError, match="not finite"):
        model.decode_steps(chain(0, 0, [3, 4]), 2)
    with pytest.raises(TargetError, match="not finite"):
        Decoder(model).run([Sequence([3, 4])], _no_draft())
    out = model.forward(forest([(0, 0, [3, 4], []), (1, 0, [3, 5], [])])).logits
    assert not out[1].isfinite().any()
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_key_or_value_that_is_not_finite_is_detected_in_the_logits(values: bool, threads: int) -> None:
    """Whether the context is split among threads or not."""
    model = executor(threads=threads)
    for past in (40, 600):
        for strange in (math.nan, math.inf) if values else (math.nan,):
            model.release(0)
            model.forward(chain(0, 0, ids(past), []))
            block = model._pool.tables[0][0]
            if values:
                model._blocks.values[0][block, :, 7] = strange
            else:
                model._blocks.keys[0][block, :, :, 7] = strange
            assert not model.forward(chain(0, past, [5])).logits.isfinite().all()


@pytest.mark.parametrize("allocations", range(5))
def test_an_interrupt_while_the_cache_grows_leaves_every_sequence_readable(monkeypatch, allocations):
    """Some layers then have new arrays, others the old ones."""
    model, text = executor(), ids(60)
    want = model.forward(chain(0, 0, text)).logits.clone()
    model.forward(chain(1, 0, text[:59], []))
    empty, left = np.empty, [allocations]

    def interrupted(*args: Any, **kwargs: Any) -> np.ndarray:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return empty(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(paged.np, "empty", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            model._pool.reserve(2, 0, 2000)
    for _ in range(2):
        assert torch.equal(model.forward(chain(1, 59, text[59:])).logits, want[59:])
        assert torch.equal(model.kv(0, 60), model.kv(1, 60))
        assert torch.equal(model.forward(chain(3, 0, text)).logits, want)
        model.forward(chain(2, 0, ids(700), []))  # grows to its end


# --- processors ------------------------------------------------------------------------------------------------------


def test_without_float16_instructions_weights_are_converted_and_logits_are_the_same(monkeypatch):
    text = ids(30)
    plain = executor(form="float16")
    want = plain.forward(chain(0, 0, text)).logits.clone()
    monkeypatch.setattr(processor, "converts_half", lambda: False)
    model = executor(form="float16")
    assert torch.equal(model.forward(chain(0, 0, text)).logits, want)
    assert model.memory()["weights"] > 1.8 * plain.memory()["weights"]
    monkeypatch.setattr(native_executor, "converts_half", lambda: False)
    with pytest.raises(ParameterError, match="F16C"):
        executor(form="float16 with a cache in float16")


# --- incompatible pairs ----------------------------------------------------------------------------------------------

PAIRS = """
import sys
from slipstream import LLM, SamplingParams, SlipstreamError
from slipstream.targets.decoder import Decoder

folder, narrow = sys.argv[1:]
target = Decoder.load(folder, "native", threads=1)
params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
prompt = [*range(300, 320), 5, 6]
want = LLM(target).generate([prompt], params)[0].token_ids
for draft in (narrow, Decoder.load(narrow, "native", threads=1)):
    try:
        llm = LLM(folder, draft, executor="native", threads=1)
        print("the same text" if llm.generate([prompt], params)[0].token_ids == want else "another text")
    except SlipstreamError as error:
        print("refused:", error)
"""


def test_a_draft_of_fewer_ids_than_its_target_is_refused_or_harmless(tiny: Tiny, tmp_path: Path) -> None:
    """In a separate process, because a crash would end the tests."""
    make_model(tmp_path / "draft", vocab_size=300)
    found = subprocess.run(
        [sys.executable, "-c", PAIRS, tiny.target, tmp_path / "draft"], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(("the same text", "refused:")) for line in lines)
