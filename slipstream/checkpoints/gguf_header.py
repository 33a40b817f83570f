"""`GgufHeader`: metadata and tensors of a GGUF file without its weights. `GgufShape`: sizes of its model.

    "GGUF", version, number of tensors, number of keys      little-endian
        key, type, value                                        for each key; 8 bytes before a string are its length
        name, shape, type, offset                               for each tensor
        weights                                                 from the next multiple of `general.alignment`

The format is described in docs/gguf.md of github.com/ggml-org/ggml. Files are not trusted: every length is checked
against the size of the file.
"""

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.checkpoints.gguf_keys import END_TEXTS, ENDS, MAGIC, TEMPLATE, WHOLE, wrong_value
from slipstream.checkpoints.module_shape import UNBOUNDED, Experts, ModelShape
from slipstream.checkpoints.tensor_file import MappedFile
from slipstream.checkpoints.weight_blocks import TYPES
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import CheckpointError, UnsupportedModelError

ALIGNMENT = 32
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`. Control tokens are special tokens, user-defined tokens are other added tokens,
unused tokens are rows of the embedding without a token, and a byte token stands for one byte."""
_EMBEDDING = "token_embd.weight"

_ROLES = {"unk": "unknown", "pad": "padding", "sep": "seperator"}
"""Special tokens whose names in GGUF keys differ from the names in transformers."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")

FILE_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
}  # fmt: skip
"""For each `general.file_type`, the name of the mixture of tensor types, such as Q4_K_M."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file. shape: [out, in], as in safetensors. type: for example "Q4_K". nbytes: size in bytes,
    None for an unknown type. file, begin: the file with the tensor's bytes, and their offset."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int | None
    begin: int
    file: MappedFile


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """The header of a GGUF file. metadata: values by key; arrays are lists. weights_at: offset of the weights. read:
    keys of the architecture that were read so far."""

    file: MappedFile
    metadata: JsonMapping
    tensors: tuple[GgufTensor, ...]
    weights_at: int
    read: set[str] = field(default_factory=set)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp, for example "llama" or "qwen2"."""
        return str(self.metadata["general.architecture"])

    def setting(self, key: str, default: object = None) -> Any:
        """Return the value of a key of the architecture, for example "context_length"."""
        self.read.add(f"{self.architecture}.{key}")
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def size(self, key: str) -> int:
        """Return a setting that is a size; 0 if it is missing. For a list by layer, return the maximum."""
        value = self.setting(key)
        return max(value, default=0) if isinstance(value, list) else value or 0

    def by_layer(self, key: str) -> list[int]:
        """Return a setting for each layer; a single number is repeated."""
        value = self.setting(key, 0)
        return value if isinstance(value, list) else [value] * self.size("block_count")

    def layer_types(self, pattern: int) -> list[str]:
        """Return `layer_types` of config.json, which says for each layer whether it has a window. If the file has no
        such key, all layers except every `pattern`-th have a window."""
        given, layers = self.setting("attention.sliding_window_pattern", pattern), self.size("block_count")
        slides = given if isinstance(given, list) else [bool(given and (i + 1) % given) for i in range(layers)]
        return ["sliding_attention" if each else "full_attention" for each in slides]

    @property
    def rope(self) -> JsonObject:
        """The rotary parameters as in config.json. A scaling factor without a scaling type means linear scaling."""
        kind = self.setting("rope.scaling.type", "linear")
        factor = self.setting("rope.scaling.factor", self.setting("rope.scale_linear")) or 1.0
        scaled = kind != "none" and (kind, factor) != ("linear", 1.0)
        rope = {
            "rope_type": kind if scaled else "default", "factor": factor if scaled else None,
            "rope_theta": self.setting("rope.freq_base", 1e4),
            "original_max_position_embeddings": self.size("rope.scaling.original_context_length") or None,
            "beta_fast": self.setting("rope.scaling.yarn_beta_fast"),
            "beta_slow": self.setting("rope.scaling.yarn_beta_slow"),
            "cos_sin_factor": self.setting("rope.scaling.attn_factor"),
        }  # fmt: skip
        return {name: value for name, value in rope.items() if value is not None}

    @property
    def file_type(self) -> str:
        """The name of the mixture of tensor types, such as "Q4_K_M"; the most frequent type if the file has no name."""
        named = FILE_TYPES.get(self.metadata.get("general.file_type", -1))
        return named or max(self.stored, key=lambda name: self.stored[name], default="unknown")

    @cached_property
    def stored(self) -> dict[str, int]:
        """Bytes of the weights, by type."""
        total: dict[str, int] = {}
        for tensor in self.tensors:
            total[tensor.type] = total.get(tensor.type, 0) + (tensor.nbytes or 0)
        return total

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the file contains a tokenizer."""
        return bool(self.metadata.get("tokenizer.ggml.tokens"))

    def token_id(self, role: str) -> int | None:
        """Return the id of the special token with this role, for example "eos"; None if the file has no such token."""
        value = self.metadata.get(f"tokenizer.ggml.{_ROLES.get(role, role)}_token_id")
        return None if value is None or 0 < len(self.tokens) <= value else value

    @cached_property
    def token_texts(self) -> dict[int, str]:
        """The text of each token by id, without ids that have no token."""
        return {i: text for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=False)) if kind != UNUSED}

    @cached_property
    def types(self) -> list[int]:
        """Types of the tokens (`tokenizer.ggml.token_type`). As in llama.cpp, end-of-text tokens are CONTROL."""
        given = self.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(self.tokens)
        special = frozenset[str]() if WHOLE in self.metadata else END_TEXTS
        return [CONTROL if text in special else kind for text, kind in zip(self.tokens, given, strict=False)]

    @property
    def tokens(self) -> list[str]:
        return self.metadata.get("tokenizer.ggml.tokens") or []

    def tokens_of(self, *kinds: int) -> frozenset[int]:
        """Return the ids of tokens of these types, as in `tokenizer.ggml.token_type`."""
        return frozenset(i for i, kind in enumerate(self.types) if kind in kinds)

    @property
    def templates(self) -> str | dict[str, str] | None:
        """The chat template; if there are several, a dictionary of templates by name, as in transformers."""
        texts = {key: text for key, text in self.metadata.items() if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")}
        if texts.keys() <= {TEMPLATE}:
            return texts.get(TEMPLATE)
        return {key.removeprefix(TEMPLATE)[1:] or "default": text for key, text in texts.items()}


def read_header(checkpoint: str | Path) -> GgufHeader:
    """Read the header of a GGUF file. If the model is in several files, the header has the tensors of all files. Raises
    CheckpointError for a file that is missing, truncated or no GGUF file, and for parts that do not belong together."""
    path = Path(checkpoint).expanduser()
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) < 2:
        header = _read(path)
        if header.metadata.get("split.count", 1) > 1:
            what = f"{path.name} is one of {header.metadata['split.count']} parts, but its name does not say which"
            raise CheckpointError(what, fix="rename the parts as llama-gguf-split does: NAME-00001-of-00003.gguf")
        return header
    count = int(named[3])
    files = [path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}{named[4]}") for i in range(1, count + 1)]
    headers = [_read(file, i) for i, file in enumerate(files)]
    first = headers[0]
    tensors = [tensor for header in headers for tensor in header.tensors]
    for i, header in enumerate(headers):
        for key, wanted in (("split.count", count), ("split.no", i), ("split.tensors.count", len(tensors))):
            if (value := header.metadata.get(key, wanted)) != wanted:
                raise _make_error(header.path, f"its {key} is {value}, but must be {wanted} here", *_NOT_TOGETHER)
    twice = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
    if twice:
        raise _make_error(first.path, f"more than one part contains the tensor {twice[0]!r}", *_NOT_TOGETHER)
    return replace(first, tensors=tuple(tensors), read=set())


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
"""Pattern of the name of one part, if a model is in several files."""

_NOT_TOGETHER = ("the parts come from different models, or from different conversions", "cannot be read")


def _read(path: Path, part: int = 0) -> GgufHeader:
    """Read the header of one file. part: its index among a model's files, of which only the first has metadata."""
    try:
        file = MappedFile(path, mmap.ACCESS_READ)
    except OSError as fault:
        missing = f"there is no file {str(path)!r}"
        raise CheckpointError(missing, fix="check the name, and that no part is missing") from fault
    size = file.size
    if size < 24:
        raise _make_error(path, f"it has {size} bytes")
    try:
        header = _header(file, _Reader(file.mapping(0)), part)
    except (ValueError, KeyError) as fault:
        raise _make_error(path, f"its header cannot be read ({fault})") from fault
    file.unmap()
    ends = [tensor.begin + tensor.nbytes for tensor in header.tensors if tensor.nbytes is not None]
    if (wanted := max(ends, default=header.weights_at)) > size:
        raise _make_error(path, f"its tensors end at byte {wanted}, but the file ends at byte {size}")
    return header


class _Reader:
    """Reads one value after another. Raises ValueError at the end of the file, and for a value of an unknown type."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at, self.size = data, 0, len(data)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > self.size:
            raise ValueError(f"{count} bytes were expected at offset {self.at}, but the file ends at {self.size}")
        self.at, at = end, self.at
        return self.data[at:end]

    def whole(self, layout: str = "<Q") -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def text(self) -> str:
        return self.take(self.whole()).decode("utf-8", errors="backslashreplace")

    def texts(self, count: int) -> list[str]:
        """Read `count` texts without calls for their parts: vocabularies have 100,000s of them."""
        data, at, found = self.data, self.at, []
        for _ in range(count):
            if at + 8 > self.size or (end := at + 8 + _LENGTH.unpack_from(data, at)[0]) > self.size:
                break
            found.append(data[at + 8 : end].decode("utf-8", errors="backslashreplace"))
            at = end
        self.at = at
        return found if len(found) == count else [self.text()]  # raises the error

    def value(self, kind: int, deep: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.whole("<I"), self.whole()
            if inner in _NUMBERS:
                return self.numbers(inner, count)
            if count > self.size or deep > 2:
                raise ValueError(f"an array of {count} values")
            return self.texts(count) if inner == _STRING else [self.value(inner, deep + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind} at {self.at}")
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        data = self.take(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", data))


def _header(file: MappedFile, reader: _Reader, part: int) -> GgufHeader:
    path = file.path
    if reader.take(4) != MAGIC:
        raise _make_error(path, "it does not begin with GGUF")
    version = reader.whole("<I")
    if version not in (2, 3):
        what = "is big-endian" if version in (2 << 24, 3 << 24) else f"has version {version} of GGUF"
        raise UnsupportedModelError(
            f"{path.name} {what}, but Slipstream reads only versions 2 and 3, little-endian",
            why="the numbers in the file would be read wrongly",
            fix="convert the model again",
        )
    tensors, keys = reader.whole(), reader.whole()
    if tensors > reader.size or keys > reader.size:
        raise ValueError(f"{tensors} tensors and {keys} keys")
    metadata = {}
    for _ in range(keys):
        key = reader.text()
        metadata[key] = reader.value(reader.whole("<I"))
    if part == 0 and "general.architecture" not in metadata:
        raise _make_error(path, "it does not name its architecture")
    if (wrong := wrong_value(metadata)) is not None:
        raise _make_error(path, f"its {wrong} is {metadata[wrong]!r:.40}", *_IMPOSSIBLE)
    tokens, types = (len(metadata.get(f"tokenizer.ggml.{name}", ())) for name in ("tokens", "token_type"))
    if 0 < types < tokens:
        raise _make_error(path, f"it has {tokens} tokens, but types of {types} tokens", *_IMPOSSIBLE)
    listed = tuple(_tensor(reader, file) for _ in range(tensors))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _make_error(path, f"its alignment is {alignment!r}")
    begin = -(-reader.at // alignment) * alignment
    placed = tuple(replace(tensor, begin=begin + tensor.begin) for tensor in listed)
    return GgufHeader(file, metadata, placed, begin)


def _tensor(reader: _Reader, file: MappedFile) -> GgufTensor:
    name, dims = reader.text(), reader.whole("<I")
    if dims > 8:
        raise ValueError(f"tensor {name!r} of {dims} dimensions")
    shape = tuple(reader.whole() for _ in range(dims))[::-1]
    kind, offset = reader.whole("<I"), reader.whole()
    if kind not in TYPES:
        return GgufTensor(name, shape, f"type {kind}", None, offset, file)
    stored = TYPES[kind]
    return GgufTensor(name, shape, stored.name, math.prod(shape) // stored.count * stored.nbytes, offset, file)


_IMPOSSIBLE = ("no valid GGUF file has this value", "cannot be run")


def _make_error(
    path: Path,
    what: str,
    why: str = "the file is truncated, corrupt or of another format",
    is_: str = "is not a complete GGUF file",
) -> CheckpointError:
    return CheckpointError(f"{path.name} {is_}: {what}", why=why, fix="download or convert it again")


@dataclass(frozen=True, kw_only=True)
class GgufShape(ModelShape):
    """Sizes of the model in a GGUF file. header: the file's header."""

    header: GgufHeader = field(repr=False, compare=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by the names of `ModelShape`. Tensors without such a name have the name of the GGUF file."""
        names = {_EMBEDDING: "embed_tokens.weight", "position_embd.weight": "embed_positions.weight"}
        return {names.get(tensor.name, tensor.name): tensor.shape for tensor in self.header.tensors}


def gguf_shape(header: GgufHeader) -> GgufShape:
    """Return the sizes of the model in a GGUF file. Raises CheckpointError if the header does not contain them."""
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    hidden, layers = header.size("embedding_length"), header.size("block_count")
    if len(tensors.get(_EMBEDDING, ())) != 2 or not hidden or not 0 < layers <= len(tensors):
        raise CheckpointError(
            f"{header.path.name} does not say how large its model is",
            why="the file has no language model, or its metadata are incomplete",
            fix="convert the model again",
        )
    heads = header.size("attention.head_count")
    kv_heads = header.size("attention.head_count_kv") or heads
    head_dim = header.size("attention.key_length") or (hidden // heads if heads else 0)
    experts, picked = header.size("expert_count"), header.size("expert_used_count") or 1
    learned = "position_embd.weight" in tensors
    return GgufShape(
        model_type=header.architecture, vocab_size=tensors[_EMBEDDING][0], hidden_size=hidden, layers=layers,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, windows=(None,) * layers,
        context=header.size("context_length") or UNBOUNDED,
        position="learned" if learned else "rope", rope_parameters={} if learned else header.rope,
        experts=Experts(experts, picked, 0, True, (True,) * layers) if experts > 1 else None,
        tie_embeddings="output.weight" not in tensors, eos_ids=_ends(header), header=header,
    )  # fmt: skip


def _ends(header: GgufHeader) -> tuple[int, ...]:
    if (written := header.metadata.get(ENDS)) is not None:
        return tuple(int(word) for word in written.split() if word.isdecimal() and len(word) < 11)
    texts, roles = header.tokens, ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    named = [i for role in roles if (i := header.token_id(role)) is not None]
    return tuple(dict.fromkeys([*named, *(i for i, text in enumerate(texts) if text in END_TEXTS)]))
