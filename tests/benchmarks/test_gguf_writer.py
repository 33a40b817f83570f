"""Checkpoints as GGUF files: their tokens, what is refused, and what is left of a conversion that failed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from benchmarks.gguf import gguf_writer
from benchmarks.gguf.gguf_writer import convert_to_gguf
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_header import read_header
from slipstream.checkpoints.gguf_keys import WHOLE
from slipstream.errors import CheckpointError, LoadError, UnsupportedModelError
from slipstream.targets.describe import as_target, describe
from slipstream.tokens.folder_tokenizer import FolderTokenizer
from slipstream.tokens.gguf_tokenizer import SPLITS, gguf_tokenizer
from slipstream.tokens.text import TextStream, decoder_keeping, decoder_of, load_tokenizer
from tests.tiny_checkpoints import TEXTS, Tiny, clone, make_model, rewrite
from tests.tokens.tokenizer_kinds import byte_level, sentencepiece

gguf = pytest.importorskip("gguf")

TEXT = "def naïve(☃):\n\treturn 'café 🎈🎈' + ''.join(names)  # 12345\r\n\x00end"
CHAT = [{"role": "user", "content": "hello"}]


def folder(path: Path, tokenizer: Tokenizer, **special: str) -> Path:
    """A tiny Llama with this tokenizer."""
    make_model(path, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0].content }}!", **special}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def converted(source: Path, quantize: str = "f16") -> Path:
    return convert_to_gguf(source, source.with_suffix(f".{quantize}.gguf"), quantize).file


def built_tokenizer(file: Path) -> FolderTokenizer:
    """The tokenizer that the file's tokens make, without the tokenizer.json in it."""
    header = read_header(file)
    tokenizer = gguf_tokenizer(replace(header, metadata={k: v for k, v in header.metadata.items() if k != WHOLE}))
    assert tokenizer is not None
    return tokenizer


def test_a_file_has_the_tokenizer_of_its_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    file = convert_to_gguf(tiny.target, tmp_path / "a.gguf").file
    source, tokenizer = load_tokenizer(tiny.target), load_tokenizer(file)
    assert tokenizer.encode(TEXT) == source.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer) == len(source)
    assert tokenizer.chat_template == source.chat_template
    named = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(CHAT, **named) == source.apply_chat_template(CHAT, **named)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|endoftext|>", 0, 0)
    assert tokenizer.transformers.encode(TEXT) == source.encode(TEXT)
    assert describe(file).token_map.tokens == describe(tiny.target).token_map.tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("split", [None, SPLITS["qwen2"][0]], ids=["gpt2", "qwen2"])
def test_a_byte_level_tokenizer_made_of_tokens_and_merges_is_the_checkpoints(tmp_path: Path, split: str | None) -> None:
    """For files that do not hold tokenizer.json."""
    tokenizer = Tokenizer.from_str(byte_level(318, split=split).backend_tokenizer.to_str())
    tokenizer.add_tokens(["<added>"])
    source = folder(tmp_path / "m", tokenizer, eos_token="<|end|>")
    llama, reference = built_tokenizer(converted(source)), load_tokenizer(source)
    for text in (TEXT, "<|user|>hi <added><|end|>", "", " ", "  two", *TEXTS):
        assert llama.encode(text) == reference.encode(text)
        assert llama.decode(llama.encode(text)) == text
    known = sorted(reference.backend_tokenizer.get_vocab().values())
    assert [llama.decode([i], skip_special_tokens=True) for i in known if i < 2] == ["", ""]
    assert len(llama) == len(known)
    assert llama.convert_tokens_to_ids("<|user|>") == 1
    added = reference.convert_tokens_to_ids("<added>")
    assert llama.convert_tokens_to_ids(["<added>", "nonesuch"]) == [added, None]
    assert (llama.eos_token, llama.eos_token_id, llama.bos_token_id) == ("<|end|>", 0, None)
    assert llama.apply_chat_template(CHAT, tokenize=False, tools=None) == "hello!"
    assert decoder_keeping(llama, ["<|user|>"])([1, 0, added]) == "<|user|><added>"
    stream, ids = TextStream(decoder_of(llama)), llama.encode(TEXT)
    pieces = [piece for i in ids for piece in stream.add([i], [False], False)] + stream.finish(None)
    assert "".join(piece.text for piece in pieces) == TEXT


def test_a_sentencepiece_tokenizer_made_of_tokens_and_scores_is_the_checkpoints(tmp_path: Path) -> None:
    special = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    source = folder(tmp_path / "m", sentencepiece(320).backend_tokenizer, **special)
    file = converted(source)
    llama, reference = built_tokenizer(file), load_tokenizer(source)
    assert read_header(file).metadata["tokenizer.ggml.model"] == "llama"
    for text in ("def add first", "for name in names print", "naïve ☃", "a\nb"):
        assert llama.encode(text) == reference.encode(text)
        assert llama.encode(text)[0] == llama.bos_token_id == 1
        assert llama.decode(llama.encode(text), skip_special_tokens=True) == text
        assert load_tokenizer(file).encode(text) == reference.encode(text)


def test_templates_with_names_keep_them(tiny: Tiny, tmp_path: Path) -> None:
    source = clone(tiny.target, tmp_path / "m")
    (source / "chat_template.jinja").write_text("plain")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    templates = load_tokenizer(convert_to_gguf(source, tmp_path / "a.gguf").file).chat_template
    assert templates == {"default": "plain", "tool_use": "tools"}


def test_a_checkpoint_without_a_tokenizer_has_a_file_without_one(checkpoint, tmp_path):
    conversion = convert_to_gguf(checkpoint("llama"), tmp_path / "a.gguf", "f32")
    assert (conversion.tokens, conversion.differing) == (0, None)
    assert not read_header(conversion.file).has_tokenizer
    assert describe(conversion.file).config.parameters == describe(checkpoint("llama")).config.parameters


def test_a_parallel_draft_model_stays_one(tiny: Tiny, tmp_path: Path) -> None:
    source = rewrite(clone(tiny.draft, tmp_path / "m"), pard_token=7)
    assert DecoderConfig.load(convert_to_gguf(source, tmp_path / "a.gguf", "f16").file).mask_token == 7


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_k_m"])
def test_weights_are_stored_as_asked(kind: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    if kind not in gguf_writer.PLAIN:
        pytest.importorskip("llama_cpp")
    conversion = convert_to_gguf(checkpoint("llama"), tmp_path / "a.gguf", kind)
    header = read_header(conversion.file)
    assert header.file_type.lower() == kind
    assert conversion.stored == header.stored
    types = {tensor.type for tensor in header.tensors if len(tensor.shape) > 1}
    assert "F32" not in types or kind == "f32"
    if kind == "q8_0":
        assert types == {"Q8_0"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "mistral-window", "qwen2-window"])
def test_what_llamacpp_would_run_as_another_model_is_refused(family, checkpoint, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"cannot be converted to GGUF: .*(expert|window)"):
        convert_to_gguf(checkpoint(family), tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(UnsupportedModelError, match="of the kind 'WordLevel'"):
        converted(source)


def test_a_token_that_became_another_is_found(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of the conversion, nor is an earlier file lost."""
    file = convert_to_gguf(tiny.target, tmp_path / "a.gguf", "f32").file
    before, write = file.read_bytes(), gguf.GGUFWriter.add_token_list

    def wrong(writer: Any, texts: list[str]) -> None:
        texts[270], texts[271] = texts[271], texts[270]
        write(writer, texts)

    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", wrong)
    with pytest.raises(CheckpointError, match=r"token 270 is .* in the checkpoint and .* in the GGUF file"):
        convert_to_gguf(tiny.target, file, "f16")
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_a_damaged_tokenizer_in_a_file_is_an_error(tiny: Tiny, tmp_path: Path) -> None:
    file = convert_to_gguf(tiny.target, tmp_path / "a.gguf", "f32").file
    data = file.read_bytes()
    at = data.index(WHOLE.encode()) + len(WHOLE) + 12
    file.write_bytes(data[:at] + b"]" + data[at + 1 :])
    with pytest.raises(LoadError, match=r"tokenizer in a\.gguf cannot be read"):
        load_tokenizer(file)


def test_texts_end_where_those_of_the_checkpoint_end(tiny: Tiny, tmp_path: Path) -> None:
    """Not at <|end|>, which would end them by its text; the format has places for three ids."""
    source = clone(tiny.target, tmp_path / "m")
    for ends in ([0], [0, 3, 7, 8, 9], []):
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        target = as_target(convert_to_gguf(source, tmp_path / "a.gguf", "f32").file, executor="torch")
        assert target.capabilities.eos_ids == as_target(source, executor="torch").capabilities.eos_ids == set(ends)


def test_a_file_that_names_no_end_has_none_that_is_an_ordinary_token(tiny: Tiny, tmp_path: Path) -> None:
    source = rewrite(clone(tiny.target, tmp_path / "m"), eos_token_id=None)
    (source / "generation_config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.gguf.gguf_writer.ENDS", "another.key")
        file = convert_to_gguf(source, tmp_path / "a.gguf", "f32").file
    assert sorted(describe(file).eos_ids) == [0, 3]  # <|endoftext|> and <|end|>
