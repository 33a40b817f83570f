"""`ModelShape`: sizes of a model, known before its weights are read. `ModuleShape`: the sizes of a model that
transformers runs, from its configuration, whose keys differ between families. Importing this module does not import
torch.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.checkpoints.recurrence import Recurrence
from slipstream.core.strict import JsonMapping
from slipstream.errors import ConfigError, UnsupportedModelError, reading

UNBOUNDED = 2**31 - 1
"""Context of a model whose positions are distances (ALiBi), or that has no positions (recurrent models)."""

PADDING = 0.01
"""If two vocabulary sizes differ by less than this ratio, they are one vocabulary with different padding."""

_FIX = "correct config.json, or export the checkpoint again"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN_KEYS = ("num_experts_per_tok", "moe_top_k", "top_k_experts")


def differ(*widths: int) -> bool:
    """Return whether these vocabulary sizes differ by more than padding."""
    return max(widths) - min(widths) > PADDING * max(widths)


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: `count` MLPs, of which a router picks `per_token` for each token.

    norm_topk  whether the weights of the picked experts are rescaled to sum to 1, then multiplied by `scale`.
    layers     for each layer, whether its MLP is a mixture.
    sigmoid    whether the sigmoid turns scores into weights; otherwise the softmax over all experts.
    corrected  whether a learned bias is added to the weights when experts are picked.
    groups, top_groups  experts are picked from the best groups only, ranked by their `group_best` best experts.
    router_bias  whether scores have a bias.
    shared       width of the shared expert, which runs for every token; 0: none.
    shared_gate  whether the shared expert's output is multiplied by a sigmoid.
    weighted_inputs  whether weights multiply the experts' inputs instead of their outputs (Llama 4).
    apart      whether router and experts have their own input norms (the router's times width^-0.5), outputs of experts
               and shared expert have norms, and the weight of each expert has a factor (Gemma 4).
    """

    count: int
    per_token: int
    intermediate_size: int
    norm_topk: bool
    layers: tuple[bool, ...]
    sigmoid: bool = False
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    router_bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    weighted_inputs: bool = False
    apart: bool = False

    @property
    def plain(self) -> bool:
        """Return whether experts are picked by the softmax, as in Mixtral, without any of the features above."""
        usual = Experts(self.count, self.per_token, self.intermediate_size, self.norm_topk, self.layers)
        return self == usual


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model for any executor. For an encoder-decoder, `layers` and `context` are the decoder's.

    heads, kv_heads, head_dim  maxima over layers; 0 for a model without attention.
    context      maximum number of positions that the checkpoint supports.
    source_context  largest number of tokens that the encoder reads; None: no encoder.
    position     "rope", "learned" (embeddings added to the input), or "none" if the context has no bound.
    rope_parameters  theta, type and the parameters of that type; empty for learned positions.
    windows      for each layer, None (full attention) or W: a token sees itself and the W - 1 positions before it.
    eos_ids      ids that end a text, as in generation_config.json or else config.json; possibly empty.
    mask_token   `pard_token`: mask token of a model that predicts several tokens in one pass (PARD, arXiv 2504.18583);
                 None: the model is not trained for PARD.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    context: int
    source_context: int | None = None
    position: str = "rope"
    rope_parameters: JsonMapping = field(default_factory=dict)
    windows: tuple[int | None, ...] = ()
    experts: Experts | None = None
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    mask_token: int | None = None

    @cached_property
    def parameters(self) -> int:
        """Number of weights. A tied output head is counted once."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    @cached_property
    def active_parameters(self) -> int:
        """Number of weights used for one token: in each mixture, only the experts that the router picks."""
        experts = self.experts
        idle = 1 - experts.per_token / experts.count if experts else 0.0
        return round(self.parameters - idle * self.mixed_parameters)

    @cached_property
    def mixed_parameters(self) -> int:
        """Number of weights of all experts of all mixtures, without shared experts."""
        return sum(math.prod(shape) for name, shape in self.shapes().items() if ".mlp.experts." in name)

    @cached_property
    def step_parameters(self) -> int:
        """Number of weights that one decode step reads: the active weights without an untied input embedding, of which
        a step reads one row, and without an encoder, which runs once."""
        shapes = self.shapes()
        looked_up = [
            "embed_positions.weight",
            "side_embed_tokens.weight",
            *([] if self.tie_embeddings else ["embed_tokens.weight"]),
        ]
        if self.source_context is not None:
            looked_up += [name for name in shapes if "encoder." in name]
        return self.active_parameters - sum(math.prod(shapes[name]) for name in looked_up if name in shapes)

    def kv_bytes(self, itemsize: int = 4) -> int:
        """Return the bytes of KV cache per token, with `itemsize` bytes per number."""
        return 2 * self.kv_width * itemsize

    @property
    def recurrences(self) -> tuple[Recurrence, ...]:
        """The recurrent mixers that our own kernels run."""
        return ()

    @property
    def routed(self) -> tuple[int, int] | None:
        """(experts per token, number of experts), as `core.target.Capabilities.experts`."""
        return (self.experts.per_token, self.experts.count) if self.experts else None

    @property
    def kv_width(self) -> int:
        """How many numbers the keys of one token have, over all layers with their own keys."""
        return self.layers * self.kv_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by name; a tied head occurs once, as the embedding "embed_tokens.weight"."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModuleShape(ModelShape):
    """Sizes of a model that transformers runs. config: its configuration in transformers."""

    kv_width: int = 0
    config: Any = field(default=None, repr=False, compare=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `ModelShape.shapes`. The model is built without memory for its weights."""
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        auto: Any = AutoModelForCausalLM if self.source_context is None else AutoModelForSeq2SeqLM
        with reading("transformers cannot build a model from config.json", _FIX, ConfigError), torch.device("meta"):
            module = auto.from_config(self.config)
        weight = getattr(module.get_input_embeddings(), "weight", None)
        return {
            "embed_tokens.weight" if parameter is weight else name: tuple(parameter.shape)
            for name, parameter in module.named_parameters()
        }


def shape_of(config: Any, generation: Any, vocab_size: int | None = None) -> ModuleShape:
    """Return the shape of a transformers model.

    config      configuration of the whole model. generation: its generation configuration, or None.
    vocab_size  number of the model's logits; None: as in the configuration.
    """
    text = config.get_text_config(decoder=True)
    context = _bound(text, "max_decoder_position_embeddings")
    layers = text.num_hidden_layers
    source = None
    if config.is_encoder_decoder:
        layers = _first(text, "num_decoder_layers") or layers
        source = (getattr(config, "encoder", None) or config).get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    vocab = vocab_size or text.vocab_size
    # In some families (Gemma 4) sizes differ between layers, and the configuration has no common values.
    each = [] if config.is_encoder_decoder else list(getattr(text, "per_layer_config", ()))
    each = each or [text] * layers
    heads = [_first(one, "num_attention_heads") or 0 for one in each]
    kv_heads = [_first(one, "num_key_value_heads", "num_kv_heads") or n for one, n in zip(each, heads, strict=True)]
    dims = [_first(one, "head_dim") or (one.hidden_size // n if n else 0) for one, n in zip(each, heads, strict=True)]
    reusing = getattr(text, "num_kv_shared_layers", 0) or 0  # used without `kv_sharing_modes`
    shared = getattr(text, "kv_sharing_modes", None) or [None] * (len(each) - reusing) + ["reuse"] * reusing
    return ModuleShape(
        model_type=config.model_type,
        vocab_size=vocab,
        hidden_size=text.hidden_size,
        layers=layers,
        context=min(context, _count_unscaled(rope, context)),
        position="none" if context == UNBOUNDED else "rope" if rope else "learned",
        eos_ids=_eos(text, generation, vocab),
        heads=max(heads),
        kv_heads=max(kv_heads),
        head_dim=max(dims),
        kv_width=sum(n * d for n, d, mode in zip(kv_heads, dims, shared, strict=True) if mode != "reuse"),
        windows=_windows(text, each),
        tie_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        rope_parameters=rope,
        experts=_experts(text),
        source_context=_bound(source, "max_encoder_position_embeddings") if source else None,
        mask_token=getattr(text, "pard_token", None),
        config=config,
    )


def shape_in(folder: Path, kind: object) -> ModuleShape:
    """Return the shape of the model in a folder, from its small files. The folder's Python code does not run. kind:
    `model_type`.

    Raises UnsupportedModelError if the installed transformers has the architecture neither as a causal language model
    nor as an encoder-decoder of texts, and ConfigError for a configuration that transformers refuses."""
    import transformers

    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise explain_unknown(kind)
    with reading(f"transformers cannot read {folder / 'config.json'}", _FIX, ConfigError):
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        if type(config) not in known[bool(config.is_encoder_decoder)]:
            raise UnsupportedModelError(
                f"the architecture {kind!r} is neither a causal language model nor an encoder-decoder of texts",
                why="each token must depend only on earlier tokens, and perhaps on a source text",
                fix="give a causal language model, or an encoder-decoder such as T5",
            )
        generation = None
        if (folder / "generation_config.json").exists():
            generation = transformers.GenerationConfig.from_pretrained(str(folder))
        return shape_of(config, generation)


def explain_unknown(kind: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the architecture {kind!r} is known neither to Slipstream nor to the installed transformers",
        fix="install a newer version of transformers, or use another model",
    )


def _eos(text: object, generation: object, vocab: int) -> tuple[int, ...]:
    eos = getattr(generation, "eos_token_id", None)
    eos = getattr(text, "eos_token_id", None) if generation is None else eos
    ids = eos if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocab))


def _bound(text: object, key: str) -> int:
    """Return the context. T5's positions are distances; its `n_positions` is only the length of its training texts."""
    if hasattr(text, "relative_attention_num_buckets"):
        return UNBOUNDED
    return _first(text, key, *_CONTEXT_KEYS) or UNBOUNDED


def _count_unscaled(rope: Any, context: int) -> int:
    """Return the number of positions with the same rotary frequencies. "longrope" and "dynamic" change frequencies when
    a sequence becomes longer, but keys in the KV cache keep the old ones. So beyond this number, the output would
    depend on how the sequence is cut into passes."""
    each = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    varying = [one for one in each if one.get("rope_type") in ("longrope", "dynamic")]
    return min([int(one.get("original_max_position_embeddings") or context) for one in varying], default=context)


def _windows(text: object, each: list[Any]) -> tuple[int | None, ...]:
    types = getattr(text, "layer_types", None) or ["sliding"] * len(each)
    sizes = [_first(layer, "sliding_window") for layer in each]
    return tuple(size if "sliding" in kind else None for size, kind in zip(sizes, types, strict=True))


def _experts(text: Any) -> Experts | None:
    count, per_token = _first(text, *_EXPERT_KEYS), _first(text, *_PER_TOKEN_KEYS)
    if not count or not per_token or count < 2:
        return None
    return Experts(count, min(per_token, count), 0, True, (True,) * text.num_hidden_layers)


def _first(config: object, *keys: str) -> int | None:
    for key in keys:
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
