"""Any causal language model or encoder-decoder of transformers as a `Target`.

    packed           rows of several sequences in one forward over our own KV blocks: trees, batches, prefix cache
    chains only      one transformers cache for each sequence
    encoder-decoder  a packed or chains-only decoder, and the encoder's output for its source (`encoder_decoder`)
    refused          models whose cache cannot be rolled back

No list of architectures decides which of these applies: the model is tried (`trials`).
"""

import logging
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from slipstream.checkpoints.module_shape import ModuleShape, shape_of
from slipstream.core.encoder import Encoder
from slipstream.core.target import HeadHost, Runtime, Target
from slipstream.errors import ParameterError, SlipstreamError, UnsupportedModelError
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface import encoder_decoder, trials
from slipstream.targets.huggingface.chains_only import ChainsOnly
from slipstream.targets.huggingface.encoded_sources import EncodedSources
from slipstream.targets.huggingface.module_parts import ModuleParts, weight_of
from slipstream.targets.huggingface.output_rules import OutputRules
from slipstream.targets.huggingface.packed_module import PackedModule
from slipstream.targets.huggingface.packed_pass import KINDS
from slipstream.targets.huggingface.rollback import attends, has_states, new_cache
from slipstream.targets.huggingface.trials import Trial, fault_of, forward_logits

log = logging.getLogger("slipstream")


def of_module(
    module: PreTrainedModel, checkpoint: Path | None = None, chunk: int = 512, kv_blocks: int | None = None
) -> Target:
    """Make a target around a transformers model in memory, which is not changed.

    kv_blocks  number of blocks of a KV cache of fixed size; None: the cache grows.

    Raises UnsupportedModelError unless the model writes text and can be rolled back (an encoder-decoder must also read
    text, and have only supported settings in its generation configuration); ParameterError for a model in training
    mode, or for a KV cache of fixed size if each sequence has its own cache."""
    name = type(module).__name__
    answers = bool(module.config.is_encoder_decoder)
    if module.training:
        raise ParameterError(
            "the model is in training mode", why="dropout would change its distribution", fix="model.eval()"
        )
    if not module.can_generate():
        raise UnsupportedModelError(
            f"a {name} is not a causal language model or an encoder-decoder of texts",
            fix="use a model with a language model head",
        )
    if answers:
        _refuse_fixed_cache(name, kv_blocks)
    parts = ModuleParts(module)
    start, pad = (encoder_decoder.start_of(module), encoder_decoder.pad_of(module)) if answers else ((), None)
    shape, trial, cache = _run_alone(module, parts, start, pad)
    runtime = trials.runtime_of(module, trial.limit, checkpoint)
    if answers:
        assert shape.source_context is not None
        encoder, sources = Encoder(shape.source_context, start), EncodedSources(parts, shape.vocab_size, pad)
        sources.together = fault_of(trials.check_together, sources, trial) is None
        # Experts with a limited capacity would be filled by tokens of other sequences.
        kinds: Seq[str] = () if any(hasattr(part, "expert_capacity") for part in module.modules()) else KINDS[:1]

        def pack(kind: str) -> Target:
            runner = encoder_decoder.PackedAnswers(parts, shape, runtime, sources, kind)
            return encoder_decoder.EncoderDecoder(Decoder(runner, chunk, checkpoint=checkpoint), encoder, sources)

        def chains(one_by_one: bool) -> Target:
            runner = encoder_decoder.ChainsAnswers(parts, shape, runtime, sources, chunk=chunk, one_by_one=one_by_one)
            return encoder_decoder.EncoderDecoder(runner, encoder, sources)
    else:
        host = None if fault_of(_check_streams, module, parts, trial) else _lends(parts, shape, runtime)
        kinds = KINDS if len(parts.layers) == shape.layers else ()

        def pack(kind: str) -> Target:
            runner = PackedModule(parts, shape, runtime, kind, kv_blocks)
            return Decoder(runner, chunk, checkpoint=checkpoint, head_host=host)

        def chains(one_by_one: bool) -> Target:
            return ChainsOnly(parts, shape, runtime, host, chunk, one_by_one)

    target = _first_packed(name, pack, kinds if attends(cache) else (), trial)
    if target is None:
        _refuse_fixed_cache(name, kv_blocks)
        target = _as_chains(name, chains, has_states(cache), trial)
    if answers:
        sources.rules = OutputRules(module, len(start), shape.eos_ids, parts.device)
    return target


def _run_alone(
    module: PreTrainedModel, parts: ModuleParts, start: Seq[int], pad: int | None
) -> tuple[ModuleShape, Trial, DynamicCache]:
    """Return the model's shape, its trial (logits for two texts), and an empty cache. start, pad: ids of an
    encoder-decoder's texts. An error of the model's own code becomes an UnsupportedModelError."""
    ids = [token for token in range(int(parts.config.vocab_size)) if token != pad]
    a, b = ([ids[(37 * i + first) % len(ids)] for i in range(7)] for first in (11, 16))
    texts = [[*start, *a], [*start, *b]]
    sources: Seq[Seq[int]] = [b, a[:5]] if start else [(), ()]
    try:
        cache = new_cache(parts.cache_config)
        truth = [forward_logits(module, parts, *pair) for pair in zip(texts, sources, strict=True)]
        shape = shape_of(module.config, module.generation_config, truth[0].shape[-1])
        limit = trials.measure_limit(module, lambda text: forward_logits(module, parts, text, sources[0]), texts[0])
    except SlipstreamError:
        raise
    except Exception as fault:  # a model's own code may raise anything
        raise UnsupportedModelError(
            f"a {type(module).__name__} does not run on a text alone: {type(fault).__name__}: {fault}",
            why="it was called like a language model, with token ids and nothing else",
            fix="check that model(input_ids=ids, use_cache=False) gives logits",
        ) from fault
    return shape, Trial(texts, sources, truth, limit), cache


def _first_packed(name: str, packed: Callable[[str], Target], kinds: Seq[str], trial: Trial) -> Target | None:
    """Return a target that runs packed, in the first of these kinds of passes that is exact; None if none is exact."""
    faults: list[str] = []
    for kind in kinds:
        target = packed(kind)
        why = fault_of(trials.check_packed, target, trial)
        if why is None:
            return target
        faults.append(why)
    if faults:
        log.info("%s is not packed (%s): each sequence runs in its own forward pass", name, faults[0])
    return None


def _as_chains(name: str, chains: Callable[[bool], Target], states: bool, trial: Trial) -> Target:
    """Return the target with a cache for each sequence. It reads one token at a time if its states need it."""
    target = chains(False)
    why = fault_of(trials.check_chains, target, trial)
    if why is None:
        return target
    target = chains(True)
    if not states or fault_of(trials.check_chains, target, trial) is not None:
        raise UnsupportedModelError(
            f"a {name} cannot be rolled back: {why}",
            why="after a rejection, several tokens in one pass must give the same as one token at a time",
            fix="use another model; transformers itself runs this one, without speculation",
        )
    log.warning(
        f"{name} reads one token at a time once it has a state ({why}): output is exact, but verifying draft tokens "
        "saves no time"
    )
    return target


def _check_streams(module: PreTrainedModel, parts: ModuleParts, trial: Trial) -> None:
    """Raise unless each layer passes on one residual stream, which draft heads can read (Gemma 3n has four)."""
    with parts.collect_states(range(len(parts.layers) + 1)):
        forward_logits(module, parts, trial.texts[0])


def _refuse_fixed_cache(name: str, kv_blocks: int | None) -> None:
    if kv_blocks is not None:
        raise ParameterError(
            f"a {name} cannot have a KV cache of {kv_blocks} blocks",
            why="each of its sequences has its own cache, which grows",
            fix="leave kv_tokens out",
        )


def _lends(parts: ModuleParts, shape: ModuleShape, runtime: Runtime) -> HeadHost | None:
    """Offer the model's parts to draft heads; None if its layers, embedding or output head were not found."""
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
        embedding=lambda: weight_of(embedding, parts.device, parts.module.dtype),
        lm_head=lambda: weight_of(head, parts.device, parts.module.dtype),
        tied=embedding.weight is head.weight,
        runtime=runtime,
        module=parts.module,
    )
