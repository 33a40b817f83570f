"""Tiny random encoder-decoders of transformers."""

import json
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, DrafterTraits, NoDrafter
from slipstream.core.sequence import Sequence
from tests.core.fake_drafters import depths
from tests.tiny_checkpoints import config_of, make_tokenizer

VOCAB = 60
SOURCES = [[5, 9, 33], [7], [10, 20, 30, 40, 50, 11, 21, 31], [58, 57, 12, 17, 17], [11, 11, 40, 3]]
TOKENS = 12

_T5: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
}  # fmt: skip


ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: config_of("T5", **_T5, decoder_start_token_id=0),
    "mt5": lambda: config_of(
        "MT5", **_T5 | {"num_layers": 3, "num_decoder_layers": 2}, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    ),
    "bart": lambda: config_of("Bart", **_BART | {"decoder_layers": 1}, scale_embedding=True),
    "marian": lambda: config_of("Marian", **_BART, pad_token_id=59, decoder_start_token_id=59, scale_embedding=True),
    "pegasus": lambda: config_of("Pegasus", **_BART, decoder_start_token_id=0),
    "mbart": lambda: config_of("MBart", **_BART, decoder_start_token_id=2),
    "m2m-100": lambda: config_of("M2M100", **_BART),
}  # fmt: skip
"""Encoder-decoders with relative positions, learned positions and sinusoids, with shared and scaled embeddings, and
with decoders of another depth than the encoder."""
PACKED = tuple(ENCODER_DECODERS)
ENCODER_DECODERS["mvp"] = lambda: config_of("Mvp", **_BART)
"""MVP has its own attention code, so it needs a forward pass for each sequence."""


_SEEDS = {"t5": 306, "mt5": 104, "bart": 200, "marian": 502, "pegasus": 505, "mbart": 303, "m2m-100": 101, "mvp": 2}
"""Seeds with which outputs have many different tokens."""


def random_encoder_decoder(name: str, dtype: torch.dtype = torch.float64, noise: float = 0.0, **shape: Any) -> Any:
    """Make the tiny model of an architecture, with large weights. noise: disturbs the weights, to make a draft model
    that mostly agrees with the model without noise. shape: changed values of the configuration. The generation
    configuration is transformers' default for the configuration, without an end-of-text token."""
    import transformers

    config = ENCODER_DECODERS[name]()
    config.update(shape)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(_SEEDS[name])
    disturbing = torch.Generator().manual_seed(0)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # a tied head would repeat the last token
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:  # not sinusoids, which are fixed
                drawn = torch.randn(parameter.shape, generator=generator)
                scale = 0.2 if parameter.ndim == 1 else 0.8 if parameter is embedding else 0.3
                if "encoder_attn.out_proj" in key or "EncDecAttention.o" in key:
                    scale = 0.1  # otherwise the output would depend only on the source
                parameter.copy_(scale * drawn + (parameter.ndim == 1 and not key.endswith("bias")))
                if noise:
                    parameter.add_(noise * scale * torch.randn(parameter.shape, generator=disturbing))
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def make_encoder_decoder(folder: Path, layers: int = 2) -> Any:
    """Write a random T5 to `folder`, with a byte-level tokenizer that has no chat template."""
    import transformers

    shape = _T5 | {"vocab_size": 320, "num_layers": layers}
    config = transformers.T5Config(**shape, decoder_start_token_id=0, eos_token_id=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}))
    return model


class WrongSiblings(NoDrafter):
    """Drafts trees. At each depth there is a wrong token first, then the right token, which has the next children.
    Every third draft is wrong from depth 2 on."""

    name = "siblings"
    traits = DrafterTraits()

    def __init__(self, texts: Seq[Seq[int]], vocab_size: int):
        self.texts, self.vocab_size, self.asked = texts, vocab_size, 0

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        self.asked += 1
        rows = []
        for seq, depth in zip(seqs, depths(budgets), strict=True):
            text = next(t for t in self.texts if list(t[: len(seq.tokens)]) == seq.tokens)
            ids: list[int] = []
            parents: list[int] = []
            for i, right in enumerate(text[len(seq.tokens) : len(seq.tokens) + depth]):
                shift = 1 if self.asked % 3 == 0 and i else 0
                above = len(ids) - 1 if i else -1
                ids += [(right + 5) % self.vocab_size, (right + shift) % self.vocab_size]
                parents += [above, above]
            rows.append((ids, parents))
        return Draft.trees(rows)
