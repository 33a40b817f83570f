"""Every supported family, from checkpoints on disk, against transformers in float64; and mixtures of experts, of which
only the chosen ones may be read."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.backends.native.kernels import records
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.models.config import DecoderConfig
from slipstream.models.load_settings import LoadSettings
from slipstream.models.module_shape import Experts
from slipstream.models.weights import load_weights
from tests.backends.native.models import chain, config, forest, ids, needs_bfloat16, tree, weights
from tests.checkpoints import FAMILIES
from tests.targets.reference import Reference

Files = Callable[[str], Path]
Ref = Callable[[str, torch.dtype], Reference]

TREE = [-1, 0, -1, 2]


def load(folder: Path, threads: int = 1, **options: Any) -> NativeExecutor:
    found = DecoderConfig.load(folder)
    return NativeExecutor(found, load_weights(folder, found), LoadSettings(threads=threads, **options))


def near(got: torch.Tensor, want: torch.Tensor, allowed: float = 1e-4) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max() / want.abs().max()) <= allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_in_float64(family: str, checkpoint: Files, reference: Ref) -> None:
    """A prompt, a part of it, one token, a tree, and the cache after a rollback."""
    of, text = reference(family, torch.float64), ids(75)
    want, model = of(text), load(checkpoint(family))
    near(model.forward(chain(0, 0, text[:40])).logits, want[:40])
    near(model.forward(chain(0, 40, text[40:69])).logits, want[40:69])
    near(model.forward(chain(0, 69, text[69:70])).logits, want[69:70])
    a, b, c, d, e = text[70:]
    found = model.forward(tree(0, 70, [a, b, c, d, e], TREE)).logits
    near(found[[0, 1, 2]], of([*text[:70], a, b, c])[70:])
    near(found[[0, 3, 4]], of([*text[:70], a, d, e])[70:])
    model.move(0, [73, 74], [71, 72])
    whole = [*text[:70], a, d, e, 5]
    near(model.forward(chain(0, 73, [5])).logits, of(whole)[73:])
    model.forward(chain(0, 30, text[40:60]))  # rolled back, then other tokens
    model.forward(chain(0, 30, whole[30:]))
    model.forward(chain(1, 0, whole))
    near(model.kv(0, 74), model.kv(1, 74))


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"kv_dtype": "float16"}, 1e-2),
        ({"quantize": "w8a16"}, 0.1),
        pytest.param({"dtype": torch.bfloat16}, 0.2, marks=needs_bfloat16),
    ],
)
def test_other_settings_are_close(family, options, allowed, checkpoint, reference):
    """The random weights have a large spread, which amplifies rounding; a router may even choose another expert."""
    text = ids(40)
    want = reference(family, torch.float64)(text)
    got = load(checkpoint(family), **options).forward(chain(0, 0, text)).logits
    differs = ((got - want).abs().amax(1) / want.abs().max()) > allowed
    assert differs.float().mean() <= (0.5 if "moe" in family else 0.0)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_several_sequences_and_threads_choose_their_own_experts(family: str, checkpoint: Files, reference: Ref) -> None:
    of, model = reference(family, torch.float64), load(checkpoint(family), threads=3)
    model._workspace._small = False
    texts = [ids(n, n) for n in (3, 17, 40)]
    found = model.forward(forest([(b, 0, text, []) for b, text in enumerate(texts)])).logits
    near(found, torch.cat([of(text) for text in texts]))


# --- experts that are not chosen are not read ------------------------------------------------------------------------


@contextmanager
def poisoned(model: NativeExecutor, expert: int) -> Iterator[None]:
    """NaN in every weight of an expert of layer 0."""
    own = model._model[0]
    table = (ctypes.c_char * (int(own["expert_count"]) * 2 * records.MATRIX.itemsize)).from_address(int(own["experts"]))
    pair = torch.frombuffer(table, dtype=torch.uint8).numpy().view(records.MATRIX).reshape(-1, 2)[expert]
    regions = [(int(each["weights"]), int(each["outs"] * each["out_bytes"])) for each in pair]
    kept = [ctypes.string_at(*region) for region in regions]
    for address, size in regions:
        ctypes.memset(address, 0xFF, size)
    yield
    for (address, size), content in zip(regions, kept, strict=True):
        ctypes.memmove(address, content, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("per_token", [1, 2])
def test_only_the_chosen_experts_are_read(dtype: torch.dtype, per_token: int) -> None:
    made = config(1, experts=Experts(6, per_token, 48, True, (True,)))
    model = NativeExecutor(made, weights(made, dtype), LoadSettings(threads=1))
    for token in range(3, 9):
        plain = model.forward(chain(0, 0, [token])).logits.clone()
        read = 0
        for expert in range(6):
            with poisoned(model, expert):
                found = model.forward(chain(0, 0, [token])).logits
            read += bool(found.isnan().any())
            assert found.isnan().all() or torch.equal(found, plain)
        assert read == per_token
        assert torch.equal(model.forward(chain(0, 0, [token])).logits, plain)


def test_experts_of_other_rows_do_no_harm() -> None:
    """If an expert is poisoned, the rows that did not choose it do not change."""
    made = config(1, experts=Experts(6, 1, 48, False, (True,)))
    model, text = NativeExecutor(made, weights(made), LoadSettings(threads=1)), ids(24)
    rows = forest([(b, 0, [token], []) for b, token in enumerate(text)])
    plain, chosen = model.forward(rows).logits.clone(), 0
    for expert in range(6):
        with poisoned(model, expert):
            found = model.forward(rows).logits
        bad = found.isnan().any(1)
        assert torch.equal(found[~bad], plain[~bad])
        chosen += int(bad.sum())
    assert chosen == len(text)
