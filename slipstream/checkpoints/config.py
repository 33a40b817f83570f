"""`DecoderConfig`: the architecture of a checkpoint, normalised from its Hugging Face `config.json`.

Executors build the model from this alone, so every difference between families is decided here. Unknown settings raise
an error: without its rotary scaling, a model generates fluent nonsense after a few thousand tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checkpoints.checkpoint import GENERATION, Checkpoint, CheckpointName, few
from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.gguf_config import gguf_config
from slipstream.checkpoints.module_shape import Experts, ModelShape
from slipstream.errors import ConfigError, UnsupportedModelError, reading

log = logging.getLogger("slipstream")

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelShape):
    """A decoder-only transformer: pre-norm blocks of causal attention and MLP, residual stream of width
    `hidden_size` (d), `heads` query heads (H) and `kv_heads` key/value heads (Hk) of `head_dim` (D).

    norm         "rms" (weight only) or "layer" (weight and bias), epsilon `norm_eps`.
    activation   "silu", "gelu", "gelu_tanh" or "relu"; `gated`: down(act(gate(x)) * up(x)), else down(act(up(x))).
    *_bias       which linear layers have one; `qk_norm`: RMS norm over D of each query and key head before rope.
    """

    intermediate_size: int
    norm: str = "rms"
    norm_eps: float = 1e-6
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @staticmethod
    def load(checkpoint: CheckpointName) -> DecoderConfig:
        """Read `config.json`, and `generation_config.json` if it exists, of a folder or hub id; of a GGUF file, its
        metadata.

        A warning names the keys that are not known here. Raises ConfigError or UnsupportedModelError, and what
        `Checkpoint.open` raises.
        """
        opened = Checkpoint.open(checkpoint)
        if opened.is_gguf:
            return DecoderConfig.from_dict(gguf_config(opened.header))
        config = ReadKeys(opened.config)
        eos = opened.json(GENERATION).get("eos_token_id")
        if eos is not None:
            config["eos_token_id"] = eos
        decoder = DecoderConfig.from_dict(config)
        if unread := config.unread():
            log.warning(
                f"config.json of {opened.place} has {few(unread)}, unknown for a {decoder.model_type} model: left out. "
                "Texts differ if that changes what the model computes"
            )
        return decoder

    @staticmethod
    def of_module(module: nn.Module) -> DecoderConfig:
        """The configuration of a loaded transformers model. As in `load`, the end of a text is what its generation
        configuration says, if it has one that does."""
        config = module.config.to_dict()  # type: ignore[union-attr, operator]
        generation = getattr(module, "generation_config", None)  # base models without a head have none
        eos = getattr(generation, "eos_token_id", None)
        return DecoderConfig.from_dict(config if eos is None else config | {"eos_token_id": eos})

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> DecoderConfig:
        """Normalise a parsed `config.json`, or `to_dict()` of a transformers configuration."""
        config = config if isinstance(config, ReadKeys) else ReadKeys(config)
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise ConfigError("config.json has no model_type", fix="export the checkpoint again")
        family = FAMILIES.get(model_type)
        if family is None:
            raise UnsupportedModelError(
                f"our own decoder does not run the architecture {model_type!r}",
                why="it runs " + ", ".join(sorted(FAMILIES)),
                fix="use one of these",
            )
        if config.get("quantization_config"):
            method = object_of(config, "quantization_config").get("quant_method")
            raise UnsupportedModelError(
                f"the checkpoint is quantised ({getattr(method, 'value', method)})",
                why="our own decoder reads plain floating-point weights",
                fix="use the unquantised checkpoint and quantize='int8'",
            )
        for key, plain in _ORDINARY.items():
            if config.get(key, plain) not in (plain, None):
                raise _unsupported(f"{key} is {config[key]!r}, only {plain} is supported")
        with reading("config.json cannot be read", "correct it, or export the checkpoint again", ConfigError):
            decoder = family(config)
            decoder._check()
        return decoder

    def _check(self) -> None:
        mask, experts, why, wrong = self.mask_token, self.experts, "", ""
        if self.heads % self.kv_heads:
            wrong = f"{self.heads} heads do not divide among {self.kv_heads} key/value heads"
        elif self.position == "rope" and self.head_dim % 2:
            wrong, why = f"head_dim {self.head_dim} is odd", "rotary positions rotate pairs"
        elif mask is not None and not (type(mask) is int and 0 <= mask < self.vocab_size):
            wrong = f"pard_token is {mask!r}, the vocabulary has the ids 0..{self.vocab_size - 1}"
        elif experts and experts.count * self.layers > 200_000:
            wrong = f"config.json has {self.layers} layers of {experts.count} experts, more than any model"
        elif experts and not 1 <= experts.per_token <= experts.count:
            wrong = f"num_experts_per_tok is {experts.per_token} of {experts.count} experts"
        if wrong:
            raise ConfigError(wrong, why=why, fix="correct config.json")
        if self.position == "rope":
            self.rope()  # raises now, not at the first token, if it is not supported

    def sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def rope(self) -> tuple[Tensor, float]:
        """Inverse frequencies, float64 [D/2], and the factor that multiplies cos and sin (1 except for YaRN).

        The values are computed in float32 and then converted to float64: checkpoints were trained with float32
        frequencies, and at position 100,000 the difference is 0.006 radians.
        Sources: RoFormer (arXiv 2104.09864); linear: position interpolation (2306.15595); yarn (2309.00071);
        llama3: the Llama 3.1 release. "dynamic" and "longrope" are not supported: their frequencies
        change with the length of the text, but keys in the KV cache keep the old ones.
        """
        p = self.rope_parameters
        kind, theta, dim = _rope_type(p), _positive(p, "rope_theta"), self.head_dim
        powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim)  # [D/2]
        inv_freq = 1.0 / powers  # [D/2]
        scale = 1.0
        if p.get("partial_rotary_factor", 1.0) != 1.0:
            raise _unsupported(f"partial_rotary_factor is {p['partial_rotary_factor']!r}, only 1.0 is supported")
        if kind == "linear":
            inv_freq = inv_freq / _positive(p, "factor")
        elif kind == "llama3":
            inv_freq = _llama3(inv_freq, p, self.context)
        elif kind == "yarn":
            inv_freq, scale = _yarn(powers, theta, dim, p, self.context)
        elif kind != "default":
            raise _unsupported(
                f"the rotary scaling {kind!r} is not supported",
                "it supports default, linear, llama3, yarn; ignoring the scaling would change the output",
            )
        if "divisors" in p:  # GGUF files hold what divides each frequency, beside a scaling
            inv_freq = inv_freq / torch.tensor(p["divisors"])
        scale *= p.get("cos_sin_factor", 1.0)
        if not (inv_freq.isfinite().all() and math.isfinite(scale)):
            raise ConfigError(f"the rotary scaling {dict(p)} gives frequencies that are not finite", fix="correct it")
        return inv_freq.to(torch.float64), scale

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every weight that this decoder has; linear weights are [out, in]."""
        d, q, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, d)}
        if self.position == "learned":
            out["embed_positions.weight"] = (self.context, d)

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            out[f"{name}.weight"] = (rows, columns)
            if bias:
                out[f"{name}.bias"] = (rows,)

        def norm(name: str) -> None:
            out[f"{name}.weight"] = (d,)
            if self.norm == "layer":
                out[f"{name}.bias"] = (d,)

        def mlp(name: str, width: int) -> None:
            for part in ("gate", "up") if self.gated else ("up",):
                linear(f"{name}.{part}_proj", width, d, self.mlp_bias)
            linear(f"{name}.down_proj", d, width, self.mlp_bias)

        for i in range(self.layers):
            layer = f"layers.{i}"
            norm(f"{layer}.input_layernorm")
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                linear(f"{layer}.self_attn.{part}_proj", rows, d, self.qkv_bias)
            linear(f"{layer}.self_attn.o_proj", d, q, self.o_bias)
            if self.qk_norm:
                for part in ("q", "k"):
                    out[f"{layer}.self_attn.{part}_norm.weight"] = (self.head_dim,)
            norm(f"{layer}.post_attention_layernorm")
            if self.sparse(i):
                assert self.experts is not None
                linear(f"{layer}.mlp.gate", self.experts.count, d, False)
                for e in range(self.experts.count):
                    mlp(f"{layer}.mlp.experts.{e}", self.experts.intermediate_size)
            else:
                mlp(f"{layer}.mlp", self.intermediate_size)
        norm("norm")
        if not self.tie_embeddings:
            out["lm_head.weight"] = (self.vocab_size, d)
        return out


# --- one function per kind of family: config.json -> DecoderConfig -------------------------------------------


def _llama_like(config: ReadKeys) -> DecoderConfig:
    """Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE: RMS norm, rotary positions, gated MLP."""
    kind = config["model_type"]
    heads, layers = count_of(config, "num_attention_heads"), count_of(config, "num_hidden_layers")
    hidden = count_of(config, "hidden_size")
    attention_bias = kind in ("llama", "qwen3", "qwen3_moe") and _flag(config, "attention_bias", False)
    if hidden % heads and not (kind.startswith("qwen") or config.get("head_dim")):
        fix = "set head_dim in config.json"
        raise ConfigError(f"hidden_size {hidden} does not divide among {heads} heads", fix=fix)
    return DecoderConfig(
        model_type=kind,
        vocab_size=count_of(config, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=count_of(config, "num_key_value_heads", heads),
        head_dim=count_of(config, "head_dim", 128 if kind == "qwen3" else hidden // heads),
        intermediate_size=count_of(config, "intermediate_size"),
        context=count_of(config, "max_position_embeddings", LIKE_LLAMA[kind]),
        norm_eps=_positive(config, "rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
        activation=_activation(config, "hidden_act", "silu"),
        qkv_bias=attention_bias or kind == "qwen2",
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and _flag(config, "mlp_bias", False),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        mask_token=config.get("pard_token"),
        rope_parameters=_rope_parameters(config, kind),
        windows=_windows(config, kind, layers),
        experts=_experts(config, kind, layers),
        tie_embeddings=_flag(config, "tie_word_embeddings", False),
        eos_ids=_eos(config),
    )


def _gpt2(config: ReadKeys) -> DecoderConfig:
    """GPT-2 and DistilGPT-2: LayerNorm, learned positions, plain MLP, biases everywhere, tied head."""
    hidden, heads, layers = count_of(config, "n_embd"), count_of(config, "n_head"), count_of(config, "n_layer")
    if hidden % heads:
        raise ConfigError(f"n_embd {hidden} does not divide among {heads} heads", fix="correct config.json")
    return DecoderConfig(
        model_type="gpt2", vocab_size=count_of(config, "vocab_size"), hidden_size=hidden, layers=layers,
        heads=heads, kv_heads=heads, head_dim=hidden // heads, windows=(None,) * layers,
        intermediate_size=count_of(config, "n_inner", 4 * hidden),
        context=count_of(config, "n_positions", 1024), position="learned",
        norm="layer", norm_eps=_positive(config, "layer_norm_epsilon", 1e-5),
        activation=_activation(config, "activation_function", "gelu_new"), gated=False,
        qkv_bias=True, o_bias=True, mlp_bias=True,
        tie_embeddings=_flag(config, "tie_word_embeddings", True), eos_ids=_eos(config),
    )  # fmt: skip


LIKE_LLAMA = {
    "llama": 2048, "mistral": 131072, "mixtral": 131072, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768,
}  # fmt: skip
"""`model_type` -> the context that transformers assumes if config.json lacks it (its 4.x series writes no defaults)."""

_ORDINARY: Mapping[str, Any] = {
    "is_causal": True, "is_encoder_decoder": False, "per_layer_config": None, "attention_chunk_size": None,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}  # fmt: skip
"""Keys that change what transformers computes -> the only value that our decoder runs."""

FAMILIES: dict[str, Callable[[ReadKeys], DecoderConfig]] = {
    **dict.fromkeys(LIKE_LLAMA, _llama_like),
    "gpt2": _gpt2,
}
"""`model_type` -> how its config.json is read."""


# --- parts of a config.json ------------------------------------------------------------------------------------


def _rope_parameters(config: ReadKeys, kind: str) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4), which wins over them: a
    scaling is often added by hand to what transformers 5 wrote."""
    new, old = object_of(config, "rope_parameters"), object_of(config, "rope_scaling")
    parameters = ReadKeys(old or new)
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            raise _unsupported(f"rotary parameters are given for {key!r} apart", "layers share one table of positions")
    parameters.setdefault("rope_theta", config.get("rope_theta", 1e6 if kind == "mixtral" else 1e4))
    if "partial_rotary_factor" in config:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if _rope_type(parameters) in ("yarn", "llama3") and config.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    config["rope_scaling" if old else "rope_parameters"] = parameters
    return parameters


def _rope_type(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    if kind == "llama":
        return (None,) * layers
    if kind in ("mistral", "mixtral"):  # a missing key: 4096 for Mistral, none for Mixtral
        used = config.get("sliding_window", 4096 if kind == "mistral" else None) is not None
    else:
        used = config.get("sliding_window", 4096) is not None and _flag(config, "use_sliding_window", False)
    types = config.get("layer_types") if kind in ("qwen2", "qwen3") else None
    if not used and "sliding_attention" not in (types or ()):
        return (None,) * layers
    window = count_of(config, "sliding_window", 4096, least=2) if used else None  # transformers runs 1 in its own way
    if kind in ("mistral", "mixtral", "qwen3_moe"):
        return (window,) * layers
    if types is None:
        first = count_of(config, "max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    known = ("full_attention", "sliding_attention")
    if not used or not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise ConfigError(
            f"layer_types must name {known if used else known[0]} for each of {layers} layers, got {types!r}",
            fix="correct config.json",
        )
    return tuple(window if t == "sliding_attention" else None for t in types)


def _experts(config: Mapping[str, Any], kind: str, layers: int) -> Experts | None:
    count_key = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers knows both names
    if kind == "mixtral":
        return Experts(
            count=count_of(config, count_key, 8),
            per_token=count_of(config, "num_experts_per_tok", 2),
            intermediate_size=count_of(config, "intermediate_size"),
            norm_topk=True,
            layers=(True,) * layers,
        )
    if kind != "qwen3_moe":
        return None
    step = count_of(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    return Experts(
        count=count_of(config, count_key, 128),
        per_token=count_of(config, "num_experts_per_tok", 8),
        intermediate_size=count_of(config, "moe_intermediate_size", 768),
        norm_topk=_flag(config, "norm_topk_prob", False),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise ConfigError(f"eos_token_id is {eos!r}, expected an integer or a list", fix="correct config.json")
    vocab = count_of(config, "vocab_size")
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab))  # an id outside the vocabulary is never generated


def _activation(config: Mapping[str, Any], key: str, default: str) -> str:
    name = config.get(key, default)
    if name not in _ACTIVATIONS:
        raise _unsupported(
            f"the activation {name!r} is not supported", "it supports " + ", ".join(sorted(_ACTIVATIONS))
        )
    return _ACTIVATIONS[name]


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of config.json, empty if it is missing or null. Raises ConfigError."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}, expected an object", fix="correct config.json")
    return value or {}


def count_of(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """An integer of config.json, at least `least`. Raises ConfigError."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise ConfigError(f"{key} is {value!r}, must be an integer >= {least} and < 2**31", fix="correct config.json")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}, must be true or false", fix="correct config.json")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _value(config, key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value!r}, must be a positive number", fix="correct config.json")
    return value


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json has no {key}", why="the model depends on it", fix="export it again")
    return value


def _unsupported(what: str, why: str = "") -> UnsupportedModelError:
    fix = "use a checkpoint without it; transformers itself runs this one, without speculation"
    return UnsupportedModelError(what, why=why, fix=fix)


# --- rotary scalings -------------------------------------------------------------------------------------------


def _llama3(inv_freq: Tensor, p: Mapping[str, Any], context: int) -> Tensor:
    """Llama 3.1: divide the frequencies of long wavelengths by `factor`, keep short ones, interpolate between."""
    factor, low, high = (_positive(p, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = _positive(p, "original_max_position_embeddings", context)
    wavelength = 2 * math.pi / inv_freq  # [D/2]
    slowed = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)  # [D/2]
    smooth = (trained / wavelength - low) / (high - low)  # [D/2]
    between = (1 - smooth) * slowed / factor + smooth * slowed  # [D/2]
    medium = ~(wavelength < trained / high) & ~(wavelength > trained / low)  # [D/2]
    return torch.where(medium, between, slowed)


def _yarn(powers: Tensor, theta: float, dim: int, p: Mapping[str, Any], context: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a linear ramp over the dimensions, from kept to interpolated frequencies."""
    trained = _positive(p, "original_max_position_embeddings", context)
    factor = _positive(p, "factor", context / trained)
    mscale, mscale_all, fast, slow = (
        _positive(p, key) if p.get(key) else other
        for key, other in (("mscale", 0.0), ("mscale_all_dim", 0.0), ("beta_fast", 32.0), ("beta_slow", 1.0))
    )

    def grown(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    scale = _positive(p, "attention_factor", grown(mscale) / grown(mscale_all) if mscale and mscale_all else grown(1.0))

    def dimension(rotations: float) -> float:
        """The dimension with `rotations` full rotations over the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if _flag(p, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as in the reference: avoids 0/0
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)  # [D/2]
    keep = 1 - ramp  # [D/2]
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(scale)
