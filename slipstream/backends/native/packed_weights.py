"""Packs the weights of decoders and draft heads into the layout that the kernels read."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.native.kernels import processor, records
from slipstream.backends.native.kernels.addresses import matrix_tile_address
from slipstream.backends.native.kernels.formats import FORMATS, Format, named
from slipstream.backends.native.kernels.processor import PANEL, byte_offset
from slipstream.backends.native.kernels.products import ALIGN
from slipstream.backends.native.kernels.records import (
    EMBEDDING,
    GELU,
    GELU_TANH,
    LAYER,
    MATRIX,
    MODEL,
    RECURRENT,
    RELU,
    RELU_SQUARED,
    SILU,
    SWIGLU,
)
from slipstream.backends.native.quantise import quantise_blocks, quantise_rows
from slipstream.backends.native.threads import allocate_aligned
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.recurrence import CONVOLUTION, DELTA, STATE_SPACE, Recurrence
from slipstream.checkpoints.weight_blocks import Blocks, format_holding, stack
from slipstream.checkpoints.weight_formats import WeightFormat
from slipstream.checkpoints.weights import Weights
from slipstream.host.machine import give_back_freed

# --- formats ---------------------------------------------------------------------------------------------------------


def narrowest(tensors: Iterable[Tensor]) -> str:
    """Return the narrowest format that represents all of these tensors exactly."""
    left = [torch.float16, torch.bfloat16]
    for tensor in tensors:
        left = [dtype for dtype in left if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)]
    return format_of(left[0] if left else torch.float32)


def format_of(stored: torch.dtype) -> str:
    """Return the format that represents this dtype exactly. It is float32 for float16 if the processor cannot convert
    float16."""
    if stored == torch.bfloat16:
        return "bfloat16"
    return "float16" if stored == torch.float16 and processor.converts_half() else "float32"


def choose_format(quantised: WeightFormat) -> str:
    """Return the format in which this processor multiplies by weights of format `quantised`."""
    return quantised.name if processor.has_byte_dots() else quantised.without or quantised.name


def _bits(values: Tensor, fmt: str) -> np.ndarray:
    """Weights as the bit patterns of a format."""
    if fmt == "float32":
        return values.float().numpy()
    return values.to(torch.float16 if fmt == "float16" else torch.bfloat16).view(torch.int16).numpy()


@dataclass
class Layout:
    """Copies tensors into memory that the kernels read, and keeps that memory alive.

    arrays  every array whose address was given to a kernel.
    nbytes  bytes of the matrices, biases and norms.
    """

    arrays: list[np.ndarray] = field(default_factory=list)
    nbytes: int = 0
    _zeros: np.ndarray | None = None

    def room(self, nbytes: int, value: int = 0) -> np.ndarray:
        """Allocate uint8 [nbytes], filled with this value."""
        array = allocate_aligned(nbytes, value)
        self.arrays.append(array)
        self.nbytes += array.nbytes
        return array

    def keep(self, values: np.ndarray) -> int:
        """Copy these values and return the address of the copy."""
        copy = self.room(values.nbytes)
        copy[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return int(copy.ctypes.data)

    def vector(self, values: Tensor | None) -> int:
        """Copy a vector as float32 and return its address; 0 for None."""
        return 0 if values is None else self.keep(values.float().numpy())

    def _no_bias(self, outs: int) -> int:
        """Address of `outs` zeros."""
        if self._zeros is None or len(self._zeros) < outs:
            self._zeros = np.zeros(outs, np.float32)
            self.arrays.append(self._zeros)
        return int(self._zeros.ctypes.data)

    def matrix(self, weight: Tensor, fmt: str, bias: Tensor | None = None) -> np.ndarray:
        """Pack weight [out, in] and bias [out] as a MATRIX record."""
        return self._stack([weight], fmt, bias, tuple(weight.shape))

    def _stack(self, parts: Iterable[Tensor], fmt: str, bias: Tensor | None, shape: tuple[int, ...]) -> np.ndarray:
        """Pack parts [out, in], stacked by rows to `shape`, as a MATRIX record. One part is in memory at a time."""
        kind, (outs, width) = named(fmt), shape
        if kind.span:
            return self.blocks((quantise_blocks(part, kind.bits) for part in parts), kind, bias, outs, width)
        unit = kind.group or kind.step
        columns, padded = -(-width // unit) * unit, -(-outs // ALIGN) * ALIGN
        added = byte_offset() if kind.integer and kind.step == 4 else 0
        number = np.dtype((np.int8 if kind.step == 2 else np.uint8) if kind.integer else f"i{kind.bytes}")
        whole, scale = self.room(padded * columns * number.itemsize, added), np.zeros(padded, np.float32)
        panels = whole.view(number).reshape(padded // PANEL, columns // kind.step, PANEL, kind.step)
        for at, part in _in_panels(parts, torch.cat):
            if kind.integer:
                rounded, units = quantise_rows(part.float())
                scale[at : at + len(part)] = units.numpy()[:, 0]
                each = rounded.numpy().view(number) ^ number.type(added)  # adds 128
            else:
                each = _bits(part, fmt).view(number)
            if len(part) % PANEL or columns > width:
                each = np.pad(each, ((0, -len(part) % PANEL), (0, columns - width)), constant_values=added)
            rows = each.reshape(-1, PANEL, columns // kind.step, kind.step).transpose(0, 2, 1, 3)
            panels[at // PANEL : at // PANEL + len(rows)] = rows
        return self._record(kind, whole, bias, padded, width, columns, self.keep(scale) if kind.integer else 0)

    def blocks(self, parts: Iterable[Blocks], kind: Format, bias: Tensor | None, outs: int, columns: int) -> np.ndarray:
        """Pack parts stored in blocks, stacked by rows, as a MATRIX record without rounding again; see `block_tiles`.
        Each part is packed before the next part is read."""
        padded = -(-outs // ALIGN) * ALIGN
        whole = self.room(padded // PANEL * (columns // kind.span) * kind.span_bytes)
        panels = whole.reshape(padded // PANEL, columns // kind.span, kind.span_bytes)
        alike = (part.divide(kind) for part in parts)
        for at, part in _in_panels(alike, stack):
            panels_of_part = _panels(part, kind)
            panels[at // PANEL : at // PANEL + len(panels_of_part)] = panels_of_part
        return self._record(kind, whole, bias, padded, columns, columns)

    def _record(
        self, kind: Format, whole: np.ndarray, bias: Tensor | None, outs: int, width: int, columns: int, scales: int = 0
    ) -> np.ndarray:
        """Make a MATRIX record of weights in panels (`whole`, in memory of this layout). outs and columns are padded;
        width is not. scales: an address."""
        record = np.zeros((), MATRIX)
        record["tile"], record["format"] = matrix_tile_address(kind), FORMATS.index(kind)
        record["weights"], record["scales"] = whole.ctypes.data, scales
        if bias is None:
            record["bias"] = self._no_bias(outs)
        else:
            record["bias"] = self.keep(np.pad(bias.float().numpy(), (0, outs - len(bias))))
        record["outs"], record["width"], record["columns"] = outs, width, columns
        record["most_rows"], record["group"] = kind.most_rows, kind.group
        record["out_bytes"], record["row_bytes"] = whole.nbytes // outs, kind.row_bytes(columns)
        return record[()]

    def join(self, weights: Mapping[str, Tensor], names: Seq[str], fmt: str) -> np.ndarray:
        """Pack linear layers with the same input, stacked by rows, as a MATRIX record, with biases if any."""
        shapes, parts = zip(*(_read(weights, f"{n}.weight") for n in names), strict=True)
        shape = sum(outs for outs, _ in shapes), shapes[0][1]
        return self._stack(chain.from_iterable(parts), fmt, _join_bias(weights, names), shape)

    def join_linear(self, weights: Weights, names: Seq[str], fmt: str, as_stored: bool) -> np.ndarray:
        """Join linear layers in their stored blocks if they have any and `as_stored` is true, else in `fmt`."""
        blocks = self.join_blocks(weights, names) if as_stored else None
        return self.join(weights, names, fmt) if blocks is None else blocks

    def join_blocks(self, weights: Weights, names: Seq[str]) -> np.ndarray | None:
        """Join linear layers that are stored in blocks, without conversion; None if they are stored otherwise."""
        whole, kind = [f"{n}.weight" for n in names], format_stored(weights, names)
        if kind is None:
            return None
        parts = (weights.blocks(name, rows) for name in whole for rows in weights.slices(name))
        outs = sum(weights.shapes[name][0] for name in whole)
        columns = weights.shapes[whole[0]][1]
        return self.blocks(parts, named(kind.name), _join_bias(weights, names), outs, columns)  # type: ignore[arg-type]

    def split(self, matrix: np.ndarray, count: int) -> int:
        """Split the outputs of a matrix into `count` equal parts. Returns the address of MATRIX [count]."""
        parts, outs = np.full(count, matrix, MATRIX), int(matrix["outs"]) // count
        each = outs * np.arange(count)
        parts["outs"], parts["weights"] = outs, parts["weights"] + each * int(matrix["out_bytes"])
        parts["bias"] += 4 * each
        parts["scales"] += 4 * each * (int(matrix["scales"]) != 0)
        self.arrays.append(parts)
        return int(parts.ctypes.data)

    def find_vector(self, weights: Mapping[str, Tensor], name: str) -> int:
        """Copy a vector and return its address; 0 if no tensor has this name."""
        return self.vector(weights[name]) if name in weights else 0

    def embedding(self, weights: Mapping[str, Tensor], name: str) -> np.ndarray:
        """Store a weight [V, d] by rows in the narrowest exact format, as an EMBEDDING record."""
        shape, parts = _read(weights, name)
        kind, record, at = named(narrowest(parts)), np.zeros((), EMBEDDING), 0
        before = self.nbytes
        whole = self.room(math.prod(shape) * kind.bytes)
        self.nbytes = before  # embeddings do not count, because a pass reads only a few rows
        for part in _read(weights, name)[1]:
            each = np.ascontiguousarray(_bits(part, kind.name)).reshape(-1).view(np.uint8)
            whole[at : at + each.nbytes] = each
            at += each.nbytes
        record["values"], record["format"] = whole.ctypes.data, FORMATS.index(kind)
        record["count"], record["width"] = shape
        return record[()]


def format_stored(weights: Weights, names: Seq[str]) -> WeightFormat | None:
    """Return the narrowest block format that represents all of these linear layers exactly; None if they are not stored
    in blocks."""
    first = [blocks for n in names if (blocks := weights.blocks(f"{n}.weight", slice(0, 1))) is not None]
    return format_holding(first) if len(first) == len(names) else None


def _read(weights: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], Iterator[Tensor]]:
    """Return the shape of a matrix and its rows as they are stored. Rows of a checkpoint are read a few at a time."""
    if isinstance(weights, Weights):
        return weights.shapes[name], (weights.part(name, rows, True) for rows in weights.slices(name))
    return tuple(weights[name].shape), iter([weights[name]])


Part = TypeVar("Part", Tensor, Blocks)


def _in_panels(parts: Iterable[Part], join: Callable[[list[Part]], Part]) -> Iterator[tuple[int, Part]]:
    """Yield the rows of all parts in order, as (first row, piece). All pieces but the last have whole panels."""
    left: Part | None = None
    at = 0
    for each in parts:
        part = each if left is None else join([left, each])
        count = len(part) // PANEL * PANEL
        if count:
            yield at, part[:count]
        at, left = at + count, part[count:] if count < len(part) else None
    if left is not None:
        yield at, left


def _panels(weight: Blocks, kind: Format) -> np.ndarray:
    """Convert weights to the bytes of a format, [panels, spans, bytes of a span]; see `block_tiles`."""
    outs, columns = weight.shape
    spans, padded = columns // kind.span, -(-outs // PANEL) * PANEL

    def panels(values: np.ndarray, parts: int, step: int = 1) -> np.ndarray:
        """Reorder [outs, n] to [panels, parts, n / parts / step, PANEL, step]."""
        each = np.pad(values, ((0, padded - outs), (0, 0))).reshape(padded // PANEL, PANEL, parts, -1, step)
        return each.transpose(0, 2, 3, 1, 4)

    def flat(values: np.ndarray, parts: int) -> np.ndarray:
        """Return values as bytes [panels, parts, bytes of a part]."""
        return np.ascontiguousarray(values).view(np.uint8).reshape(padded // PANEL, parts, -1)

    added = np.uint8(0 if kind.table else kind.added)
    quads = panels(weight.integers.view(np.uint8) + added, spans * kind.groups, 4)
    planes = [quads]
    if kind.bits < 8:
        low = quads & 15
        planes = [low[:, :, ::2] | low[:, :, 1::2] << 4]
    if kind.upper:
        upper = (quads >> 4).reshape(*quads.shape[:2], -1, 8 // kind.upper, PANEL, 4)
        shifts = np.arange(0, 8, kind.upper, dtype=np.uint8)[:, None, None]
        planes.append(np.bitwise_or.reduce(upper << shifts, axis=3))
    tables = [scales for scales in (weight.scales, weight.minima) if scales is not None]
    factors = [
        flat(panels(x.factors, spans * kind.groups), spans * kind.groups) for x in tables if x.factors is not None
    ]
    groups = np.concatenate([*factors, *(flat(plane, spans * kind.groups) for plane in planes)], axis=2)
    return np.concatenate([*(flat(panels(x.values, spans), spans) for x in tables), flat(groups, spans)], axis=2)


def _join_bias(weights: Mapping[str, Tensor], names: Seq[str]) -> Tensor | None:
    """Concatenate the biases of linear layers; None if the layers have no biases."""
    each = [weights[f"{n}.bias"].float() for n in names if f"{n}.bias" in weights]
    return torch.cat(each) if each else None


@dataclass(frozen=True)
class SharedTables:
    """A target's EMBEDDING record and the MATRIX record of its output head, and the layout that owns their memory."""

    embedding: np.ndarray
    head: np.ndarray
    owner: Layout


def tie(matrix: np.ndarray, count: int) -> np.ndarray:
    """Make an EMBEDDING record that reads the first `count` outputs of a matrix, for tied embeddings."""
    record = np.zeros((), EMBEDDING)
    record["values"], record["format"], record["width"] = matrix["weights"], matrix["format"], matrix["width"]
    record["panelled"], record["count"] = 1, count
    kind = FORMATS[int(matrix["format"])]
    record["group"], record["bits"], record["span"], record["minima"] = kind.group, kind.bits, kind.span, kind.minima
    return record[()]


# --- decoders --------------------------------------------------------------------------------------------------------


ACTIVATIONS = {
    "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU, "relu2": RELU_SQUARED, "swiglu": SWIGLU,
}  # fmt: skip
"""The kernels' number of each activation function."""


def describe_layer(record: np.ndarray, config: DecoderConfig, number: int, layout: Layout) -> None:
    """Fill a LAYER record with the parts of a layer, without its weights."""
    layer = config.described[number]
    record["heads"], record["kv_heads"], record["size"] = layer.heads, layer.kv_heads, layer.head_dim
    record["kv"], record["writes"] = number if layer.shared is None else layer.shared, layer.shared is None
    record["window"], record["parallel"] = (layer.window or 0) * (-1 if layer.chunked else 1), layer.parallel
    record["gate"] = {"": 0, "output": 1, "head": layer.head_dim}[layer.gate]
    record["scale"], record["cap"], record["out_scale"] = layer.score_scale, layer.cap, layer.out_scale
    record["wide_norm"], record["late_norm"] = layer.qk_norm == "width", layer.late_norm
    record["key_is_value"] = layer.key_is_value
    record["value_norm"] = layout.vector(torch.ones(layer.head_dim)) if layer.value_norm else 0
    if layer.rotary is not None:
        record["rotary"] = 1 + layer.rotary
        record["rotated"] = config.rotaries[layer.rotary].get("dimensions", layer.head_dim)
    if layer.latent is not None:
        record["key_is_value"] = 1
        for name in ("rank", "query_rank", "rotated", "plain", "eps"):
            record["latent"][name] = getattr(layer.latent, name)
    record["factor"] = 1
    record["growth"] = 1 + len(config.rotaries) if layer.growing else 0


def recurrent_layer(
    part: Recurrence, config: DecoderConfig, number: int, weights: Mapping[str, Tensor], layout: Layout
) -> np.ndarray:
    """Make a RECURRENT record with the layer's weights, except for its linear layers."""
    record, at = np.zeros((), RECURRENT), f"layers.{number}.recurrent"
    record["kind"] = {CONVOLUTION: records.CONVOLUTION, DELTA: records.DELTA, STATE_SPACE: records.STATE_SPACE}[
        part.kind
    ]
    for name in ("taps", "heads", "groups", "key", "value", "channels", "kept", "normed", "gate_first", "tiled"):
        record[name] = getattr(part, name)
    record["gate"] = sum(part.projections.values()) - part.width
    convolved = [weights[f"{at}.conv_{name}.weight"].float()[:, 0] for name in part.mixed]
    record["conv"] = layout.vector(torch.cat(convolved).t())
    biases = [weights[f"{at}.conv_{name}.bias"].float() for name in part.mixed if part.conv_bias]
    record["conv_bias"] = layout.vector(torch.cat(biases)) if biases else 0
    if part.per_head:
        record["rate"] = layout.vector(-weights[f"{at}.A_log"].double().exp().float())
        record["step_bias"] = layout.vector(weights[f"{at}.dt_bias"])
        record["step_scale"] = 2 if part.doubled else 1
    record["skip"] = layout.find_vector(weights, f"{at}.D")
    if part.normed:
        norm = weights[f"{at}.norm.weight"]
        record["norm"], record["norm_width"] = layout.vector(norm), len(norm)
        record["eps"] = config.norm_eps if part.eps is None else part.eps
    before = [layer.recurrence for layer in config.described[:number] if layer.recurrence is not None]
    record["cells_before"] = sum(each.cells for each in before)
    record["kept_before"] = sum(each.kept for each in before)
    record["tail_before"] = sum((each.taps - 1) * each.kept for each in before)
    return record[()]


def describe_model(record: np.ndarray, config: DecoderConfig) -> None:
    """Fill a MODEL record with the settings that all layers of a decoder share, without its weights."""
    record["width"], record["vocab"] = config.hidden_size, config.vocab_size
    record["layer_norm"], record["activation"] = config.norm == "layer", ACTIVATIONS[config.activation]
    record["gated"], record["eps"], record["limit"] = config.gated, config.norm_eps, config.limit
    record["out_eps"] = config.out_eps or config.norm_eps
    record["embedding_scale"], record["residual_scale"] = config.embedding_scale, config.residual_scale
    record["logits_scale"], record["logits_cap"] = config.logits_scale, config.logits_cap
    if config.experts is not None:
        record["experts_per_token"], record["normed_experts"] = config.experts.per_token, config.experts.norm_topk
        record["most_experts"], record["sigmoid_experts"] = config.experts.count, config.experts.sigmoid
        record["groups"], record["top_groups"] = config.experts.groups, config.experts.top_groups
        record["experts_scale"], record["weighted_inputs"] = config.experts.scale, config.experts.weighted_inputs
        record["group_best"] = config.experts.group_best


def choose_formats(weights: Weights, quantised: WeightFormat | None, dtype: torch.dtype) -> tuple[str, str]:
    """Choose the format of linear layers, and the format of the few linear layers that are never quantised."""
    linear = [n for n, shape in weights.shapes.items() if len(shape) == 2 and "embed" not in n]
    linear += [weights.head] if weights.head in weights else []
    kinds = {weights.find_dtype(name) for name in linear if weights.blocks(name, slice(0, 1)) is None}
    floats = format_of(kinds.pop() if len(kinds) == 1 else torch.float32)
    fmt = choose_format(quantised) if quantised else "bfloat16_pairs" if dtype == torch.bfloat16 else floats
    return fmt, floats


def decoder_weights(
    config: DecoderConfig,
    weights: Weights,
    quantised: WeightFormat | None,
    dtype: torch.dtype,
    layout: Layout,
    tables: SharedTables | None = None,
) -> np.ndarray:
    """Pack a decoder as MODEL [1]; reads every tensor once. Without quantisation, matrices keep their stored format if
    `dtype` is float32. tables: embedding and output head for a model without its own."""
    fmt, floats = choose_formats(weights, quantised, dtype)

    vector = partial(layout.find_vector, weights)
    as_stored = quantised is None and dtype == torch.float32
    unbiased = layout.vector(torch.zeros(config.hidden_size)) if config.norm == "layer" else 0

    def join(names: Seq[str], chosen: str = fmt) -> np.ndarray:
        matrix = layout.join_linear(weights, names, chosen, as_stored)
        factors = [config.factor(name) for name in names]
        if any(factor != 1 for factor in factors):
            each = np.repeat(factors, [weights.shapes[f"{name}.weight"][0] for name in names])
            matrix["factors"] = layout.keep(np.pad(each, (0, int(matrix["outs"]) - len(each))).astype(np.float32))
        return matrix

    def join_first(layer: np.ndarray, names: Seq[str]) -> None:
        """Join the first product of a layer in up to three parts, so that each part keeps its stored format."""
        parts = [list(part) for _, part in groupby(names, lambda name: as_stored and format_stored(weights, [name]))]
        parts[1:-1] = [list(chain(*parts[1:-1]))] if len(parts) > 3 else parts[1:-1]
        at = 0
        for field_name, part in zip(("qkv", "second", "third"), parts, strict=False):
            layer[field_name] = join(part)
            if at:
                layer[f"{field_name}_at"] = at
            at += sum(weights.shapes[f"{name}.weight"][0] for name in part)

    def norm(record: np.ndarray, field_name: str, name: str) -> None:
        record[field_name] = vector(f"{name}.weight")
        if record[field_name]:
            record[f"{field_name}_bias"] = vector(f"{name}.bias") or unbiased

    def mlp(name: str) -> tuple[np.ndarray, np.ndarray]:
        up = [f"{name}.{part}_proj" for part in (("gate", "up") if config.gated else ("up",))]
        return join(up), join([f"{name}.down_proj"])

    def pack_latent(layer: np.ndarray, at: str, heads: int) -> None:
        first = "q_a_proj" if f"{at}.q_a_proj.weight" in weights else "q_proj"
        layer["qkv"], layer["o"] = join([f"{at}.{first}", f"{at}.kv_a_proj"]), join([f"{at}.o_proj"])
        record = layer["latent"]
        record["norm"], record["q_norm"] = vector(f"{at}.kv_a_norm.weight"), vector(f"{at}.q_a_norm.weight")
        if record["q_norm"]:
            record["q_b"] = join([f"{at}.q_b_proj"])
        record["k_up"], record["v_up"] = (layout.split(join([f"{at}.{x}_up_proj"]), heads) for x in "kv")

    def pack_tables() -> SharedTables:
        head = join([weights.head.removesuffix(".weight")], (quantised and quantised.head) or fmt)
        tied = weights.head == "embed_tokens.weight" and (not quantised or quantised.head)
        if tied and (fmt != "bfloat16_pairs" or floats == "bfloat16"):
            return SharedTables(tie(head, config.vocab_size), head, layout)
        blocks = layout.join_blocks(weights, ["embed_tokens"]) if as_stored else None
        if blocks is not None:
            return SharedTables(tie(blocks, config.vocab_size), head, layout)
        return SharedTables(layout.embedding(weights, "embed_tokens.weight"), head, layout)

    layers, experts = np.zeros(config.layers, LAYER), list[tuple[np.ndarray, np.ndarray]]()
    for i, described in enumerate(config.described):
        give_back_freed()  # memory that the layer before has freed
        at, layer = f"layers.{i}", layers[i]
        describe_layer(layer, config, i, layout)
        norm(layer, "norm", f"{at}.input_layernorm")
        norm(layer, "mlp_norm", f"{at}.{'input' if described.one_norm else 'post_attention'}_layernorm")
        layer["out_norm"] = vector(f"{at}.attention_out_norm.weight")
        layer["mlp_out_norm"] = vector(f"{at}.mlp_out_norm.weight")
        if described.qk_norm == "plain":
            ones = torch.ones(described.head_dim)
            layer["q_norm"], layer["k_norm"] = layout.vector(ones * described.query_scale), layout.vector(ones)
        else:
            layer["q_norm"], layer["k_norm"] = (vector(f"{at}.self_attn.{x}_norm.weight") for x in "qk")
        layer["sinks"] = vector(f"{at}.self_attn.sinks.weight")
        if described.recurrence is not None:
            layer["recurrent"] = recurrent_layer(described.recurrence, config, i, weights, layout)
            join_first(layer, [f"{at}.recurrent.{part}" for part in described.recurrence.projections])
            layer["o"] = join([f"{at}.recurrent.out_proj"])
        if described.latent is not None:
            pack_latent(layer, f"{at}.self_attn", described.heads)
        elif described.attends:
            parts = [f"{at}.self_attn.{part}_proj" for part in ("q", "k", "v", "gate")]
            parts = [name for name in parts if f"{name}.weight" in weights]
            if described.beside or not all(format_stored(weights, [name]) for name in parts):
                layer["beside" if described.beside else "qkv"] = join(parts)
            else:
                join_first(layer, parts)
            layer["beside_o" if described.beside else "o"] = join([f"{at}.self_attn.o_proj"])
        if described.scaled:
            layer["factor"] = float(weights[f"{at}.layer_scalar.weight"])
        if config.side_width:
            layer["side_gate"], layer["side_out"] = (join([f"{at}.side_{part}"]) for part in ("gate", "projection"))
            layer["side_out_norm"] = vector(f"{at}.side_norm.weight")
        if described.intermediate_size:
            layer["up"], layer["down"] = mlp(f"{at}.mlp")
        if not described.sparse:
            continue
        assert config.experts is not None
        layer["router"] = join([f"{at}.mlp.gate"], floats)
        layer["correction"] = vector(f"{at}.mlp.gate_correction.bias")
        layer["router_norm"] = layer["experts_norm"] = layer["mlp_norm"]
        if config.experts.apart:
            for part in ("experts_norm", "experts_out_norm", "shared_out_norm", "expert_scales"):
                layer[part] = vector(f"{at}.mlp.{part}.weight")
            layer["router_norm"] = layout.vector(weights[f"{at}.mlp.router_norm.weight"] * config.hidden_size**-0.5)
        layer["experts"], layer["first_expert"] = config.experts.count, len(experts)
        experts += [mlp(f"{at}.mlp.experts.{e}") for e in range(config.experts.count)]
        if config.experts.shared:
            layer["up"], layer["down"] = mlp(f"{at}.mlp.shared_expert")
        if config.experts.shared_gate:
            layer["shared_gate"], layer["shared_router"] = 1, join([f"{at}.mlp.shared_expert_gate"], floats)
    model = np.zeros(1, MODEL)
    record = model[0]
    describe_model(record, config)
    norm(record, "norm", "norm")
    record["embed_norm"] = layout.vector(torch.ones(config.hidden_size)) if config.embed_norm else 0
    tables = tables or pack_tables()
    record["head"], record["embed"] = tables.head, tables.embedding
    if "embed_positions.weight" in weights:
        record["positions"] = layout.embedding(weights, "embed_positions.weight")
    if config.side_width:
        record["side_width"], record["side_norm"] = config.side_width, vector("side_norm.weight")
        record["side_projection"] = join(["side_projection"])
        blocks = layout.join_blocks(weights, ["side_embed_tokens"]) if as_stored else None
        record["side_embed"] = (
            layout.embedding(weights, "side_embed_tokens.weight") if blocks is None
            else tie(blocks, config.side_vocab)
        )  # fmt: skip
    for layer in (layer for layer in layers if layer["experts"]):  # all experts read the same packed input
        pairs = experts[layer["first_expert"] :][: layer["experts"]]
        assert len({tuple(m[key] for m in pair for key in ("format", "outs", "columns")) for pair in pairs}) == 1
    table = np.zeros((len(experts), 2), MATRIX)
    for e, pair in enumerate(experts):
        table[e, 0], table[e, 1] = pair
    layout.arrays += [layers, table]
    record["layers"], record["count"] = layers.ctypes.data, len(layers)
    record["experts"], record["expert_count"] = table.ctypes.data, len(table)
    return model
