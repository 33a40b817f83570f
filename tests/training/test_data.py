"""What `--data` accepts, and what it refuses before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from recipes.embedded.tokenizer import save_tokenizer, train_tokenizer
from slipstream.errors import DataError, ParameterError, TrainingError
from slipstream.training import packing
from slipstream.training.data import DocumentEncoder, check_data, prepare_data
from slipstream.training.documents import Document, read_documents
from slipstream.training.packing import TokenStream, write_masked, write_stream


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> DocumentEncoder:
    """A byte-level tokenizer with the embedded models' chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer: Tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n"] * 3, 300)
    save_tokenizer(tokenizer, folder, 128)
    return DocumentEncoder(AutoTokenizer.from_pretrained(folder), eos=0)


def lines(*records: Any) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


BAD: dict[str, tuple[str, bytes | None, str]] = {
    "empty": ("a.txt", b"", "is empty"), "blank": ("a.txt", b" \n\n ", "contains no text"),
    "missing": ("a.txt", None, "does not exist"), "binary": ("a.txt", b"abc\0def", "not text: byte 3 is zero"),
    "latin-1": ("a.txt", b"caf\xe9 au lait", "not UTF-8 text: byte 3 is 0xe9"),
    "stream without starts": ("a.bin", b"\1\0", "a.starts.npy"),
    "not JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
    "no field": ("a.jsonl", b'{"text": "x"}\n\n{"txet": "y"}\n', "line 3 has none of the known fields.*'txet'"),
    "a number": ("a.jsonl", b'{"text": 3}\n', "line 1: text is int"),
    "a list": ("a.jsonl", b"[1]\n", "line 1 is a JSON list"),
    "no role": ("a.jsonl", b'{"messages": [{"role": "robot", "content": "x"}]}\n', "turn 1: unknown role 'robot'"),
    "no turns": ("a.jsonl", b'{"messages": []}\n', "conversation is empty"),
    "one object": ("a.json", b'{"text": "x"}', "contains a JSON dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_before_any_work(name: str, encoder: DocumentEncoder, tmp_path: Path) -> None:
    file, content, message = BAD[name]
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        check_data([str(tmp_path / file)], encoder.tokenizer)


def test_no_data_and_empty_folders_are_refused_and_a_misspelt_file_is_named(
    encoder: DocumentEncoder, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no training data"):
        check_data([], encoder.tokenizer)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="contains no text files"):
        check_data([str(tmp_path)], encoder.tokenizer)
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(DataError, match=r"Did you mean 'corpus\.jsonl'"):
        check_data([str(tmp_path / "corpsu.jsonl")], encoder.tokenizer)


@pytest.mark.parametrize("length", [64, 4096])
def test_data_shorter_than_a_window_is_refused(length: int, encoder: DocumentEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x = 1\n" * 12)
    with pytest.raises(DataError, match=f"has only .* tokens.*window of {length + 1}"):
        prepare_data(tmp_path / "data", [str(tmp_path / "a.txt")], encoder, 300, length)


def test_a_stream_of_another_tokenizer_is_refused(encoder: DocumentEncoder, tmp_path: Path) -> None:
    write_stream(tmp_path / "a.bin", [[5, 300, 7] * 50], eos=0)
    with pytest.raises(DataError, match=r"contains id 300, but the target's vocabulary is 0\.\.299"):
        prepare_data(tmp_path / "data", [str(tmp_path / "a.bin")], encoder, 300, 16)


def test_every_kind_of_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        lines(
            {"text": "plain\u2028still plain"},
            {"prompt": "ask", "completion": "say"},
            {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]},
        )
    )
    plain, pair, talk = read_documents(str(path))
    assert (plain.text, plain.answer) == ("plain\u2028still plain", None)
    assert (pair.text, pair.answer) == ("ask", "say")
    assert talk.turns == ({"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"})
    whole = tmp_path / "b.json"
    whole.write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    assert [d.text for d in read_documents(str(whole))] == ["one", "two"]


def test_folders_are_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.py", "a.md", ".git/x.py", "sub/c.jsonl", "d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines({"text": "c"}) if name.endswith("jsonl") else name)
    assert [d.key for d in read_documents(str(tmp_path))] == ["a.md", "b.py", "sub/c.jsonl:1"]


def decoded(encoder: DocumentEncoder, ids: list[int], mask: list[bool] | None) -> str:
    return encoder.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])  # type: ignore[no-any-return]


def test_answers_of_conversations_are_marked(encoder: DocumentEncoder) -> None:
    turns = tuple(
        {"role": role, "content": said}
        for role, said in (("system", "s"), ("user", "ask"), ("assistant", "say"), ("user", "go"), ("assistant", "on"))
    )
    talk, pair = Document("t", turns=turns), Document("p", "ask", "say")
    encoded = [marked for _, marked in encoder.encode([talk, Document("x", "def f"), pair])]
    whole = encoder.tokenizer.decode(encoded[0][0])
    assert whole == encoder.tokenizer.apply_chat_template(list(turns), tokenize=False)
    assert decoded(encoder, *encoded[0]) == "say<|end|>\non<|end|>\n"
    assert encoded[1][1] is None
    assert decoded(encoder, *encoded[2]) == "say<|end|>\n"


def test_special_tokens_in_text_stay_text(encoder: DocumentEncoder) -> None:
    [(_, (ids, _))] = encoder.encode([Document("x", "<|endoftext|>")])
    assert 0 not in ids
    assert encoder.tokenizer.decode(ids) == "<|endoftext|>"


def test_conversations_need_a_template(encoder: DocumentEncoder) -> None:
    class Bare:
        chat_template = None

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[ord(c) for c in t] for t in texts]}

    bare = DocumentEncoder(Bare(), None)
    with pytest.raises(DataError, match="no chat template"):
        list(bare.encode([Document("t", turns=({"role": "user", "content": "x"},))]))
    [(_, (ids, mask))] = bare.encode([Document("p", "ab", "cd")])
    assert (ids, mask) == ([97, 98, 99, 100], [False, False, True, True])


def write_texts(folder: Path, write: Callable[[int], str], count: int = 60) -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(write(i))
    return folder


def test_the_split_is_by_document_and_repeats(encoder: DocumentEncoder, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts", lambda i: f"value_{i} = {i}\n" * 8)
    first = prepare_data(tmp_path / "one", [str(source)], encoder, 300, 32, heldout=0.2)
    again = prepare_data(tmp_path / "two", [str(source)], encoder, 300, 32, heldout=0.2)
    assert first.train[0].tokens.tolist() == again.train[0].tokens.tolist()
    assert first.heldout[0].tokens.tolist() == again.heldout[0].tokens.tolist()

    def documents(stream: TokenStream) -> set[tuple[int, ...]]:
        return {tuple(ids) for ids, _ in stream.documents()}

    assert len(documents(first.train[0])) + len(documents(first.heldout[0])) == 60
    assert not documents(first.train[0]) & documents(first.heldout[0])
    assert 0.05 < len(documents(first.heldout[0])) / 60 < 0.4


def test_one_long_document_is_split_at_its_end(encoder: DocumentEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"v{i} = {i}\n" for i in range(200)))
    prepared = prepare_data(tmp_path / "data", [str(tmp_path / "a.txt")], encoder, 300, 64)
    whole = encoder.tokenizer((tmp_path / "a.txt").read_text())["input_ids"]
    cut = [t for t in prepared.train[0].tokens.tolist() if t] + [t for t in prepared.heldout[0].tokens.tolist() if t]
    assert cut == whole
    assert len(prepared.heldout[0].tokens) > 64


def test_changed_data_is_refused_in_the_same_folder(encoder: DocumentEncoder, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts", lambda i: f"value_{i} = {i}\n" * 8)
    prepare_data(tmp_path / "data", [str(source)], encoder, 300, 32)
    prepare_data(tmp_path / "data", [str(source)], encoder, 300, 32)
    (source / "060.txt").write_text("more")
    with pytest.raises(TrainingError, match="made from other data: sources differ"):
        prepare_data(tmp_path / "data", [str(source)], encoder, 300, 32)


def test_large_vocabularies_and_masks_are_stored_correctly(tmp_path: Path) -> None:
    documents: list[tuple[list[int], list[bool] | None]] = [
        ([70000, 5, 6], [False, True, True]), ([7], None), ([8, 9], [True, False]),
    ]  # fmt: skip
    write_masked(tmp_path / "s.bin", documents, 151_000, vocab_size=152_000)
    stream = TokenStream.open(tmp_path / "s.bin", whole=False)
    assert stream.tokens.dtype == np.uint32
    assert stream.tokens.tolist() == [70000, 5, 6, 151_000, 7, 151_000, 8, 9, 151_000]
    # The closing end of text belongs to an answer that reaches it.
    assert stream.mask.tolist() == [0, 1, 1, 1, 0, 0, 1, 0, 0]
    assert stream.masks([0], 4).tolist() == [[False, True, True, True, False]]
    write_masked(tmp_path / "s.bin", [([1, 2], None)], 0)
    assert TokenStream.open(tmp_path / "s.bin", whole=False).mask is None


def test_a_cut_stream_is_refused(tmp_path: Path) -> None:
    write_stream(tmp_path / "s.bin", [[1, 2, 3]], eos=0)
    (tmp_path / "s.bin").write_bytes(b"\1\0")
    with pytest.raises(Exception, match="has 2 bytes"):
        TokenStream.open(tmp_path / "s.bin", whole=False)


def stream(tmp_path: Path, lengths: list[int], whole: bool) -> TokenStream:
    """Documents of the given lengths (their closing 0 not counted); document `i` consists of the id `i + 1`."""
    write_stream(tmp_path / "s.bin", ([i + 1] * n for i, n in enumerate(lengths)), eos=0)
    return TokenStream.open(tmp_path / "s.bin", whole)


def test_windows_start_with_pairs_and_cut_files_on_a_grid_and_a_short_stream_is_refused(tmp_path: Path) -> None:
    s = stream(tmp_path, [3, 5, 4, 6, 2], whole=True)
    # Documents with EOS start at 0, 4, 10, 15, 22 and end at 25. A window of 8 + 1 tokens takes document 0 and
    # half of document 1, so the next one begins with document 1 again.
    assert s.windows(8).tolist() == [0, 4, 10, 15]
    assert s.rows([0], 8).tolist() == [[1, 1, 1, 0, 2, 2, 2, 2, 2]]
    assert stream(tmp_path, [30, 5, 4, 9], whole=True).windows(8).tolist() == [0, 31, 37, 42]
    assert stream(tmp_path, [20, 9], whole=False).windows(8).tolist() == [0, 8, 16]
    with pytest.raises(ParameterError, match="has only"):
        stream(tmp_path, [3], whole=False).windows(8)


def test_a_stream_on_a_full_disk_is_named_and_nothing_of_it_is_left(tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError("80 requested and 0 written")  # as numpy says it

    monkeypatch.setattr(packing.np, "save", full)
    with pytest.raises(TrainingError, match=r"token stream .*ids.bin could not be written .*free some space"):
        write_stream(tmp_path / "ids.bin", [[1, 2, 3]], eos=0)
    assert not list(tmp_path.iterdir())
