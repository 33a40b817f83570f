"""Any causal language model of transformers as a `Target`.

    packed       rows of several sequences in one forward over our own KV blocks: trees, ragged batches, prefix cache
    chains only  one transformers cache for each sequence
    refused      where the cache cannot be rolled back

Which of these holds is not looked up in a list of architectures: the model is tried. A few tokens are run as the
engine would run them, and compared with the model's own forward without a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import HeadHost, Runtime, Target
from slipstream.errors import ParameterError, SlipstreamError, UnsupportedModelError
from slipstream.models.module_shape import ModuleShape, shape_of
from slipstream.settings import TRANSFORMERS
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface.chains_only import ChainsOnly
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.packed_module import PackedModule
from slipstream.targets.huggingface.packed_pass import KINDS
from slipstream.targets.huggingface.rollback import attends, has_states, new_cache

log = logging.getLogger("slipstream")

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference that rounding explains, relative to the largest logit; transformers computes norms and softmax in
float32 at least."""
_ROUGH = 0.05
"""The same for 16 bits and quantised weights, for the median row: there experts may be picked differently."""


def of_module(module: Any, source: Path | None = None, chunk: int = 512, kv_blocks: int | None = None) -> Target:
    """A target around a transformers model in memory, which stays as it is.

    kv_blocks  blocks of a KV cache of fixed size; None: it grows.

    Raises UnsupportedModelError for models that are not causal or cannot be rolled back, and ParameterError for one
    that is being trained, or for a KV cache of fixed size where each sequence has a cache of its own.
    """
    if module.training:
        raise ParameterError(
            "the model is in training mode", why="dropout would change its distribution", fix="model.eval()"
        )
    if module.config.is_encoder_decoder or not module.can_generate():
        raise UnsupportedModelError(
            f"a {type(module).__name__} is not a causal language model", fix="use a model with a causal head"
        )
    parts = ModuleParts(module)
    cache = new_cache(parts.config)
    texts = [[(37 * i + 11 + 5 * b) % _ids(parts) for i in range(n)] for b, n in enumerate((7, 5))]
    truth = [_own_logits(module, parts, text) for text in texts]
    shape = shape_of(module.config, module.generation_config, truth[0].shape[-1])
    runtime = Runtime(TRANSFORMERS, module.dtype, source=source)
    host = _lends(parts, shape, runtime)
    if attends(cache) and len(parts.layers) == shape.layers:
        faults: list[str] = []
        for kind in KINDS:
            packed = PackedModule(parts, shape, runtime, kind, kv_blocks)
            why = _fault(_check_packed, packed, texts, truth)
            if why is None:
                return Decoder(packed, chunk, source=source, head_host=host)
            faults.append(why)
        log.info("%s is not packed (%s): each sequence is a forward of its own", type(module).__name__, faults[0])
    if kv_blocks is not None:
        raise ParameterError(
            f"a KV cache of {kv_blocks} blocks was asked of a {type(module).__name__}",
            why="its sequences have caches of their own, which grow",
            fix="leave kv_tokens out",
        )
    chains = ChainsOnly(parts, shape, runtime, host, chunk)
    why = _fault(_check_chains, chains, texts, truth)
    if why is not None and has_states(cache):
        one_by_one = ChainsOnly(parts, shape, runtime, host, chunk, one_by_one=True)
        if _fault(_check_chains, one_by_one, texts, truth) is None:
            log.warning(
                "%s reads one token at a time once it has a state (%s): output is exact, but verifying draft tokens "
                "saves no time",
                type(module).__name__,
                why,
            )
            return one_by_one
    if why is not None:
        raise UnsupportedModelError(
            f"a {type(module).__name__} cannot be rolled back: {why}",
            why="several tokens in one forward, after others that were rejected, must give what one at a time gives",
            fix="use another model; transformers itself runs this one, without speculation",
        )
    return chains


def _lends(parts: ModuleParts, shape: ModuleShape, runtime: Runtime) -> HeadHost | None:
    """What draft heads may borrow; None for a model whose layers, embedding or output head were not found."""
    embedding, head = parts.embedding, parts.head
    if len(parts.layers) != shape.layers or embedding is None or head is None:
        return None
    device = parts.device
    return HeadHost(
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        vocab_size=shape.vocab_size,
        context=shape.context,
        device=device,
        dtype=runtime.dtype,
        embedding=lambda: _weight(embedding).to(device),
        lm_head=lambda: _weight(head).to(device),
        tied=_weight(embedding) is _weight(head),
        runtime=runtime,
    )


def _weight(layer: Any) -> Tensor:
    found: Tensor = layer.weight
    return found.detach()


# --- trials -------------------------------------------------------------------------------------------------------


def _ids(parts: ModuleParts) -> int:
    return int(parts.config.vocab_size)


def _own_logits(module: Any, parts: ModuleParts, text: Seq[int]) -> Tensor:
    """Logits [n, V] of the model's own forward."""
    with torch.inference_mode():
        out: Tensor = module(input_ids=torch.tensor([list(text)], device=parts.device), use_cache=False).logits
    return out[0].to(parts.device).double()


def _fault(trial: Callable[..., None], *given: Any) -> str | None:
    """Why a trial failed; None if it did not."""
    try:
        trial(*given)
    except Exception as fault:  # a model's own code may raise anything
        return fault.what if isinstance(fault, SlipstreamError) else f"{type(fault).__name__}: {fault}"
    return None


class _Differs(SlipstreamError):
    """A trial gave other logits than the model's own forward."""


def _same(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    errors = (found.double() - wanted).abs().amax(-1) / wanted.abs().max().clamp(min=1e-9)  # [n]
    limit = _TOLERANCE.get(dtype, _ROUGH)
    error = float(errors.max() if dtype in _TOLERANCE else errors.median())
    if not error <= limit:
        raise _Differs(f"{what} gave logits that differ by {error:.1e} of the largest, allowed are {limit:.0e}")


def _check_packed(packed: PackedModule, texts: Seq[Seq[int]], truth: Seq[Tensor]) -> None:
    """Two sequences in one pass, a tree whose later branch is kept, and layers apart."""
    target, (a, b) = Decoder(packed), texts
    dtype = packed.runtime.dtype
    seqs = [Sequence(list(a[:4])), Sequence(list(b[:2]))]
    try:
        out = target.run(seqs, Draft.empty(2, target.device))
        _same(out.logits, torch.stack([truth[0][3], truth[1][1]]), dtype, "a packed pass")
        target.commit(seqs, [[], []])
        for seq, text in zip(seqs, texts, strict=True):
            seq.kv_len = len(seq.tokens)
            seq.tokens.append(text[seq.kv_len])
        other = (a[5] + 1) % packed.config.vocab_size
        draft = Draft.trees([([other, a[5], a[6]], [-1, -1, 1]), (b[3:], [-1, 0])], target.device)
        taps = (0, 1, packed.config.layers, -1)
        out = target.run(seqs, draft, taps)
        rows = [0, 2, 3, 4, 5, 6]
        wanted = torch.cat((truth[0][4:7], truth[1][2:5]))
        _same(out.logits[rows], wanted, dtype, "a packed tree")
        target.commit(seqs, [[1], [0]])
        seqs[0].tokens += [a[5], a[6]]
        seqs[1].tokens += [b[3], b[4]]
        for seq in seqs:
            seq.kv_len = len(seq.tokens) - 1
        whole = target.run(seqs, Draft.empty(2, target.device)).logits.clone()
        _same(whole, torch.stack([truth[0][6], truth[1][4]]), dtype, "a packed pass after a rollback")
        packed.slices = _fault(_check_slices, packed, target, seqs, whole) is None
    finally:
        for seq in seqs:
            target.release(seq.id)


def _check_slices(packed: PackedModule, target: Decoder, seqs: Seq[Sequence], whole: Tensor) -> None:
    layers, none = packed.config.layers, Draft.empty(len(seqs), target.device)
    packed.slices, packed.tuples = True, packed.parts.returns_tuples
    half = target.run(seqs, none, layers=(0, 1)).hidden[1].clone()
    if layers > 1:
        rest = target.run(seqs, none, layers=(1, layers), hidden=half).logits
        _same(rest, whole.double(), packed.runtime.dtype, "layers apart")


def _check_chains(target: ChainsOnly, texts: Seq[Seq[int]], truth: Seq[Tensor]) -> None:
    """Chains of which none, one and all tokens are accepted."""
    a, dtype = texts[0], target.capabilities.runtime.dtype  # type: ignore[union-attr]
    seq = Sequence(list(a[:2]))
    try:
        for kept, run in ((0, 0), (0, 2), (1, 2), (0, 1)):
            end = len(seq.tokens)
            right = list(a[end : end + kept])
            chain = right + [(x + 1) % target.vocab_size for x in a[end + kept : end + run]]
            out = target.run([seq], Draft.chains([chain], device=target.device))
            _same(out.logits[: kept + 1], truth[0][end - 1 : end + kept], dtype, "a chain after a rollback")
            seq.kv_len = end + kept
            seq.tokens += [*right, a[end + kept]]
    finally:
        target.release(seq.id)
