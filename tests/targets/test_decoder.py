"""The decoder against transformers, for every family and every executor."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import TargetError
from slipstream.targets.decoder import Decoder
from tests import tiny_families
from tests.targets.conformance import CHAIN, TREE, Case, Conformance
from tests.targets.reference import Reference
from tests.tiny_checkpoints import FAMILIES


@pytest.mark.parametrize("case", [*FAMILIES, *tiny_families.FAMILIES], indirect=True)
class TestDecoder(Conformance):
    def test_KV_after_each_step_equals_a_fresh_prefill(self, case: Case) -> None:
        seq = case.prefilled(5)
        for path in ([0, 3], [], [1, 4, 5], [0, 2, 6]):
            draft = case.forest([TREE])
            case.run([seq], draft)
            case.keep([seq], draft, [path])
            case.check_kv([seq])

    def test_prefill_in_pieces_equals_prefill_at_once(self, case: Case) -> None:
        pieces = Decoder(case.target.executor, chunk=5)
        case.target = pieces
        long, short = case.sequence(23), case.sequence(4)
        draft = case.forest([TREE, CHAIN])
        case.run([long, short], draft)
        case.keep([long, short], draft, [[1, 4], [0]])
        case.run([long, short], case.forest([CHAIN, TREE]))

    def test_taps_equal_the_hidden_states_of_transformers(self, case: Case) -> None:
        layers = case.target.config.layers

        def hidden(text: list[int]) -> dict[int, torch.Tensor]:
            states = case.oracle.hidden(text)
            return {tap: states[tap] for tap in (0, 1, layers - 1, -1)}

        for chunk in (512, 4):
            case.target = Decoder(case.target.executor, chunk)
            case.check_taps((0, 1, layers - 1, layers, -1), hidden)

    def test_two_slices_of_layers_equal_the_whole(self, case: Case) -> None:
        layers = case.target.config.layers
        for chunk in (512, 4):
            target = Decoder(case.target.executor, chunk)
            seq = case.sequence(9)
            draft = case.forest([TREE])
            for cut in range(1, layers):
                early = target.exits.run_layers([seq], draft, (0, cut))
                stream = early.hidden[cut].clone()
                late = target.exits.run_layers([seq], draft, (cut, layers), stream)
                text = seq.tokens + [draft.ids[i] for i in draft.ancestors(0, 6)]
                case.same(late.logits[7], case.oracle([text])[0][-1])
                exit_logits = early.logits.clone()
                whole = target.run([seq], draft)
                case.same(late.logits.clone(), whole.logits)
                assert exit_logits.shape == whole.logits.shape


@pytest.mark.parametrize("case", ["mistral-window", "qwen2-window"], indirect=True)
def test_a_window_edge_inside_a_draft(case: Case) -> None:
    """Prompts that end before, at and after the edge of the window, each with a chain and a tree across it."""
    for n in range(1, 13):
        seq = case.prefilled(n)
        for shape, path in ((CHAIN, [0, 1]), (TREE, [1, 4, 5])):
            draft = case.forest([shape])
            case.run([seq], draft)
            case.keep([seq], draft, [path])
        case.run([seq], Draft.empty(1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.1), (torch.float32, 1e-4)])
def test_other_precisions_run_and_return_float32_logits(dtype, tolerance, checkpoint, reference):
    target = Decoder.load(checkpoint("qwen3"), "torch", dtype, "cpu")  # type: ignore[arg-type]
    case = Case(target, reference("qwen3", torch.float32), tolerance)
    seq = case.sequence(8)
    logits = target.run([seq], case.forest([CHAIN])).logits
    assert logits.dtype == torch.float32
    case.same(logits[:1], case.oracle([seq.tokens])[0][-1:])


def test_logits_that_are_not_finite_name_the_sequence(checkpoint: Callable[..., object]) -> None:
    target = Decoder.load(checkpoint("llama"), "torch", device="cpu")  # type: ignore[arg-type]
    target.executor.final_norm.weight = target.executor.final_norm.weight * torch.nan  # type: ignore[attr-defined]
    seq = Sequence([1, 2])
    with pytest.raises(TargetError, match=rf"\[{seq.id}\]"):
        target.run([seq], Draft.empty(1))


def test_from_module_equals_load(reference: Callable[..., Reference]) -> None:
    for name in ("mixtral", "gpt2", "qwen2-window"):
        oracle = reference(name, torch.float64)
        case = Case(Decoder.of_module(oracle.model, LoadSettings(executor="torch")), oracle, 1e-9)
        case.run([case.prefilled(9)], case.forest([TREE]))


def test_auto_runs_mixtures_of_experts_and_gpt2_natively(checkpoint: Callable[[str], Path]) -> None:
    pytest.importorskip("numba")
    for family in ("mixtral", "gpt2"):
        assert Decoder.load(checkpoint(family), device="cpu").executor.runtime.backend == "native"
