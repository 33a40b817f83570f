"""Any causal language model or encoder-decoder of transformers as a `Target`.

    packed           rows of several sequences in one forward over our own KV blocks: trees, batches, prefix cache
    chains only      one transformers cache for each sequence
    encoder-decoder  either of these, and what its encoder made of its source (`encoder_decoder`)
    refused          where the cache cannot be rolled back

Which of these holds is not looked up in a list of architectures: the model is tried (`trials`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from slipstream.core.target import HeadHost, Runtime, Target
from slipstream.errors import ParameterError, UnsupportedModelError
from slipstream.models.module_shape import ModuleShape, shape_of
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface.activation_rounding import measured_limit, runtime_of
from slipstream.targets.huggingface.chains_only import ChainsOnly
from slipstream.targets.huggingface.encoder_decoder import of_encoder_decoder
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.packed_module import PackedModule
from slipstream.targets.huggingface.packed_pass import KINDS
from slipstream.targets.huggingface.rollback import attends, has_states, new_cache
from slipstream.targets.huggingface.trials import (
    NOT_ROLLED_BACK,
    WITHOUT_SPECULATION,
    check_chains,
    check_packed,
    fault_of,
    ids_of,
    own_logits,
    refused_if_it_fails,
)

log = logging.getLogger("slipstream")


def of_module(module: Any, source: Path | None = None, chunk: int = 512, kv_blocks: int | None = None) -> Target:
    """A target around a transformers model in memory, which stays as it is.

    kv_blocks  blocks of a KV cache of fixed size; None: it grows.

    Raises UnsupportedModelError for models that write no text or cannot be rolled back, and ParameterError for one
    that is being trained, or for a KV cache of fixed size where each sequence has a cache of its own.
    """
    if module.training:
        raise ParameterError(
            "the model is in training mode", why="dropout would change its distribution", fix="model.eval()"
        )
    if not module.can_generate():
        raise UnsupportedModelError(
            f"a {type(module).__name__} is not a causal language model or an encoder-decoder of texts",
            fix="use a model with a language model head",
        )
    if module.config.is_encoder_decoder:
        _refuse_fixed_cache(module, kv_blocks)
        return of_encoder_decoder(module, source, chunk)
    parts = ModuleParts(module)
    with refused_if_it_fails(module):
        cache = new_cache(parts.config)
        texts = [[(37 * i + 11 + 5 * b) % ids_of(parts) for i in range(n)] for b, n in enumerate((7, 5))]
        truth = [own_logits(module, parts, text) for text in texts]
        shape = shape_of(module.config, module.generation_config, truth[0].shape[-1])
        limit = measured_limit(module, lambda text: own_logits(module, parts, text), texts[0])
    runtime = runtime_of(module, limit, source)
    host = None if fault_of(_streams, module, parts, texts[0]) else _lends(parts, shape, runtime)
    if attends(cache) and len(parts.layers) == shape.layers:
        faults: list[str] = []
        for kind in KINDS:
            packed = PackedModule(parts, shape, runtime, kind, kv_blocks)
            why = fault_of(check_packed, packed, texts, truth, limit, Decoder(packed))
            if why is None:
                return Decoder(packed, chunk, source=source, head_host=host)
            faults.append(why)
        log.info("%s is not packed (%s): each sequence is a forward of its own", type(module).__name__, faults[0])
    _refuse_fixed_cache(module, kv_blocks)
    chains = ChainsOnly(parts, shape, runtime, host, chunk)
    why = fault_of(check_chains, chains, texts[0], truth[0], limit)
    if why is not None and has_states(cache):
        one_by_one = ChainsOnly(parts, shape, runtime, host, chunk, one_by_one=True)
        if fault_of(check_chains, one_by_one, texts[0], truth[0], limit) is None:
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
            why=NOT_ROLLED_BACK,
            fix=WITHOUT_SPECULATION,
        )
    return chains


def _streams(module: Any, parts: ModuleParts, text: Seq[int]) -> None:
    """Raise unless each layer has one residual stream, which draft heads can read (Gemma 3n has four)."""
    with parts.hidden_states(range(len(parts.layers) + 1)):
        own_logits(module, parts, text)


def _refuse_fixed_cache(module: Any, kv_blocks: int | None) -> None:
    if kv_blocks is not None:
        raise ParameterError(
            f"a KV cache of {kv_blocks} blocks was asked of a {type(module).__name__}",
            why="its sequences have caches of their own, which grow",
            fix="leave kv_tokens out",
        )


def _lends(parts: ModuleParts, shape: ModuleShape, runtime: Runtime) -> HeadHost | None:
    """What draft heads may borrow; None for a model whose layers, embedding or output head were not found."""
    embedding, head = parts.embedding, parts.head
    if len(parts.layers) != shape.layers or embedding is None or head is None:
        return None
    return HeadHost(
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        vocab_size=shape.vocab_size,
        context=shape.context,
        device=parts.device,
        dtype=runtime.dtype,
        embedding=parts.embedding_weight,
        lm_head=parts.head_weight,
        tied=embedding.weight is head.weight,
        runtime=runtime,
        module=parts.module,
    )
