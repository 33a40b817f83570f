"""`MappedFile`: a file that is opened once; `TensorFile`: a safetensors file. Importing this module imports no torch.

    8 bytes: length of the header, little-endian     JSON: name -> dtype, shape, data_offsets     values of the tensors

The safetensors library opens a file several times. Here the file is opened once for its header and all mappings. The
file is not trusted: offsets are compared with its size before anything is mapped.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.strict import JsonObject, parse_json
from slipstream.errors import CheckpointError, reading

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip
"""Name of a dtype in the header -> its name in torch."""
_LONGEST_HEADER = 100_000_000
_MAPPED = 2**23
"""After this number of bytes has been read, the file is mapped again."""


class MappedFile:
    """A file that stays open while this object exists. Raises OSError.

    Pages that were read count as memory until their mapping is closed. So the file is mapped again after every
    `_MAPPED` bytes. A mapping is closed when no array is a view of it any more.

    access  access mode of `mmap`. With ACCESS_COPY, views can be written without changing the file.
    """

    def __init__(self, path: Path, access: int):
        self.path, self._access = path, access
        self._mapping: mmap.mmap | None = None
        self._used = 0
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._seen = self._state()

    def _state(self) -> tuple[int, int]:
        seen = os.fstat(self._file.fileno())
        return seen.st_size, seen.st_mtime_ns

    @property
    def size(self) -> int:
        return self._seen[0]

    def content(self, count: int, at: int) -> bytes:
        """Read `count` bytes at `at`, without a mapping."""
        self._file.seek(at)
        return self._file.read(count)

    def mapping(self, nbytes: int) -> mmap.mmap:
        """Return the mapped file, for reading `nbytes` bytes. Raises CheckpointError if the file has changed."""
        mapping = None if self._used > _MAPPED else self._mapping
        if mapping is None:
            if self._state() != self._seen:
                why, fix = "tensors that were read earlier may not match the new file", "load the model again"
                raise CheckpointError(f"{self.path} has changed since it was opened", why=why, fix=fix)
            mapping = mmap.mmap(self._file.fileno(), 0, access=self._access)
            self._mapping, self._used = mapping, 0
        self._used += nbytes
        return mapping

    def unmap(self) -> None:
        """Drop the mapping. The next access maps the file again."""
        self._mapping, self._used = None, 0


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. dtype: name of the dtype in the header, such as "F16". begin, end: offsets of its bytes."""

    file: TensorFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def read(self) -> Tensor:
        """Return the tensor as a view of the mapped file. Raises CheckpointError for a dtype that torch lacks."""
        import torch

        if self.dtype not in _DTYPES:
            what, why = f"{self.name} in {self.file.path} is stored as {self.dtype}", "PyTorch does not have this dtype"
            raise CheckpointError(what, why=why, fix="use a checkpoint with weights of 16 or 32 bits")
        dtype = getattr(torch, _DTYPES[self.dtype])
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        mapped = self.file.mapping(self.nbytes)
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=self.nbytes, offset=self.begin)
        return raw.view(dtype).reshape(self.shape)


class TensorFile(MappedFile):
    """A safetensors file. tensors: the tensors in the header, by name. Raises CheckpointError for a file that is
    missing, truncated or damaged."""

    def __init__(self, path: Path):
        with reading(str(make_damage_error(path).what), "download or export this file again", CheckpointError):
            super().__init__(path, mmap.ACCESS_COPY)  # torch has no read-only tensors
            self.tensors: Mapping[str, StoredTensor] = self._header()

    def _header(self) -> dict[str, StoredTensor]:
        size = self.size
        length = int.from_bytes(self.content(8, 0), "little")
        if not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise make_damage_error(self.path, f"the length of its header would be {length} bytes")
        header: JsonObject = parse_json(self.content(length, 8))
        listed = {name: each for name, each in header.items() if name != "__metadata__"}
        tensors = {}
        for name, each in listed.items():
            (begin, end), shape, dtype = each["data_offsets"], tuple(each["shape"]), each["dtype"]
            if not all(type(count) is int and count >= 0 for count in (begin, end, *shape)):
                raise make_damage_error(self.path, f"the shape or the offsets of {name} are not valid")
            bits = 8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])
            if 8 * (end - begin) != bits * math.prod(shape):
                raise make_damage_error(
                    self.path, f"{name} has the shape {list(shape)} in {dtype}, but {end - begin} bytes"
                )
            tensors[name] = StoredTensor(self, name, dtype, shape, 8 + length + begin, 8 + length + end)
        at = 8 + length
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
            if tensor.begin != at or tensor.end < at:
                raise make_damage_error(self.path, f"{tensor.name} does not begin where the tensor before it ends")
            at = tensor.end
        if at != size:
            raise make_damage_error(self.path, f"its tensors end at byte {at}, but the file ends at {size}")
        return tensors


def make_damage_error(path: Path, what: str = "") -> CheckpointError:
    """Return the error for a file that is not a complete safetensors file."""
    said = f"{path} is truncated, corrupt, or not a safetensors file"
    return CheckpointError(said + (f": {what}" if what else ""), fix="download or export this file again")
