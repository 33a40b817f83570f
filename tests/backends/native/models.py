"""Random decoders for the native backend, from memory, and batches to run them on: alone and together."""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.native.quantise import quantise_blocks, quantise_rows
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.layers import Latent, LayerDescription
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.weights import Weights, load_weights
from slipstream.executor.executor import Batch

VOCAB = 90

needs_bfloat16 = pytest.mark.skipif(not processor.has_bfloat16_dots(), reason="no bfloat16 products here")

FORMATS = {
    # name -> (dtype of the checkpoint, options of the executor)
    "float32": (torch.float32, {}),
    "float16": (torch.float16, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16 products": (torch.bfloat16, {"dtype": torch.bfloat16}),
    "w8a16": (torch.float16, {"quantize": "w8a16"}),
    "w8a8": (torch.float16, {"quantize": "w8a8"}),
    "int8 without dot products": (torch.float16, {"quantize": "w8a8"}),
    "float16 with a cache in float16": (torch.float16, {"kv_dtype": "float16"}),
    "float16 with a cache in q8_0": (torch.float16, {"kv_dtype": "q8_0"}),
}
"""All formats of weights, products and KV cache."""

EVERY_FORMAT = [pytest.param(name, marks=needs_bfloat16 if "products" in name else ()) for name in FORMATS]


def config(layers: int = 2, **changes: Any) -> DecoderConfig:
    """Wide enough that several threads share a product."""
    given: dict[str, Any] = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 96, "layers": layers, "heads": 6, "kv_heads": 2,
        "head_dim": 16, "intermediate_size": 144, "context": 4096, "norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "windows": (None,) * layers,
    }  # fmt: skip
    return DecoderConfig(**given | changes)


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "window": {"windows": (5, None)},
    "windows": {"windows": (33, 7)},
    "gpt2": {
        "norm": "layer", "activation": "gelu_tanh", "gated": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True,
        "position": "learned", "rope_parameters": {}, "kv_heads": 6, "tie_embeddings": True, "context": 1024,
    },
    "mixture": {"experts": Experts(5, 2, 48, True, (True, True))},
    "half a mixture": {"experts": Experts(4, 3, 80, False, (False, True))},
    "qwen": {"qkv_bias": True, "qk_norm": True, "tie_embeddings": True, "head_dim": 32, "heads": 4},
    "many heads": {"heads": 28, "kv_heads": 2, "activation": "gelu"},
}  # fmt: skip

_HEADS: dict[str, Any] = {"heads": 6, "kv_heads": 2, "norm_after": True, "intermediate_size": 144}


def _latent(query_rank: int) -> dict[str, Any]:
    """query_rank: 0 if queries are computed from the input."""
    part = Latent(rank=128, query_rank=query_rank, plain=32, rotated=16, value=64)
    layer: dict[str, Any] = {"heads": 12, "kv_heads": 1, "head_dim": 144, "growing": True}
    return {
        "layers": 3, "heads": 12, "kv_heads": 1, "head_dim": 144, "growth": (0.3, 4, 0), "qkv_bias": query_rank > 0,
        "rope_parameters": {"rope_theta": 10000.0, "dimensions": 16},
        "each": (
            LayerDescription(**layer, latent=part, intermediate_size=160),
            LayerDescription(**layer, latent=dataclasses.replace(part, value=128), window=9, sparse=True),
            LayerDescription(**layer, latent=part, sparse=True),
        ),
        "experts": Experts(8, 2, 64, True, (False, True, True), sigmoid=True, groups=4, top_groups=2, shared=64),
    }  # fmt: skip


UNLIKE_LLAMA: dict[str, dict[str, Any]] = {
    "latent": _latent(96),
    "latent, queries of the input": _latent(0),
    "every part": {
        "each": (
            LayerDescription(
                **_HEADS, head_dim=16, window=5, cap=3.0, sinks=True, qk_norm="width", gate="output", growing=True
            ),
            LayerDescription(
                **_HEADS, head_dim=32, rotary=1, qk_norm="head", late_norm=True, value_norm=True, key_is_value=True
            ),
            LayerDescription(**_HEADS, head_dim=16, rotary=None, scale=0.3, shared=0, norm_before=False, scaled=True),
            LayerDescription(heads=4, kv_heads=4, head_dim=16, sparse=True, sinks=True),
        ),
        "layers": 4, "head_dim": 32, "growth": (0.3, 4, 0), "embedding_scale": 3.0, "residual_scale": 0.5,
        "logits_cap": 5.0, "side_width": 16, "side_vocab": 90, "activation": "gelu_tanh",
        "ropes": ({"rope_theta": 10000.0, "head_dim": 16}, {"rope_theta": 10000.0, "dimensions": 16}),
        "experts": Experts(
            4, 2, 48, True, (False, False, False, True), sigmoid=True, corrected=True, groups=2, top_groups=1,
            scale=2.0, shared=48, shared_gate=True,
        ),
    },
    "many experts": {"experts": Experts(16, 8, 48, True, (True, True))},
    "few rows an expert": {"experts": Experts(40, 3, 80, False, (True, True))},
    "all rows an expert": {"experts": Experts(3, 3, 16, True, (True, True))},
}  # fmt: skip
"""Shapes that only these kernels run or compute in ways of their own."""


def in_every_format(*shapes: str, others: Seq[str] | None = None) -> list[Any]:
    """(shape, format) of these shapes in every format, and of others in float32; None: of all other SHAPES."""
    marks = {form: needs_bfloat16 for form in FORMATS if "products" in form}
    each = [pytest.param(shape, form, marks=marks.get(form, ())) for shape in shapes for form in FORMATS]
    return each + [(shape, "float32") for shape in (SHAPES if others is None else others) if shape not in shapes]


def weights(config: DecoderConfig, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 0.15) -> Weights:
    """Random weights of that dtype. spread: their standard deviation; 0: as wide rows need it."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in config.shapes().items():
        noise = torch.randn(shape, generator=generator)
        scaled = noise * (spread or shape[-1] ** -0.5)
        tensors[name] = (1 + 0.2 * noise if "norm" in name and "weight" in name else scaled).to(dtype)
    return Weights({n: (n, t.__getitem__) for n, t in tensors.items()}, config, torch.float32)


def in_float64(config: DecoderConfig, given: Mapping[str, Tensor], quantize: str | None = None) -> Weights:
    """The same weights in float64; matrices as `quantize` rounds them."""
    tensors: dict[str, Tensor] = {}
    for name in given:
        tensor = given[name]
        if quantize and tensor.ndim == 2 and "embed" not in name and not name.endswith("mlp.gate.weight"):
            if quantize == "int4":
                blocks = quantise_blocks(tensor.float(), 8 if name == "lm_head.weight" else 4)
                tensor = torch.from_numpy(blocks.floats())
            else:
                values, scale = quantise_rows(tensor.float())
                tensor = values.double() * scale.double()
        tensors[name] = tensor.double()
    return Weights({n: (n, t.__getitem__) for n, t in tensors.items()}, config, torch.float64)


def executor_of(config: DecoderConfig, given: Weights, form: str = "float32", threads: int = 1) -> NativeExecutor:
    """With options of FORMATS; every pass uses all its threads."""
    with pytest.MonkeyPatch.context() as patch:
        if form == "int8 without dot products":
            patch.setattr(processor, "has_byte_dots", lambda: False)
        model = NativeExecutor(config, given, LoadSettings(threads=threads, **FORMATS[form][1]))
    model._workspace._small = False
    return model


def executor(
    shape: str = "llama", form: str = "float32", threads: int = 1, spoilt: int | None = None, **changes: Any
) -> NativeExecutor:
    """A decoder of SHAPES or UNLIKE_LLAMA with weights of FORMATS. spoilt: a token whose embedding is infinite, so that
    its keys and values, and what sees them, are NaN."""
    decoder = config(**(SHAPES | UNLIKE_LLAMA)[shape] | changes)
    given = weights(decoder, FORMATS[form][0])
    read = given.part  # reading from a checkpoint refuses what is not finite

    def part(name: str, rows: slice, as_stored: bool = False) -> Tensor:
        tensor = read(name, rows, as_stored)
        if name == "embed_tokens.weight" and spoilt is not None:
            tensor = tensor.clone()
            tensor[spoilt, 0] = math.inf
        return tensor

    given.part = part  # type: ignore[method-assign]
    return executor_of(decoder, given, form, threads)


def on_torch(shape: str, **changes: Any) -> TorchExecutor:
    """A decoder of SHAPES in float32 on the other backend."""
    decoder = config(**SHAPES[shape] | changes)
    return TorchExecutor(decoder, weights(decoder))


def ids(n: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain(seq_id: int, past: int, tokens: Seq[int], select: Seq[int] | None = None) -> Batch:
    """Tokens after `past` tokens of one sequence; `select`: the rows whose logits are computed (None: all)."""
    n = len(tokens)
    return Batch(
        [seq_id], torch.tensor(tokens), range(past, past + n), [0, n], [past], [None],
        range(n) if select is None else select,
    )  # fmt: skip


def depths_of(parents: Seq[int]) -> list[int]:
    """Depths of nodes below the last pending token: children of -1 have depth 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree(seq_id: int, past: int, tokens: Seq[int], parents: Seq[int]) -> Batch:
    """The first len(tokens) - len(parents) tokens are a chain, the others nodes below its last token."""
    return forest([(seq_id, past, tokens, parents)])


def forest(members: Seq[tuple[int, int, Seq[int], Seq[int]]]) -> Batch:
    """One batch of several (sequence, past, tokens, parents)."""
    tokens: list[int] = []
    positions: list[int] = []
    splits = [0]
    trees: list[Tensor | None] = []
    for _, past, sequence, parents in members:
        known = len(sequence) - len(parents)
        mask = torch.ones(len(sequence), len(sequence)).tril().bool()
        for i, parent in enumerate(parents):
            mask[known + i] = mask[known + parent] if parent >= 0 or known else False
            mask[known + i, known + i] = True
        tokens += sequence
        positions += [*range(past, past + known), *(past + known + d for d in depths_of(parents))]
        splits.append(len(tokens))
        trees.append(mask if parents else None)
    return Batch(
        [m[0] for m in members], torch.tensor(tokens), positions, splits, [m[1] for m in members], trees,
        range(len(tokens)),
    )  # fmt: skip


def last(batch: Batch) -> Batch:
    """The batch with the logits of each sequence's last row only."""
    return dataclasses.replace(batch, select=[stop - 1 for stop in batch.splits[1:]])


def one_by_one(
    executor: NativeExecutor, seq_id: int, past: int, tokens: Seq[int], parents: Seq[int] = ()
) -> tuple[Tensor, Tensor]:
    """Logits of every row of `tree(...)`, each computed alone after its ancestors, and keys and values of its slot,
    [rows, L, 2, Hk, D]."""
    known = len(tokens) - len(parents)
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(parents):
        children.setdefault(parent, []).append(i)
    logits: dict[int, Tensor] = {}
    cache: dict[int, Tensor] = {}

    def run(row: int, slot: int) -> None:
        logits[row] = executor.forward(chain(seq_id, slot, [tokens[row]])).logits[0].clone()
        cache[row] = executor.kv(seq_id, slot + 1)[:, :, :, slot]

    def descend(node: int, slot: int) -> None:
        for child in children.get(node, ()):
            run(known + child, slot)
            descend(child, slot + 1)

    for row in range(known):
        run(row, past + row)
    descend(-1, past + known)
    logits_of_rows, kept = (torch.stack([of[row] for row in range(len(tokens))]) for of in (logits, cache))
    return logits_of_rows, kept


ALONE, TOGETHER = 100, 200  # ids of sequences


def on_threads(model: NativeExecutor, threads: int) -> NativeExecutor:
    model._workspace.most = threads
    return model


def begin(model: NativeExecutor, seq_id: int, tokens: list[int]) -> None:
    """Prefill a prompt in one pass."""
    model.release(seq_id)
    if tokens:
        model.forward(chain(seq_id, 0, tokens, []))


def written(model: NativeExecutor, batch: Batch) -> Tensor:
    """Keys and values that a batch wrote, [rows, L, 2, Hk, D]."""
    parts = []
    for b, seq_id in enumerate(batch.seq_ids):
        length = batch.past[b] + batch.splits[b + 1] - batch.splits[b]
        parts.append(model.kv(seq_id, length)[:, :, :, batch.past[b] :].permute(3, 0, 1, 2, 4))
    return torch.cat(parts)


def same(actual: Tensor, wanted: Tensor) -> None:
    differs = (actual != wanted).flatten(1).any(1).nonzero().flatten().tolist()
    assert not differs, f"rows {differs} of {len(actual)} differ by up to {(actual - wanted).abs().max():.1e}"


def check(model: NativeExecutor, members: list[tuple[int, list[int], list[int]]], seed: int) -> None:
    """Run all members (prompt length, tokens of pending rows and nodes, parents) in one batch on several threads: every
    row equals the row alone."""
    logits, kept, rows = [], [], []
    for b, (past, tokens, parents) in enumerate(members):
        prompt = ids(past, seed + b)
        for seq_id in (ALONE + b, TOGETHER + b):
            begin(on_threads(model, 1), seq_id, prompt)
        alone, cache = one_by_one(model, ALONE + b, past, tokens, parents)
        logits.append(alone)
        kept.append(cache)
        rows.append((TOGETHER + b, past, tokens, parents))
    batch = forest(rows)
    for threads in (1, 3, 5) if seed % 2 else (1, 2):
        out = on_threads(model, threads).forward(batch)
        same(out.logits, torch.cat(logits))
        same(written(model, batch), torch.cat(kept))


def random_members(
    draw: random.Random, count: int, nodes: int, known: Seq[int], past: Seq[int], vocab: int = VOCAB
) -> list[tuple[int, list[int], list[int]]]:
    """Members for `check`: most of them trees of up to `nodes` nodes, after as many pending and earlier tokens as are
    drawn from `known` and `past`."""
    members = []
    for _ in range(count):
        parents = random_tree(draw, nodes) if draw.random() < 0.7 else []
        text = ids(draw.choice(known) + len(parents), draw.randrange(999), vocab)
        members.append((draw.choice(past), text, parents))
    return members


def random_tree(draw: random.Random, most: int) -> list[int]:
    """Parents of up to `most` nodes: wide or narrow, or with other nodes between siblings."""
    nodes, kind = draw.randint(1, most), draw.random()
    return [i - 1 if draw.random() < kind else draw.randint(-1, i - 1) for i in range(nodes)]


_TOKENS = [3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7, 9, 3, 23, 8, 4, 6]


def logits(checkpoint: Path) -> Tensor:
    config = DecoderConfig.load(checkpoint)
    return logits_of(config, load_weights(checkpoint, config))


def logits_of(config: DecoderConfig, weights: Weights, threads: int = 1, prompt: int = 13) -> Tensor:
    """[n, V] of a text: a prompt, then single tokens."""
    executor = NativeExecutor(config, weights, LoadSettings(threads=threads))
    parts = [executor.forward(chain(0, 0, _TOKENS[:prompt])).logits.clone()]
    parts += [executor.forward(chain(0, at, [_TOKENS[at]])).logits.clone() for at in range(prompt, len(_TOKENS))]
    return torch.cat(parts)[:, : config.vocab_size].double()
