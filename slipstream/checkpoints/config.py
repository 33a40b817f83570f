"""`DecoderConfig`: the architecture of a checkpoint, normalised from its Hugging Face `config.json`.

Executors build the model from this object alone, so every difference between families is decided here. Unknown settings
raise an error: without its rotary scaling, a model would generate fluent nonsense after a few thousand tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from slipstream.checkpoints.checkpoint import GENERATION, Checkpoint, CheckpointName, few
from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import make_refusal, object_of
from slipstream.checkpoints.families import FAMILIES
from slipstream.checkpoints.families.wrappers import WRAPPERS, text_part
from slipstream.checkpoints.gguf_config import gguf_config
from slipstream.checkpoints.layers import Latent, LayerDescription
from slipstream.checkpoints.module_shape import ModelShape
from slipstream.checkpoints.mxfp4 import is_mxfp4
from slipstream.checkpoints.recurrence import Recurrence
from slipstream.checkpoints.rotary import frequencies
from slipstream.core.strict import JsonMapping
from slipstream.errors import ConfigError, UnsupportedModelError, reading

log = logging.getLogger("slipstream")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelShape):
    """A decoder-only transformer: blocks of causal attention and MLP, residual stream of width `hidden_size` (d).

    each         the parts of each layer. Empty: all layers are like Llama's, with a `qk_norm` for each head, `windows`
                 and `experts`. `heads` (H), `kv_heads` (Hk) and `head_dim` (D) are the maxima over layers.
    norm         "rms" (weight only) or "layer" (with a bias unless `norm_bias` is false), epsilon `norm_eps`. out_eps:
                 epsilon of output norms, 0: `norm_eps`. embed_norm: embeddings are normalised, without weight.
    activation   "silu", "gelu", "gelu_tanh", "relu", "relu2" (squared) or "swiglu" (SwiGLU whose gate and input are
                 clamped to `limit`, as in gpt-oss). gated: down(act(gate(x)) * up(x)), otherwise down(act(up(x))).
    *_bias       whether these linear layers have a bias.
    ropes        parameters of each rotary embedding if layers differ; otherwise `rope_parameters` applies to all
                 layers.
    growth       (beta, n, ahead): queries of growing layers are multiplied by 1 + beta * log(1 + (position + ahead) //
                 n).
    embedding_scale, residual_scale, logits_scale  factors of the embedding, of each output added to the residual
    stream, and of the logits. logits_cap: c turns logits into c * tanh(logit / c); 0: no cap.
    side_width   width of a second embedding of each token for each layer, for `side_vocab` ids (Gemma 4); 0: none.
    after        0 for a decoder. For the MTP layer of a checkpoint (see `mtp_layer`): number of the decoder's layers
                 before it. An MTP layer has no own embedding or output head. final_norm: whether there is a norm before
                 the output head; the MTP layers of some families have no such norm.
    within       `model_type` of the multimodal model whose text part this is; "": not part of one.
    """

    intermediate_size: int
    each: tuple[LayerDescription, ...] = field(default=(), repr=False)
    norm: str = "rms"
    norm_bias: bool = True
    norm_eps: float = 1e-6
    out_eps: float = 0.0
    embed_norm: bool = False
    activation: str = "silu"
    limit: float = 0.0
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    ropes: tuple[JsonMapping, ...] = ()
    growth: tuple[float, int, int] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    side_width: int = 0
    side_vocab: int = 0
    after: int = 0
    final_norm: bool = True
    within: str = ""

    @staticmethod
    def load(checkpoint: CheckpointName) -> DecoderConfig:
        """Read the metadata of a GGUF file, or `config.json` of a folder or hub id, with `generation_config.json` if it
        exists.

        Logs a warning about unknown keys. Raises ConfigError or UnsupportedModelError, and the errors of
        `Checkpoint.open`.
        """
        opened = Checkpoint.open(checkpoint)
        if opened.is_gguf:
            return DecoderConfig.from_dict(gguf_config(opened.header))
        config = ReadKeys(opened.config)
        if is_mxfp4(config):
            del config["quantization_config"]  # tensors tell which weights are in MXFP4
        eos = opened.json(GENERATION).get("eos_token_id")
        if eos is not None:
            config["eos_token_id"] = eos
        decoder = DecoderConfig.from_dict(config)
        if unread := config.list_unread():
            log.warning(
                f"config.json of {opened.place} has {few(unread)}, ignored because unknown for {decoder.model_type}. "
                "Texts are wrong if one of these keys changes what the model computes"
            )
        return decoder

    @staticmethod
    def of_module(module: nn.Module) -> DecoderConfig:
        """Return the configuration of a loaded transformers model. As in `load`, its generation configuration takes
        precedence for the end-of-text ids."""
        config = module.config.to_dict()  # type: ignore[union-attr, operator]
        generation = getattr(module, "generation_config", None)  # base models without a head have no such attribute
        eos = getattr(generation, "eos_token_id", None)
        return DecoderConfig.from_dict(config if eos is None else config | {"eos_token_id": eos})

    @staticmethod
    def from_dict(config: Mapping[str, object]) -> DecoderConfig:
        """Normalise a parsed `config.json`, or `to_dict()` of a transformers configuration."""
        config = config if isinstance(config, ReadKeys) else ReadKeys(config)
        whole = str(config.get("model_type"))
        within = whole if whole in WRAPPERS else ""
        config = text_part(config) if within else config
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise ConfigError("config.json has no model_type", fix="export the checkpoint again")
        family = FAMILIES.get(model_type)
        if family is None:
            what, why = f"our own decoder does not run the architecture {model_type!r}", ", ".join(sorted(FAMILIES))
            raise make_refusal(what, f"it runs these: {why}")
        if config.get("quantization_config"):
            method = object_of(config, "quantization_config").get("quant_method")
            raise UnsupportedModelError(
                f"the weights of the checkpoint are quantised ({getattr(method, 'value', method)})",
                why="our own decoder reads only floating-point weights, and MXFP4",
                fix="use the unquantised checkpoint, with quantize='int8' if memory is short",
            )
        for key, plain in _ORDINARY.items():
            if key not in family.reads and config.get(key, plain) not in (plain, None):
                raise make_refusal(f"{key} is {config[key]!r}, but our own decoder supports only {plain}")
        failure = partial(_unreadable, config)
        with reading(failure, "correct it, or export the checkpoint again", ConfigError):
            decoder = DecoderConfig(**family.read(config), within=within)
            decoder.check()
        return decoder

    def check(self) -> None:
        """Raise ConfigError or UnsupportedModelError for sizes and parts that are inconsistent or not supported."""
        mask, experts, why, wrong = self.mask_token, self.experts, "", ""
        for layer in self.described:
            if layer.heads % layer.kv_heads:
                wrong = f"{layer.heads} heads cannot be divided evenly among {layer.kv_heads} KV heads"
            elif layer.latent is not None and layer.latent.rotated % 2:
                wrong, why = (f"qk_rope_head_dim {layer.latent.rotated} is odd", "rotary embeddings rotate pairs")
            elif self.position == "rope" and layer.rotary is not None and layer.head_dim % 2:
                wrong, why = f"head_dim {layer.head_dim} is odd", "rotary embeddings rotate pairs"
            elif layer.recurrence is not None and layer.recurrence.heads % layer.recurrence.groups:
                wrong = (
                    f"{layer.recurrence.heads} recurrent heads cannot be divided into {layer.recurrence.groups} groups"
                )
            elif layer.window is not None and layer.window < 1:
                wrong = f"sliding_window is {layer.window}, but must be at least 1"
            elif layer.latent is not None and (layer.gate or layer.qk_norm or layer.value_norm or layer.beside):
                raise make_refusal(
                    "our own decoder runs latent attention only without gates, other norms and recurrence"
                )
            elif layer.parallel and (layer.sparse or layer.norm_after or layer.scaled or self.residual_scale != 1):
                raise make_refusal(
                    "our own decoder runs parallel attention and MLP only without experts, output norms and factors"
                )
        if experts and experts.apart and self.norm != "rms":
            raise make_refusal("our own decoder runs experts with norms of their own only without LayerNorm")
        if self.embed_norm and self.side_width:
            raise make_refusal("our own decoder runs an embedding for each layer only without a norm of embeddings")
        if mask is not None and not (type(mask) is int and 0 <= mask < self.vocab_size):
            wrong = f"pard_token is {mask!r}, but the vocabulary has the ids 0..{self.vocab_size - 1}"
        elif experts and experts.count * self.layers > 200_000:
            wrong = f"config.json has {self.layers} layers of {experts.count} experts, more than any known model"
        elif experts and not 1 <= experts.per_token <= experts.count:
            wrong = f"num_experts_per_tok is {experts.per_token}, but must be from 1 to {experts.count}"
        elif experts and (experts.count % experts.groups or not 1 <= experts.top_groups <= experts.groups):
            wrong = f"{experts.count} experts cannot form {experts.groups} groups, {experts.top_groups} of them chosen"
        if wrong:
            raise ConfigError(wrong, why=why, fix="correct config.json")
        for number in range(len(self.rotaries)):
            self.rope(number)  # raises now, not at the first token, if unsupported

    @cached_property
    def described(self) -> tuple[LayerDescription, ...]:
        """The description of each layer."""
        if self.each:
            return self.each
        windows = self.windows or (None,) * self.layers
        return tuple(
            LayerDescription(
                heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, window=windows[i],
                qk_norm="head" if self.qk_norm else "", rotary=0 if self.position == "rope" else None,
                intermediate_size=0 if self.sparse(i) else self.intermediate_size, sparse=self.sparse(i),
            )
            for i in range(self.layers)
        )  # fmt: skip

    @cached_property
    def unlike_llama(self) -> str | None:
        """Describes the first part that only the native kernels support; None if every executor can run it."""
        plain = replace(self, each=())
        for name in (
            "embedding_scale",
            "residual_scale",
            "logits_scale",
            "logits_cap",
            "limit",
            "norm_bias",
            "side_width",
            "out_eps",
            "embed_norm",
        ):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                return f"it has {name} {getattr(self, name)}"
        if self.experts and not self.experts.plain:
            return "its experts are chosen or joined in another way than Mixtral's"
        for i, (layer, usual) in enumerate(zip(self.described, plain.described, strict=True)):
            for part in fields(layer):
                if getattr(layer, part.name) != getattr(usual, part.name):
                    return f"layer {i} has {part.name} {getattr(layer, part.name)!r}"
        if self.activation in ("relu2", "swiglu"):
            return f"its activation is {self.activation}"
        unusual = [p for p in self.rotaries if "dimensions" in p or p.get("rope_type") in ("longrope", "proportional")]
        return "its rotary embedding leaves dimensions out, or has factors for short texts" if unusual else None

    def mtp_layer(self, sparse: bool, final_norm: bool = True) -> DecoderConfig:
        """Return the configuration of the decoder's MTP layer: a projection of an embedding and a hidden state, then a
        layer with attention like the decoder's last. sparse: whether its MLP is a mixture of experts."""
        attending = next(layer for layer in reversed(self.described) if layer.recurrence is None)
        layer = replace(attending, sparse=sparse, intermediate_size=0 if sparse else self.intermediate_size)
        experts = replace(self.experts, layers=(True,)) if self.experts and sparse else None
        return replace(
            self, layers=1, after=self.layers, each=(layer,), windows=(layer.window,), experts=experts,
            final_norm=final_norm, mask_token=None,
        )  # fmt: skip

    @property
    def recurrences(self) -> tuple[Recurrence, ...]:
        """Return the `Recurrence` of each recurrent layer, in order."""
        return tuple(layer.recurrence for layer in self.described if layer.recurrence is not None)

    def state_bytes(self) -> int:
        """Return the bytes of a sequence's states, and of the inputs of its last 32 tokens, in float32."""
        return 4 * sum(part.cells + 32 * part.kept for part in self.recurrences)

    def factor(self, name: str) -> float:
        """Return the factor on the outputs of a linear layer, by its canonical name."""
        _, _, rest = name.partition("layers.")
        number, _, part = rest.partition(".")
        return self.described[int(number)].factors.get(part, 1.0) if part else 1.0

    def sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def rotaries(self) -> tuple[JsonMapping, ...]:
        """The parameters of all rotary embeddings."""
        return (self.ropes or (self.rope_parameters,)) if self.position == "rope" else ()

    def rope(self, number: int = 0) -> tuple[Tensor, float]:
        """Return the inverse frequencies of a rotary embedding, and the factor of cos and sin: `rotary.frequencies`."""
        return frequencies(self.rotaries[number], self.head_dim, self.context)

    @property
    def kv_width(self) -> int:
        return sum(layer.kv_heads * layer.head_dim for layer in self.described if layer.has_kv)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return canonical name -> shape of every weight of this decoder; linear weights are [out, in]."""
        d = self.hidden_size
        out: dict[str, tuple[int, ...]] = {} if self.after else {"embed_tokens.weight": (self.vocab_size, d)}
        if self.position == "learned":
            out["embed_positions.weight"] = (self.context, d)

        def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
            out[f"{name}.weight"] = (rows, columns)
            if bias:
                out[f"{name}.bias"] = (rows,)

        def norm(name: str, width: int = d) -> None:
            out[f"{name}.weight"] = (width,)
            if self.norm == "layer" and self.norm_bias:
                out[f"{name}.bias"] = (width,)

        def mlp(name: str, width: int) -> None:
            for part in ("gate", "up") if self.gated else ("up",):
                linear(f"{name}.{part}_proj", width, d, self.mlp_bias)
            linear(f"{name}.down_proj", d, width, self.mlp_bias)

        if self.after:
            linear("eh_proj", d, 2 * d)
            norm("enorm")
            norm("hnorm")
        if self.side_width:
            out["side_embed_tokens.weight"] = (self.side_vocab, self.layers * self.side_width)
            linear("side_projection", self.layers * self.side_width, d)
            norm("side_norm", self.side_width)
        for i, layer in enumerate(self.described):
            at = f"layers.{i}"
            if layer.norm_before:
                norm(f"{at}.input_layernorm")
            if layer.recurrence is not None and layer.mixes:
                out |= {f"{at}.recurrent.{part}": shape for part, shape in layer.recurrence.shapes(d).items()}
            if layer.attends:
                self._attention(f"{at}.self_attn", layer, out, linear)
            if layer.norm_before and not layer.one_norm:
                norm(f"{at}.post_attention_layernorm")
            for part in ("attention", "mlp") if layer.norm_after else ():
                norm(f"{at}.{part}_out_norm")
            if layer.scaled:
                out[f"{at}.layer_scalar.weight"] = (1,)
            if self.side_width:
                linear(f"{at}.side_gate", self.side_width, d)
                linear(f"{at}.side_projection", d, self.side_width)
                norm(f"{at}.side_norm")
            if layer.sparse:
                self._mixture(at, out, linear, mlp)
            if layer.intermediate_size:
                mlp(f"{at}.mlp", layer.intermediate_size)
        if self.final_norm:
            norm("norm")
        if not (self.tie_embeddings or self.after):
            out["lm_head.weight"] = (self.vocab_size, d)
        return out

    def _attention(self, at: str, layer: LayerDescription, out: dict[str, tuple[int, ...]], linear: Any) -> None:
        if layer.latent is not None:
            self._latent_attention(at, layer.heads, layer.latent, out, linear)
            return
        q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        own = [] if layer.shared is not None else ["k"] if layer.key_is_value else ["k", "v"]
        gate = [("gate", layer.heads * (layer.head_dim if layer.gate == "output" else 1))] if layer.gate else []
        for part, rows in (("q", q), *((part, kv) for part in own), *gate):
            linear(f"{at}.{part}_proj", rows, self.hidden_size, self.qkv_bias)
        linear(f"{at}.o_proj", self.hidden_size, q, self.o_bias)
        for part, width in zip(["q", *own[:1]] if layer.qk_norm in ("head", "width") else [], (q, kv), strict=False):
            out[f"{at}.{part}_norm.weight"] = (layer.head_dim if layer.qk_norm == "head" else width,)
        if layer.sinks:
            out[f"{at}.sinks.weight"] = (layer.heads,)

    def _latent_attention(
        self, at: str, heads: int, part: Latent, out: dict[str, tuple[int, ...]], linear: Any
    ) -> None:
        """Add the shapes of latent attention. k_up and v_up hold all heads, concatenated by rows."""
        d, queries = self.hidden_size, heads * (part.plain + part.rotated)
        if part.query_rank:
            linear(f"{at}.q_a_proj", part.query_rank, d, self.qkv_bias)
            out[f"{at}.q_a_norm.weight"] = (part.query_rank,)
            linear(f"{at}.q_b_proj", queries, part.query_rank)
        else:
            linear(f"{at}.q_proj", queries, d)
        linear(f"{at}.kv_a_proj", part.rotated + part.rank, d, self.qkv_bias)
        out[f"{at}.kv_a_norm.weight"] = (part.rank,)
        linear(f"{at}.k_up_proj", heads * part.rank, part.plain)
        linear(f"{at}.v_up_proj", heads * part.value, part.rank)
        linear(f"{at}.o_proj", d, heads * part.value, self.o_bias)

    def _mixture(self, at: str, out: dict[str, tuple[int, ...]], linear: Any, mlp: Any) -> None:
        experts = self.experts
        assert experts is not None
        linear(f"{at}.mlp.gate", experts.count, self.hidden_size, experts.router_bias)
        if experts.corrected:
            out[f"{at}.mlp.gate_correction.bias"] = (experts.count,)
        if experts.apart:
            norms = ("router_norm", "experts_norm", "experts_out_norm", "shared_out_norm")
            out |= {f"{at}.mlp.{part}.weight": (self.hidden_size,) for part in norms}
            out[f"{at}.mlp.expert_scales.weight"] = (experts.count,)
        for e in range(experts.count):
            mlp(f"{at}.mlp.experts.{e}", experts.intermediate_size)
        if experts.shared:
            mlp(f"{at}.mlp.shared_expert", experts.shared)
        if experts.shared_gate:
            linear(f"{at}.mlp.shared_expert_gate", 1, self.hidden_size)


def _unreadable(config: ReadKeys) -> str:
    return f"config.json cannot be read; the last key that was read is {config.last!r}"


_ORDINARY: JsonMapping = {
    "is_causal": True, "is_encoder_decoder": False, "per_layer_config": None, "attention_chunk_size": None,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}  # fmt: skip
"""For each key that changes what transformers computes, the only value that our decoder supports."""
