"""Draft tokens on which the model overflows, in PyTorch."""

import math
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.errors import TargetError
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface.huggingface_target import of_module
from tests.drafters.scripted_drafters import ScriptedDrafter, replay
from tests.spying import spied
from tests.targets.huggingface.architectures import VOCAB, random_model
from tests.targets.reference import assert_spoils_only_what_sees_it
from tests.tiny_checkpoints import random_llama

SPOILT = 7
TREES = {"chain": [-1, 0, 1, 2], "siblings": [-1, -1, -1, -1], "two chains": [-1, 0, -1, 2]}


def overflowing(module: Any) -> Any:
    with torch.no_grad():
        module.get_input_embeddings().weight[SPOILT] = math.inf
    return module


def decoder(**shape: Any) -> Target:
    """Our decoder on the torch executor, which checks weights when it loads them: so it is spoilt after that."""
    module = random_llama(vocab_size=VOCAB, hidden_size=32, **shape).double()
    loaded = Decoder.of_module(module, LoadSettings(executor="torch"))
    loaded.executor.embedding = loaded.executor.embedding.clone()
    loaded.executor.embedding[SPOILT] = math.inf
    return loaded


TARGETS = {
    "decoder": lambda: decoder(), "decoder, many rows": lambda: decoder(num_key_value_heads=1),
    "packed": lambda: spoilt_after("stablelm"), "packed, capped scores": lambda: spoilt_after("gemma2"),
    "packed, sinks": lambda: spoilt_after("gpt-oss"), "packed, gathered": lambda: spoilt_after("deepseek-v3"),
    "packed, dense": lambda: spoilt_after("gpt-j"), "packed, dense, falcon": lambda: spoilt_after("falcon"),
}  # fmt: skip


CHAINS = {"one each": lambda: spoilt_after("bloom"), "states": lambda: spoilt_after("lfm2")}


def spoilt_after(name: str) -> Target:
    """The trials at load use every id."""
    module = random_model(name)
    target = of_module(module)
    overflowing(module)
    return target


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", TARGETS)
def test_a_draft_token_that_overflows_spoils_no_row_that_does_not_see_it(name: str, shape: str) -> None:
    texts = [([5, 9, 33, 11, 2], None), ([3, 4], None)]
    assert_spoils_only_what_sees_it(TARGETS[name](), SPOILT, TREES[shape], texts, taps=(1,))


@pytest.mark.parametrize("name", ["decoder", "packed", "packed, dense", "one each", "states"])
def test_text_is_that_of_plain_decoding_where_a_draft_overflows(name: str) -> None:
    target, prompt = (TARGETS | CHAINS)[name](), [5, 9, 33, 11, 2]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = LLM(target).generate([prompt], params)[0].token_ids
    assert SPOILT not in wanted
    recorded = {tuple(prompt): [SPOILT if i % 3 == 2 else token for i, token in enumerate(wanted)]}
    llm = LLM(target, ScriptedDrafter(recorded, target.vocab_size, replay(0.8)), draft_tokens=4)
    assert llm.generate([prompt], params)[0].token_ids == wanted


@pytest.mark.parametrize("prompt", [[3, SPOILT], [3, SPOILT, 4, 6, 8, 2]], ids=["at its end", "in an earlier chunk"])
def test_a_request_that_overflows_spoils_no_other_request_of_its_batch(prompt: list[int]) -> None:
    """Not even where the model's own attention runs over the slots of all of them. The error names the one."""
    target: Any = TARGETS["packed, dense"]()
    target.chunk = 4
    seqs = [Sequence(prompt), Sequence([5, 9, 33])]
    with pytest.raises(TargetError, match=rf"NaN or infinite for the sequences \[{seqs[0].id}\]"):
        target.run(seqs, Draft.empty(2))


def test_a_pass_without_overflow_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = decoder()
    passes = spied(monkeypatch, TorchExecutor, "_forward", lambda *given, **more: 1)
    seq = Sequence([5, 9, 33])
    target.run([seq], Draft.chains([[20, 21]]))
    assert len(passes) == 1
