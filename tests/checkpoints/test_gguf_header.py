"""Headers of GGUF files: what they say, and files that are none."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_header import gguf_shape, read_header
from slipstream.checkpoints.weights import load_weights
from slipstream.errors import CheckpointError, SlipstreamError, UnsupportedModelError
from slipstream.targets.describe import describe
from slipstream.tokens.text import load_tokenizer, tokenizer_of
from slipstream.tokens.token_map import has_chat_template
from tests.checkpoints.gguf_files import family_config, gguf_bytes, gguf_model, model_parts, tiny_model

TOKENS = ["<end>", "a", "b", "<0x0A>", "c", "d", "[PAD6]", "[PAD7]"]
WITH_TOKENS = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 1, 1, 6, 1, 4, 5, 5], "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages }}",
}  # fmt: skip


def write(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def test_metadata_and_tensors_are_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {"a": rng.normal(size=(3, 5)), "b": rng.normal(size=7)}
    metadata = {"general.architecture": "x", "x.f": 0.5, "x.list": [1, -2], "x.texts": ["", "é"], "x.on": True}
    header = read_header(write(tmp_path, gguf_bytes(metadata, tensors)))
    assert header.metadata == metadata
    assert (header.setting("f"), header.setting("missing", 4)) == (0.5, 4)
    wanted = [("a", (3, 5), "F32", 60), ("b", (7,), "F32", 28)]
    assert [(t.name, t.shape, t.type, t.nbytes) for t in header.tensors] == wanted
    data = header.path.read_bytes()[header.weights_at :]
    assert np.array_equal(np.frombuffer(data[:60], "<f4").reshape(3, 5), tensors["a"].astype(np.float32))
    assert header.file_type == "F32"


def test_facts_are_those_of_the_model(tmp_path: Path) -> None:
    seen = describe(write(tmp_path, tiny_model(**WITH_TOKENS)))
    assert (seen.config.layers, seen.config.heads, seen.config.kv_heads, seen.config.head_dim) == (1, 2, 1, 16)
    assert (seen.config.vocab_size, seen.config.context, seen.config.eos_ids) == (8, 64, (0,))
    assert seen.config.tie_embeddings
    assert seen.config.parameters == 8 * 32 + 3 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 32
    assert seen.stored == {"F32": 4 * seen.config.parameters}
    assert has_chat_template(seen.checkpoint)
    assert seen.token_map.tokens == dict(enumerate(TOKENS[:6]))  # the others are padding
    assert (seen.token_map.special, seen.token_map.roles["eos"], seen.token_map.roles["bos"]) == ({0}, 0, None)


def test_a_file_is_recognised_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    assert Checkpoint.open(write(tmp_path, tiny_model())).is_gguf
    assert Checkpoint.open(write(tmp_path, tiny_model(), "blob")).is_gguf
    assert Checkpoint.open("missing.GGUF").is_gguf
    with pytest.raises(CheckpointError, match="is not a folder but a file"):
        Checkpoint.open(write(tmp_path, b"{}", "config.json"))
    assert not Checkpoint.open(tmp_path).is_gguf
    assert not Checkpoint.open("org/model").is_gguf


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = tiny_model(**WITH_TOKENS)
    read_header(write(tmp_path, whole))
    for i, length in enumerate([*range(0, 400, 7), *range(400, len(whole) - 1, 997), len(whole) - 32]):
        with pytest.raises(CheckpointError, match=r"cut\d+\.gguf is not a complete GGUF file"):
            read_header(write(tmp_path, whole[:length], f"cut{i}.gguf"))


def test_every_damaged_byte_of_the_header_is_read_or_refused(tmp_path: Path) -> None:
    """Never another exception, and never memory or time without bound."""
    whole = bytearray(tiny_model(**WITH_TOKENS))
    for at in range(0, 1200, 3):
        damaged = bytes(whole[:at]) + bytes([whole[at] ^ 0xFF]) + bytes(whole[at + 1 :])
        with contextlib.suppress(SlipstreamError):
            gguf_shape(read_header(write(tmp_path, damaged, f"{at}.gguf")))


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"GGUF", b"x" * 100, struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 1 << 60)):
        with pytest.raises(CheckpointError, match="not a complete GGUF file"):
            read_header(write(tmp_path, data, f"{len(data)}.gguf"))
    with pytest.raises(CheckpointError, match="there is no file"):
        read_header(tmp_path / "missing.gguf")
    with pytest.raises(UnsupportedModelError, match="version 1"):
        read_header(write(tmp_path, gguf_bytes({"general.architecture": "x"}, {}, version=1)))
    with pytest.raises(UnsupportedModelError, match=r"big\.gguf is big-endian, .*\. The numbers"):
        read_header(write(tmp_path, gguf_bytes({"general.architecture": "x"}, {}, version=3 << 24), "big.gguf"))
    with pytest.raises(CheckpointError, match="architecture"):
        read_header(write(tmp_path, gguf_bytes({}, {}), "nameless.gguf"))
    wrong = {"general.file_type": [1], "tokenizer.ggml.pre": ["x"], "tokenizer.ggml.token_type": True}
    for key, value in (wrong | {"general.architecture": 1, "tokenizer.ggml.tokens": [1]}).items():
        with pytest.raises(CheckpointError, match=f"its {key} is "):
            read_header(write(tmp_path, tiny_model(**{key: value}), f"{key}.gguf"))
    with pytest.raises(CheckpointError, match=r"one of 3 parts, but its name does not say which"):
        read_header(write(tmp_path, tiny_model(**{"split.count": 3})))


def in_parts(folder: Path, second: int = 7, **changes: Any) -> list[Path]:
    """A model in two files. second: number of the first tensor in the second one. changes: its metadata."""
    metadata, tensors, kinds, _ = model_parts(family_config("llama"), ("Q8_0", "F32"))
    names = list(tensors)
    chosen_names, files = (names[:7], names[second:]), list[Path]()
    for i, chosen in enumerate(chosen_names):
        count = sum(map(len, chosen_names))
        split = {"split.no": i, "split.count": 2, "split.tensors.count": count} | (changes if i else {})
        part = {name: tensors[name] for name in chosen}
        files.append(folder / f"model-{i + 1:05d}-of-00002.gguf")
        files[i].write_bytes(gguf_bytes((metadata if i == 0 else {}) | split, part, kinds=kinds))
    return files


def test_a_model_in_several_files_is_read_as_one(tmp_path: Path) -> None:
    files = in_parts(tmp_path)
    whole, _ = gguf_model(tmp_path, family_config("llama"), ("Q8_0", "F32"))
    wanted = load_weights(whole, DecoderConfig.load(whole))
    for file in files:
        weights = load_weights(file, DecoderConfig.load(file))
        assert set(weights) == set(wanted)
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_parts_that_are_missing_or_doubled_are_named(tmp_path: Path) -> None:
    first, second = in_parts(tmp_path, **{"split.no": 5})
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf.* split\.no is 5, but must be 1"):
        read_header(first)
    second.write_bytes(gguf_bytes({"split.count": 2}, {"output_norm.weight": np.zeros(256)}))
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is"):
        read_header(first)
    first, second = in_parts(tmp_path, second=6)
    with pytest.raises(CheckpointError, match=r"more than one part contains the tensor 'blk\."):
        read_header(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"there is no file .*00002-of-00002"):
        read_header(first)


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    file = write(tmp_path, tiny_model(**{"llama.context_length": 64}))
    assert gguf_shape(read_header(file)).context == 64
    write(tmp_path, tiny_model(**{"llama.context_length": 65, "general.name": "other"}))
    assert gguf_shape(read_header(file)).context == 65


def test_a_file_without_a_tokenizer_has_token_ids_as_prompts(tmp_path: Path) -> None:
    file = write(tmp_path, tiny_model())
    assert tokenizer_of(file) is None
    assert describe(file).token_map is None
    with pytest.raises(SlipstreamError, match=r"model\.gguf has no tokenizer"):
        load_tokenizer(file)
