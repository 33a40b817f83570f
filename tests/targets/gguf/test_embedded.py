"""The embedded target as a GGUF file, next to our own decoder of it."""

from pathlib import Path

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.models.gguf_convert import convert_to_gguf
from slipstream.targets.decoder import Decoder
from slipstream.zoo import target_dir

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

TEXT = (
    '@property\ndef area(self) -> float:\n    """Area of the circle."""\n    return self.radius ** 2 * math.pi\n\n\n'
    * 4
)
PATCH = "Add type hints to the function.\n\ndef join(first, second):\n    return first + second\n"


def test_logits_and_texts_are_those_of_our_own_decoder(tmp_path: Path) -> None:
    """In float32: to 1e-3 of the largest logit at every token of a text, the bound for all models; it is 1e-5 here.
    A chat, plain and with a lookup drafter, gives the same tokens."""
    file = convert_to_gguf(target_dir(), tmp_path / "embedded.gguf", "f32").file
    llm, own = LLM(file, executor="llamacpp", threads=2), Decoder.load(target_dir(), "torch", torch.float32, "cpu")
    ids = llm.tokenizer.encode(TEXT)
    seqs = [Sequence(ids[:2]), Sequence(ids[:2])]
    found = llm.target.run(seqs[:1], Draft.chains([ids[2:]])).logits
    wanted = own.run(seqs[1:], Draft.chains([ids[2:]])).logits
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
    llm.target.release(seqs[0].id)
    params, plain = SamplingParams(max_tokens=40), LLM(own, tokenizer=llm.tokenizer)
    for drafter in (None, "suffix"):
        llm.use(drafter)
        assert llm.chat(PATCH, params).token_ids == plain.chat(PATCH, params).token_ids
