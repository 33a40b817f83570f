"""Tiny EAGLE, DFlash and Medusa heads in float64: random heads, and a head that is always right."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.backends.torch.torch_heads import TorchDFlash, TorchEagle
from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.target import HeadHost, Runtime
from slipstream.drafters.dflash import DFlashDrafter
from slipstream.drafters.eagle import EagleDraftConfig, EagleDrafter
from slipstream.drafters.medusa import MedusaDraftConfig, MedusaDrafter
from slipstream.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.heads.eagle_head import EagleConfig, EagleHead
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads
from tests.targets.toy import ToyTarget


def config(version: int = 3, vocab: int = 5, width: int = 8, target: int = 5, **changes: Any) -> EagleConfig:
    """Make a configuration. changes: fields of `EagleConfig`; `decoder={...}` has fields of its decoder."""
    decoder = DecoderConfig(
        model_type="llama", vocab_size=vocab, hidden_size=width, layers=1, heads=4, kv_heads=2, head_dim=4,
        intermediate_size=12, context=256, norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, windows=(None,),
    )  # fmt: skip
    decoder = replace(decoder, **changes.pop("decoder", {}))
    taps = (-1,) if version == 1 else (0, 1, 2)
    head_config = EagleConfig(version, decoder, taps, target, vocab)
    return replace(head_config, **changes)


def randomised(module: Any, seed: int, spread: float) -> tuple[Any, torch.Generator]:
    """Return the module in float64 with random parameters (near 1 for norms), and the generator for further numbers."""
    generator = torch.Generator().manual_seed(seed)
    made = module.double().eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(1 + 0.2 * noise if "norm" in name else spread * noise)
    return made, generator


def head(config: EagleConfig, seed: int = 0, spread: float = 0.6, embedding: Tensor | None = None) -> EagleHead:
    """Make a random head in float64. The target's weights that it uses are random, too, unless they are given. A draft
    vocabulary has every second id."""
    built, generator = randomised(EagleHead(config), seed, spread)
    vocab = config.decoder.vocab_size
    if config.version == 3 and config.draft_vocab < vocab:
        built.select_vocabulary(torch.randperm(vocab, generator=generator)[: config.draft_vocab].sort().values)
    if embedding is None:
        embedding = torch.randn(vocab, config.hidden_size, generator=generator, dtype=torch.float64)
    lm_head = torch.randn(vocab, config.hidden_size, generator=generator, dtype=torch.float64)
    return built.borrow(None if config.own_embedding else embedding, lm_head if config.version == 1 else None)


PARALLEL = {"mask_token": 2, "depths": 6, "decoder": {"layers": 2, "windows": (None, None)}}
"""Fields with which a head of version 3 becomes a parallel head (P-EAGLE) of two layers."""


def eagle_drafter(
    vocab: int = 5, version: int = 3, changes: dict[str, Any] | None = None, seed: int = 3, **options: Any
) -> EagleDrafter:
    """Make a drafter with a random head for a `ToyTarget` of `vocab` ids. A head of version 3 can draft all ids except
    one. changes: as in `config`."""
    more = {"draft_vocab": vocab if version == 1 else vocab - 1} | (changes or {})
    head_config = config(version, vocab, target=vocab, **more)
    if version == 1:  # the hidden states of a toy target are its logits
        head_config = config(version, vocab, width=vocab, target=vocab)
    return EagleDrafter(TorchEagle(head(head_config, seed)), vocab, EagleDraftConfig(**options))


def knowing_head(target: ToyTarget, eps: float = 1e-12, head_dim: int = 0) -> EagleHead:
    """Make a head of version 3 that is always right about a `ToyTarget` of order 1, whose distribution depends only on
    the last token. The logits of the head are equal to the target's in every step of a draft.

    Embeddings are one-hot vectors plus a constant. Queries and keys are made from them so that a row attends only to
    its own position. The residual stream of a row is then the one-hot vector of its token: attention adds this vector
    and removes the vector of the previous step. head_dim: at least the size of the vocabulary; 0: equal to it.
    """
    vocab = target.vocab_size
    width, dim = vocab + 1, head_dim or vocab + vocab % 2
    head_config = config(
        3, vocab, width=width, target=vocab,
        decoder={
            "heads": 1, "kv_heads": 1, "head_dim": dim, "norm_eps": eps,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        },
    )  # fmt: skip
    out = EagleHead(head_config).double().eval().requires_grad_(False)
    for name, parameter in out.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    attention = out.midlayer.self_attn
    scale = (2 / width) ** 0.5  # after the norm: two ones among `width` values
    for part in (attention.q_proj, attention.k_proj):
        part.weight[:2, vocab] = 100.0
    for t in range(vocab):
        attention.v_proj.weight[t, t] = scale
        attention.v_proj.weight[t, width + t] = -(width**-0.5)
        attention.o_proj.weight[t, t] = 1.0
        out.lm_head.weight[:, t] = target.logits([t]) / width**0.5
    embedding = torch.cat((torch.eye(vocab, dtype=torch.float64), torch.ones(vocab, 1, dtype=torch.float64)), 1)
    return out.borrow(embedding)


def head_host(
    hidden: int, layers: int, vocab: int, dtype: torch.dtype, lm_head: torch.Tensor, backend: str = "torch",
    packed_tables: Any = None,
) -> HeadHost:  # fmt: skip
    """Return the weights that a target shares with heads: this untied output head [vocab, hidden], and an embedding of
    zeros."""
    return HeadHost(
        hidden_size=hidden, layers=layers, vocab_size=vocab, context=256, device=torch.device("cpu"), dtype=dtype,
        embedding=lambda: torch.zeros(vocab, hidden, dtype=dtype), lm_head=lambda: lm_head, tied=False,
        runtime=Runtime(backend, dtype), packed_tables=packed_tables,
    )  # fmt: skip


def dflash_config(vocab: int = 5, width: int = 8, target: int = 5, **changes: Any) -> DFlashConfig:
    """Make a configuration of two layers and blocks of 6. changes: fields of `DFlashConfig`; `decoder={...}` has fields
    of its decoder."""
    decoder = {"layers": 2, "model_type": "qwen3", "qk_norm": True, "windows": (None, None), "head_dim": 16}
    decoder |= changes.pop("decoder", {})
    built = DFlashConfig(config(3, vocab, width, target, decoder=decoder).decoder, (0, 1, 2), target, 6, vocab - 1)
    return replace(built, **changes)


def dflash_head(config: DFlashConfig, seed: int = 0, spread: float = 0.6) -> DFlashHead:
    """Make a random head in float64. The target's tables that it uses are random, too."""
    built, generator = randomised(DFlashHead(config), seed, spread)
    if config.draft_vocab is not None:  # the last `draft_vocab` ids
        built.d2t.fill_(config.decoder.vocab_size - config.draft_vocab)
        built.t2d.copy_(torch.arange(config.decoder.vocab_size) >= config.decoder.vocab_size - config.draft_vocab)
    shape = (2, config.decoder.vocab_size, config.decoder.hidden_size)
    embedding, lm_head = torch.randn(shape, generator=generator, dtype=torch.float64)
    return built.borrow(None if config.own_embedding else embedding, None if config.own_lm_head else lm_head)


def dflash_drafter(
    vocab: int = 5, seed: int = 3, changes: dict[str, Any] | None = None, runs: Any = TorchDFlash
) -> DFlashDrafter:
    """Make a drafter with a random head for a `ToyTarget` of `vocab` ids. changes: as in `dflash_config`. runs: the
    class of its `DFlashRuntime`."""
    built = dflash_head(dflash_config(vocab, target=vocab, **(changes or {})), seed)
    return DFlashDrafter(runs(built), vocab)


def tiny_heads(hidden: int = 8, vocab: int = 11, heads: int = 3, layers: int = 1, seed: int = 0, **config: Any):
    """Make Medusa heads in float64 with random parameters, including a shared lm_head."""
    c = MedusaConfig(heads, layers, hidden, vocab, **config)
    built = MedusaHeads(c).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in built.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    if c.draft_vocab is not None:
        built.select_vocabulary(torch.randperm(vocab, generator=generator)[: c.draft_vocab])
    if not c.own_lm_head:
        built.borrow(torch.randn(vocab, hidden, generator=generator, dtype=torch.float64))
    return built.requires_grad_(False).eval()


def medusa_drafter(vocab: int, **options: Any) -> MedusaDrafter:
    """Make a drafter with random heads for a `ToyTarget`, whose hidden states are its logits."""
    return MedusaDrafter(tiny_heads(vocab, vocab, 4, seed=5), vocab, MedusaDraftConfig(**options))
