"""`Weights`: a checkpoint's tensors under canonical names, which are the same for every family and file layout.

    embed_tokens.weight [V, d]      embed_positions.weight [context, d] (learned positions)
    layers.{i}.input_layernorm.{weight,bias}            layers.{i}.post_attention_layernorm.{weight,bias}
    layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}   layers.{i}.self_attn.{q,k}_norm.weight
    layers.{i}.mlp.{gate,up,down}_proj.{weight,bias}
    layers.{i}.mlp.gate.{weight,bias} (router)          layers.{i}.mlp.experts.{e}.{gate,up,down}_proj.{weight,bias}
    norm.{weight,bias}              lm_head.weight (absent if tied)

and, for layers with more parts than Llama's (`LayerDescription`), in each layer

    self_attn.{q_a,q_b,kv_a,k_up,v_up}_proj             self_attn.{q_a,kv_a}_norm (latent attention)
    attention_out_norm, mlp_out_norm                    self_attn.gate_proj, self_attn.sinks
    mlp.gate_correction.bias                            mlp.shared_expert.*, mlp.shared_expert_gate
    layer_scalar                                        side_gate, side_projection, side_norm

and side_embed_tokens, side_projection, side_norm. An MTP layer has layers.0, norm and, before them, eh_proj, which
reads [enorm(embedding), hnorm(hidden state)].

All linear weights are [out, in]. Tensors are read on access. An executor reads one tensor, packs it and drops it before
it reads the next tensor, so a model is never in memory twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName, few
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.families import FAMILIES, Family
from slipstream.checkpoints.families.wrappers import OTHER_PARTS
from slipstream.checkpoints.gguf_config import in_blocks
from slipstream.checkpoints.gguf_weights import GgufTensors
from slipstream.checkpoints.head_rows import groups_of, rows_of_halves
from slipstream.checkpoints.lora import Adapter
from slipstream.checkpoints.mxfp4 import QUANTISED, Mxfp4Tensors, is_mxfp4
from slipstream.checkpoints.weight_blocks import Blocks
from slipstream.errors import CheckpointError, reading

log = logging.getLogger("slipstream")

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, total bytes) after each tensor."""

Read = Callable[[], Tensor]
ReadRows = Callable[[slice], Tensor]
Cut = Callable[[Tensor], Tensor]
"""Makes a canonical tensor from a stored tensor: a view (slice, transpose, one expert), or a vector plus 1."""

_PIECE = 2**20


def widen(name: str, tensor: Tensor) -> Tensor:
    """Return a stored tensor in a dtype with arithmetic. Weights cast to float8 without scales become bfloat16, which
    represents all their values. Raises CheckpointError for numbers that are meaningless without scales."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        return tensor
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.to(torch.bfloat16)
    why = "weights of this dtype need scales, but config.json has no quantization_config"
    fix = "use a checkpoint with weights of 16 or 32 bits, and quantize='int8' if memory is short"
    raise CheckpointError(f"{name} is stored as {tensor.dtype}", why=why, fix=fix)


def check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.numel():
        return
    low, high = tensor.detach().aminmax()  # one pass, no copy; NaN propagates
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise CheckpointError(
            f"{name} holds NaN or infinity",
            why="every token computed with these weights would be meaningless",
            fix="download the checkpoint again; if you trained or converted it, look for an overflow",
        )


class Weights(Mapping[str, Tensor]):
    """Maps canonical names to tensors. A tensor is read on access, converted to `dtype`, and checked for NaN and
    infinity.

    Every access reads the tensor again, so keep the result. If the stored dtype is `dtype`, the tensor is a view of the
    mapped file.
    """

    def __init__(
        self,
        readers: Mapping[str, tuple[str, ReadRows]],
        config: DecoderConfig,
        dtype: torch.dtype,
        progress: Progress | None = None,
        files: Checkpoint | None = None,
        packed: GgufTensors | Mxfp4Tensors | None = None,
    ):
        self.config = config
        self._files, self._packed = files, packed
        self._readers = readers  # canonical name -> (stored name, reader)
        self.shapes = config.shapes()
        self._progress, self._read, self.dtype = progress, 0, dtype
        self.nbytes = sum(torch.Size(s).numel() for s in self.shapes.values()) * dtype.itemsize

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, slice(None))

    def slices(self, name: str) -> list[slice]:
        """Return slices of a matrix's rows that are read at a time. A slice has about `_PIECE` numbers."""
        outs, columns = self.shapes[name]
        step = max(1, _PIECE // columns // 64) * 64
        return [slice(first, first + step) for first in range(0, outs, step)]

    def part(self, name: str, rows: slice, as_stored: bool = False) -> Tensor:
        """Return some rows of `weights[name]`. as_stored: keep the stored dtype."""
        stored, read = self._readers[name]
        with reading(f"{stored} cannot be read", "download the checkpoint again", CheckpointError):
            raw = widen(stored, read(rows))
        check_finite(stored, raw)
        tensor = raw.detach().to(raw.dtype if as_stored else self.dtype).contiguous()
        self._read += tensor.numel() * self.dtype.itemsize
        if self._progress:
            self._progress(min(self._read, self.nbytes), self.nbytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers  # the method of Mapping would read the tensor

    def find_dtype(self, name: str) -> torch.dtype:
        return widen(name, self._readers[name][1](slice(1))).dtype

    @property
    def quantised(self) -> str | None:
        """Format in which a quantised checkpoint stores its weights, such as "Q4_K_M"; None if it is not quantised."""
        return self._packed.quantised if self._packed else None

    def blocks(self, name: str, rows: slice = slice(None)) -> Blocks | None:
        """Return rows of a matrix as stored blocks of integers (see `weight_blocks`); None if it has no blocks."""
        return self._packed.blocks(name, rows) if self._packed else None

    def unmap(self) -> None:
        """Unmap the files, because mapped pages count as memory. The next access maps them again."""
        if self._files is not None:
            self._files.unmap()

    @property
    def head(self) -> str:
        """Name of the output head: "lm_head.weight", or "embed_tokens.weight" if tied."""
        return HEAD if HEAD in self._readers else EMBEDDING


def load_weights(
    checkpoint: CheckpointName,
    config: DecoderConfig,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    adapter: Adapter | None = None,
) -> Weights:
    """Open the safetensors of a folder or hub id, or a GGUF file, and check names and shapes against `config`. adapter:
    LoRA adapter to merge into safetensors. Raises CheckpointError for files that are missing, corrupt or pickled, and
    for tensors that are missing, unknown or of the wrong shape."""
    opened = Checkpoint.open(checkpoint)
    folder = opened.download()
    if opened.is_gguf:
        tensors = GgufTensors(opened.header, config)
        return Weights(tensors.readers, config, dtype, progress, opened, tensors)
    readers: dict[str, tuple[Read, tuple[int, ...]]] = {
        name: (tensor.read, tensor.shape) for name, tensor in opened.tensors.items()
    }
    if adapter is not None:
        plain = dict(readers)
        # The last merged tensor is cached, because it is read in several pieces.
        merged = lru_cache(maxsize=1)(lambda name: adapter.merge(name, widen(name, plain[name][0]())))
        for name, (_, shape) in plain.items():
            if adapter.changes(name, shape, config.tie_embeddings and name.endswith(_TIED)):
                readers[name] = (partial(merged, name), shape)
        adapter.check_all_used()
    if not is_mxfp4(opened.config):
        return _assemble(readers, config, dtype, progress, str(folder), opened)
    packed = Mxfp4Tensors(readers, str(folder))
    return _assemble(readers | packed.readers, config, dtype, progress, str(folder), opened, packed)


def stored_as(checkpoint: Checkpoint) -> str | None:
    """Return the format of the weights of a quantised checkpoint, such as "Q4_K_M"; None if it is not quantised."""
    if checkpoint.is_gguf:
        return checkpoint.header.file_type if in_blocks(checkpoint.header) else None
    return QUANTISED if is_mxfp4(checkpoint.config) else None


def from_module(model: nn.Module, config: DecoderConfig | None = None, dtype: torch.dtype | None = None) -> Weights:
    """Return the canonical weights of a loaded transformers model: views of its parameters in its own dtype."""
    kept = model.state_dict().keys()  # leaves out buffers that are not weights
    stored = [*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in kept)]
    readers = {name: (lambda p=p: p, tuple(p.shape)) for name, p in stored}
    dtype = dtype or next(model.parameters()).dtype
    return _assemble(readers, config or DecoderConfig.of_module(model), dtype, None, type(model).__name__)  # type: ignore[arg-type]


def _assemble(
    readers: Mapping[str, tuple[Read, tuple[int, ...]]],
    config: DecoderConfig,
    dtype: torch.dtype,
    progress: Progress | None,
    origin: str,
    files: Checkpoint | None = None,
    packed: Mxfp4Tensors | None = None,
) -> Weights:
    """Map stored tensors to canonical tensors. Raises CheckpointError for missing or unknown tensors and wrong shapes.

    As in transformers, a checkpoint whose configuration says that embedding and output head are tied may store the head
    instead of the embedding. If it stores both with different values, they are not tied."""
    expected = (apart := replace(config, tie_embeddings=False)).shapes()
    pairs = FAMILIES[config.model_type].pairs
    assembled: dict[str, tuple[str, ReadRows]] = {}
    unknown = _list_strays(readers, config)
    for stored, (read, shape) in sorted(readers.items()):
        parts = _canonical(stored, shape, config, expected)
        if parts is None:
            unknown.append(stored)
            continue
        meta = torch.empty(shape, device="meta")  # cutting a meta tensor gives the shape without reading
        for name, cut in parts:
            if name not in expected or name in assembled:
                unknown.append(stored)
                continue
            try:
                given = tuple(cut(meta).shape)
            except (IndexError, RuntimeError, ValueError):
                given = shape
            if given != expected[name]:
                raise CheckpointError(
                    f"{stored} in {origin} makes {name} of the shape {given}, but config.json says {expected[name]}",
                    why="weights and configuration belong to different models",
                    fix="take both from the same checkpoint",
                )
            order = rows_of_halves(config, name) if pairs else None
            take = partial(_rows, read, cut, order)
            if packed is not None and stored in packed.readers:
                take = partial(packed.rows, stored)
            assembled[name] = (f"{stored} in {origin}", take)
    if config.tie_embeddings and HEAD in assembled:
        head = assembled.pop(HEAD)
        _, embedding = assembled.setdefault(EMBEDDING, head)
        step = max(1, _PIECE // expected[HEAD][1])
        for rows in (slice(at, at + step) for at in range(0, config.vocab_size, step)):
            if not torch.equal(*(widen(HEAD, read(rows)).to(dtype) for read in (embedding, head[1]))):
                config, assembled[HEAD] = apart, head
                break
    expected = config.shapes()
    missing = [name for name in expected if name not in assembled]
    if missing:
        raise CheckpointError(
            f"{origin} lacks {len(missing)} of {len(expected)} tensors: {few(missing)}",
            why="the model that config.json describes is incomplete"
            + (f"; unknown tensors: {few(unknown)}" if unknown else ""),
            fix="download the checkpoint again, or correct config.json",
        )
    if unknown:
        raise CheckpointError(
            f"{origin} holds {len(unknown)} tensors that config.json does not describe: {few(unknown)}",
            why="without these tensors the output would differ from that of the trained model",
            fix="correct config.json, which may switch off a bias or norm, or lack quantization_config",
        )
    if config.within and (others := [name for name in readers if OTHER_PARTS.match(_PREFIX.sub("", name, count=1))]):
        log.warning(f"{origin} also holds parts for pictures or sounds, which are left out: {few(sorted(others))}")
    return Weights(assembled, config, dtype, progress, files, packed)


def _rows(read: Read, cut: Cut, order: np.ndarray | None, rows: slice) -> Tensor:
    """Return some rows of a canonical tensor. order: stored position of each row; None: the stored order."""
    return cut(read())[rows if order is None else torch.from_numpy(order[rows])]


HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_TIED = (EMBEDDING, "wte.weight", HEAD)
_BUFFERS = re.compile(r".*rotary_emb\..*inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
_SIDES = {
    "embed_tokens_per_layer.weight": "side_embed_tokens.weight", "per_layer_projection_norm.weight": "side_norm.weight",
    "per_layer_model_projection.weight": "side_projection.weight",
}  # fmt: skip
_PREFIX = re.compile(r"((model|language_model|transformer)\.)*")
_MTP = re.compile(r"(?:layers\.(\d+)|mtp(?:\.layers\.(\d+))?)\.(.+)")
_MTP_PARTS = {
    "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "norm", "norm": "norm",
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
}  # fmt: skip
MTP_COPIES = ("layers.0.embed_tokens.weight", "layers.0.shared_head.head.weight")
"""Tensors of an MTP layer that are copies of the decoder's embedding and output head. They are not read."""
_KEYS_AND_VALUES = re.compile(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.(weight|bias)")
_LATENT = re.compile(r"(layers\.(\d+)\.self_attn)\.kv_b_proj\.weight")
_OF_LAYER = re.compile(r"(layers\.\d+)\.((?:self_attn|mlp|recurrent)\..+)")
_EXPERTS = re.compile(r"(layers\.\d+\.mlp\.experts)\.(gate_up_proj|up_proj|down_proj)(_bias)?")


def _whole(t: Tensor) -> Tensor:
    return t


def _turned(cut: Cut) -> Cut:
    """Return `cut` for a matrix that is stored [in, out]."""
    return lambda t: cut(t.t())


def _plus_one(t: Tensor) -> Tensor:
    return t.float() + 1 if t.dtype.itemsize < 4 else t + 1


def _canonical(
    stored: str, shape: tuple[int, ...], config: DecoderConfig, expected: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, Cut]] | None:
    """Return the canonical tensors in a stored tensor: [] if it is not a weight, None for an unknown name."""
    if _BUFFERS.fullmatch(stored):
        return []
    if not shape:
        return None  # no weight is a single number
    family = FAMILIES[config.model_type]
    name = _rename(config.model_type, _PREFIX.sub("", stored, count=1))
    name = _SIDES.get(name, name)
    for part, other in family.otherwise.items():
        name = name if name in expected else name.replace(f".{part}.", f".{other}.")
    if config.within and OTHER_PARTS.match(name):
        return []
    mtp = find_mtp_name(name, config) if family.further else None
    if (mtp is None) == bool(config.after) or mtp in MTP_COPIES:
        return []  # a tensor of an MTP layer while reading a decoder, or the reverse
    name = mtp or name
    if fused := _EXPERTS.fullmatch(name):
        prefix, part, bias = fused.groups()
        return _list_fused_experts(prefix, part, "bias" if bias else "weight", shape, family, expected)
    found = _KEYS_AND_VALUES.fullmatch(name)
    if found and int(found[1]) < config.layers and config.described[int(found[1])].shared is not None:
        return []  # unused: the layer reads another layer's keys and values
    found = _LATENT.fullmatch(name)
    layer = config.described[int(found[2])] if found and int(found[2]) < config.layers else None
    if found and layer and layer.latent is not None:
        return _split_latent(found[1], layer.heads, layer.latent.plain)
    stem, _, kind = name.rpartition(".")
    found = _OF_LAYER.fullmatch(stem)
    at, part = found.groups() if found else ("", "")
    turned = family.columns and bool(at) and len(shape) == 2
    outs = shape[-1 if turned else 0]
    groups, spans, first = groups_of(config, part), [], 0
    for each in family.fused.get(part, ()):
        whole = _of_mlp(f"{at}.{each}.{kind}", config)
        if whole not in expected:
            return None
        rows = first // groups, (first + expected[whole][0]) // groups
        spans.append((whole, _turned(_span(*rows, groups)) if turned else _span(*rows, groups)))
        first += expected[whole][0]
    if spans:
        return spans if first == outs else [(spans[0][0], _whole)]  # a wrong shape is refused later
    name = _of_mlp(name, config)
    if turned:
        return [(name, _turned(_whole))]
    if name.endswith(".gate_correction.bias"):
        return [(name, torch.flatten)]  # ERNIE stores it as a matrix of one row
    shifted = family.plus_one and name.endswith("norm.weight") and ".recurrent." not in name
    return [(name, _plus_one if shifted and (family.plus_one == "all" or name != "norm.weight") else _whole)]


def _split_latent(at: str, heads: int, plain: int) -> list[tuple[str, Cut]]:
    """Cut kv_b_proj into k_up and v_up. The keys [plain, rank] of each head come before its values [value, rank]. The
    keys are transposed, because our kernels multiply queries by them."""

    def of_keys(t: Tensor) -> Tensor:
        return t.unflatten(0, (heads, -1))[:, :plain].transpose(1, 2).flatten(0, 1)

    def of_values(t: Tensor) -> Tensor:
        return t.unflatten(0, (heads, -1))[:, plain:].flatten(0, 1)

    return [(f"{at}.k_up_proj.weight", of_keys), (f"{at}.v_up_proj.weight", of_values)]


def find_mtp_name(name: str, config: DecoderConfig) -> str | None:
    """Return the canonical name of an MTP layer's tensor; None for other tensors. The first MTP layer has the layer
    number 0, further MTP layers have 1, 2, ... config: of the decoder or of the MTP layer."""
    after = config.after or config.layers
    match = _MTP.fullmatch(_rename(config.model_type, _PREFIX.sub("", name, count=1)))
    if match is None or (match[1] and int(match[1]) < after):
        return None
    number = int(match[1]) - after if match[1] else int(match[2] or 0)
    part, _, kind = match[3].rpartition(".")
    own = _MTP_PARTS.get(part) if number == 0 and (match[1] or not match[2]) else None
    return f"{own}.{kind}" if own else f"layers.{number}.{match[3]}"


def _list_strays(names: Iterable[str], config: DecoderConfig) -> list[str]:
    """Return the tensors of layers that follow the decoder's last layer but are not MTP layers."""
    if config.after or not FAMILIES[config.model_type].further:
        return []
    found = {name: _MTP.fullmatch(_rename(config.model_type, _PREFIX.sub("", name, count=1))) for name in names}
    layers = {name: match for name, match in found.items() if match and match[1] and int(match[1]) >= config.layers}
    mtp = {match[1] for match in layers.values() if match[3].rpartition(".")[0] in _MTP_PARTS}
    return sorted(name for name, match in layers.items() if match[1] not in mtp)


def _of_mlp(name: str, config: DecoderConfig) -> str:
    """Rename the shared expert of a layer without other experts to the layer's MLP."""
    return name if config.experts else name.replace(".mlp.shared_expert.", ".mlp.")


def _span(first: int, last: int, groups: int = 1) -> Cut:
    """Return a cut of rows first..last-1 in each group of rows."""
    if groups == 1:
        return lambda t: t[first:last]
    return lambda t: t.unflatten(0, (groups, -1))[:, first:last].flatten(0, 1)


@cache
def _names_of(model_type: str) -> re.Pattern[str]:
    """Return a pattern for the parts of a family's tensor names that are renamed."""
    return re.compile(rf"(?:(?<=\.)|^)({'|'.join(map(re.escape, FAMILIES[model_type].names))})(?=\.|$)")


def _rename(model_type: str, name: str) -> str:
    names = FAMILIES[model_type].names
    return _names_of(model_type).sub(lambda found: names[found[0]], name) if names else name


def _list_fused_experts(
    prefix: str, part: str, kind: str, shape: tuple[int, ...], family: Family, expected: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, Cut]]:
    """Cut a tensor that contains all experts: weights [E, 2 I, d] and [E, d, I], gate rows before up rows. Files of
    Qwen3-VL have [E, d, 2 I] and [E, I, d], which are recognised by their shape, as in transformers."""
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    inner = shape[-1] if kind == "weight" else 0
    other = bool(inner) and inner != expected.get(f"{prefix}.0.{names[0]}.weight", (0, inner))[1]
    other = other or (family.transposed and kind == "weight")

    def cut(e: int, i: int) -> Cut:
        if family.in_turn:
            return lambda t: (t[e].t() if other else t[e])[i :: len(names)]
        return lambda t: (t[e].t() if other else t[e]).chunk(len(names))[i]

    return [(f"{prefix}.{e}.{name}.{kind}", cut(e, i)) for e in range(shape[0]) for i, name in enumerate(names)]
