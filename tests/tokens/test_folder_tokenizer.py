"""`FolderTokenizer` does what transformers' own tokenizer of the same folder does, and only where it can."""

import copy
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from slipstream.checkpoints.families import FAMILIES as MODEL_TYPES
from slipstream.checkpoints.families.wrappers import WRAPPERS
from slipstream.errors import LoadError
from slipstream.tokens.folder_tokenizer import OTHER_CLASSES, FolderTokenizer
from slipstream.tokens.text import decoder_of, load_tokenizer, stray_byte
from slipstream.zoo import draft_dir, target_dir
from tests import tiny_families
from tests.tiny_checkpoints import FAMILIES, TEXTS, make_tokenizer
from tests.tokens import tokenizer_kinds
from tests.tokens.tokenizer_kinds import TALK

SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>")
SAMPLES = [
    "", " ", "a", "def add(first, second):\n    return first + second\n", "  two  spaces \t\r\n\x00",
    "naïve café 🎈 ☃ übergrößenträger 😀", "<s>x</s> <|user|> y<|user|>", "it's 12345 , isn't it ? don 't !",
    "日本語 ﬁ Ⅳ ʼn", "<unk><0x0A>▁the",
]  # fmt: skip


def copied(kind: Callable[..., Any], **how: Any) -> Tokenizer:
    """A tokenizer of `tokenizer_kinds` that may be changed."""
    return Tokenizer.from_str(kind(**how).backend_tokenizer.to_str())


def byte_level() -> Tokenizer:
    words = r"\s?\p{L}+|\p{N}{1,3}|[^\s\p{L}\p{N}]+|\s+"
    tokenizer = copied(tokenizer_kinds.byte_level, size=320, split=words, special=SPECIAL)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.WordLevelTrainer(vocab_size=60, special_tokens=list(SPECIAL)))
    return tokenizer


def with_added_tokens() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("return", single_word=True), AddedToken("++", lstrip=True, rstrip=True)])
    tokenizer.add_special_tokens([AddedToken("<pad>", normalized=True)])
    return tokenizer


def with_truncation_and_padding() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32, pad_id=0, pad_token="<unk>")
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind for kind in (byte_level, word_level, with_added_tokens, with_truncation_and_padding)
}
KINDS |= {
    name: lambda name=name: copied(getattr(tokenizer_kinds, name)) for name in ("sentencepiece", "unigram", "wordpiece")
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def folder_of(folder: Path, kind: str = "byte_level", model_type: str = "llama", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = KINDS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {name: token for name, token in NAMED.items() if tokenizer.token_to_id(token) is not None}
    named |= {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def assert_equal(folder: Path) -> Any:
    """Everything that the project asks a tokenizer for is what transformers answers. Returns the tokenizer."""
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    texts = [*SAMPLES, *("".join(rng.choices("".join(SAMPLES), k=rng.randint(1, 30))) for _ in range(100))]
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
    decode = decoder_of(tokenizer)
    for _ in range(200):
        ids = [rng.randrange(len(reference)) for _ in range(rng.randint(0, 20))]
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
        assert decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert len(tokenizer) == len(reference)
    assert tokenizer.chat_template == reference.chat_template
    for role in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"):
        for name in (f"{role}_token", f"{role}_token_id"):
            assert getattr(tokenizer, name) == getattr(reference, name), name
    for token in ("<s>", "a", "<0xFF>", "no such token"):
        assert tokenizer.convert_tokens_to_ids(token) == reference.convert_tokens_to_ids(token)
    if reference.chat_template:
        talk = [{"role": "user", "content": "<hi> é"}, {"role": "assistant", "content": "ho"}]
        for opening in (False, True):
            given = {"tokenize": False, "add_generation_prompt": opening}
            assert tokenizer.apply_chat_template(talk, **given) == reference.apply_chat_template(talk, **given)
    assert stray_byte(tokenizer) == stray_byte(reference)
    return tokenizer


def without_transformers(tokenizer: Any) -> bool:
    """Whether transformers was not needed."""
    return isinstance(tokenizer, FolderTokenizer) and tokenizer._whole is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_json_is_read_as_transformers_reads_it(tmp_path, kind):
    assert without_transformers(assert_equal(folder_of(tmp_path / kind, kind)))


def test_the_embedded_tokenizer_and_that_of_the_tests_need_no_transformers(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for folder in (target_dir(), draft_dir(), tmp_path):
        assert without_transformers(assert_equal(folder))


ALL_FAMILIES = FAMILIES | tiny_families.FAMILIES


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_model_family_gets_the_tokenizer_that_transformers_chooses(tmp_path, family):
    ALL_FAMILIES[family]().save_pretrained(tmp_path)
    model_type = json.loads((tmp_path / "config.json").read_text())["model_type"]
    tokenizer = assert_equal(folder_of(tmp_path, model_type=model_type))
    assert without_transformers(tokenizer) == (model_type not in OTHER_CLASSES)


WITHIN = ("mistral4",)
"""Families that are published within a multimodal model only, as a part that is not the usual one of its type."""


@pytest.mark.parametrize("model_type", [*WRAPPERS, *WITHIN])
def test_every_multimodal_model_gets_the_tokenizer_that_transformers_chooses(tmp_path, model_type):
    tokenizer = assert_equal(folder_of(tmp_path, model_type=model_type))
    assert without_transformers(tokenizer) == (model_type not in OTHER_CLASSES)


def test_every_model_type_has_a_family_in_these_tests():
    within = {*WITHIN, *(usual["model_type"] for usual in WRAPPERS.values())}
    assert within | {make().model_type for make in ALL_FAMILIES.values()} == set(MODEL_TYPES)


SETTINGS: dict[str, dict[str, Any]] = {
    "class": {"tokenizer_class": "TokenizersBackend"},
    "no special tokens": {"bos_token": None, "eos_token": None, "unk_token": None},
    "added token": {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}},
    "more": {"additional_special_tokens": ["<|user|>"], "model_max_length": 5, "padding_side": "left"},
    "extra": {"extra_special_tokens": ["<|user|>"], "clean_up_tokenization_spaces": True},
    "template": {"chat_template": TALK},
}


def test_added_tokens_of_the_configuration_that_the_tokenizer_has_are_no_change(tmp_path):
    folder_of(tmp_path, "with_added_tokens")
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    listed = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(token["id"]): {flag: token[flag] for flag in flags} for token in listed}
    folder_of(tmp_path, "with_added_tokens", added_tokens_decoder=decoder)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')  # of no effect beside a decoder
    assert without_transformers(assert_equal(tmp_path))
    decoder["4"] = decoder["3"] | {"content": "def"}
    folder_of(tmp_path, "with_added_tokens", added_tokens_decoder=decoder)
    assert not without_transformers(assert_equal(tmp_path))


def test_a_map_of_special_tokens_and_a_template_file_come_before_the_configuration(tmp_path):
    folder_of(tmp_path, eos_token="<|user|>", chat_template=TALK)
    (tmp_path / "chat_template.jinja").write_text("file: " + TALK)
    listed = {"eos_token": {"content": "</s>", "lstrip": False}, "additional_special_tokens": ["<|user|>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(listed))
    tokenizer = assert_equal(tmp_path)
    assert without_transformers(tokenizer)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.chat_template == "file: " + TALK


BEYOND: dict[str, dict[str, Any]] = {
    "bos and eos": {"add_bos_token": False, "add_eos_token": True},
    "a special token that is a word": {"eos_token": "return"}, "a new special token": {"pad_token": "<new>"},
    "a new list of them": {"additional_special_tokens": ["<new>", "<|user|>"]},
    "a token with an unknown role": {"image_token": "<|user|>"},
    "named extra tokens": {"extra_special_tokens": {"image_token": "<|user|>"}}, "unknown": {"some_setting": 1},
    **{kind: {"kind": kind, "clean_up_tokenization_spaces": True}
       for kind in ("unigram", "wordpiece", "word_level")},
    "split": {"split_special_tokens": True}, "another class": {"tokenizer_class": "GPT2Tokenizer"},
    "no class": {"tokenizer_class": None},
    "templates": {"chat_template": [{"name": "default", "template": TALK}, {"name": "tool_use", "template": "x"}]},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS | BEYOND)
def test_settings_are_honoured_and_where_tokenizer_json_is_not_enough_by_transformers(tmp_path, name):
    folder = folder_of(tmp_path, **(SETTINGS | BEYOND)[name])
    assert without_transformers(assert_equal(folder)) == (name in SETTINGS)


@pytest.mark.parametrize(
    ("name", "text"), [("added_tokens.json", '{"def": 400}'), ("additional_chat_templates/tool_use.jinja", TALK)]
)
def test_tokens_and_templates_beside_the_tokenizer_are_read_by_transformers(tmp_path, name, text):
    folder_of(tmp_path, chat_template=TALK)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    (tmp_path / "chat_template.jinja").write_text(TALK)
    assert not without_transformers(assert_equal(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"), ("tokenizer.json", '{"model": {"type": "New"}, "added_tokens": []}'),
        ("tokenizer_config.json", "{"), ("chat_template.jinja", b"\xff"),
    ],
)  # fmt: skip
def test_a_broken_file_is_an_error_of_loading(tmp_path, file, text):
    folder_of(tmp_path)
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LoadError, match=r"no tokenizer could be loaded|\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(folder_of(tmp_path, chat_template=TALK))


@pytest.fixture
def reference(tokenizer, tmp_path):
    return AutoTokenizer.from_pretrained(tmp_path)


def test_what_it_lacks_transformers_does(tokenizer, reference):
    encoding = tokenizer(["def", "a b"], padding=False)
    assert encoding["input_ids"] == reference(["def", "a b"])["input_ids"]
    assert tokenizer.convert_ids_to_tokens([5, 6]) == reference.convert_ids_to_tokens([5, 6])
    ids, wanted = (each.encode("def", return_tensors="pt") for each in (tokenizer, reference))
    assert ids.tolist() == wanted.tolist()
    assert tokenizer.decode([[5, 6], [7]]) == reference.decode([[5, 6], [7]])
    assert tokenizer.get_vocab() == reference.get_vocab()
    with pytest.raises(AttributeError, match="no_such_member"):
        tokenizer.no_such_member  # noqa: B018


@pytest.mark.parametrize(
    ("talk", "named"),
    [
        ([{"role": "user", "content": "x", "reasoning": "y"}], {"tokenize": False}),
        ([{"role": "user", "content": None}], {"tokenize": False}),
        ([{"role": "user", "content": "x"}], {"tokenize": True, "return_dict": False}),
        ([{"role": "user", "content": "x"}], {"tokenize": False, "chat_template": "{{ messages }}"}),
    ],
)
def test_other_conversations_and_options_are_rendered_by_transformers(tokenizer, reference, talk, named):
    assert tokenizer.apply_chat_template(talk, **named) == reference.apply_chat_template(talk, **named)
    assert not without_transformers(tokenizer)


def test_its_tokens_are_those_of_the_transformers_tokenizer(tokenizer, reference):
    parts, other = (json.loads(each.backend_tokenizer.to_str()) for each in (tokenizer, reference))
    assert without_transformers(tokenizer)
    for part in ("model", "added_tokens", "decoder", "normalizer", "pre_tokenizer"):
        assert parts[part] == other[part]
    tokenizer.add_tokens(["wholly"])
    assert "wholly" in tokenizer.backend_tokenizer.get_vocab()


def test_a_change_holds_for_everything(tokenizer):
    before, count = tokenizer.encode("wholly new"), len(tokenizer)
    tokenizer.add_tokens(["wholly"])
    assert tokenizer.encode("wholly new") != before
    assert tokenizer.decode(tokenizer.encode("wholly", add_special_tokens=False)) == "wholly"
    assert len(tokenizer) == count + 1
    tokenizer.chat_template = "changed"
    assert tokenizer.chat_template == "changed"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "changed"
    tokenizer.eos_token = "<s>"
    assert tokenizer.eos_token_id == 1


def test_a_copy_is_independent(tokenizer):
    for copied in (copy.copy(tokenizer), copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert copied.encode("wholly") == tokenizer.encode("wholly")
    copied.add_tokens(["wholly"])
    assert copied.encode("wholly") != tokenizer.encode("wholly")


def test_a_long_text_is_encoded_by_the_function_that_lets_other_threads_run(tokenizer, reference):
    """`encode` of the library holds the lock of the interpreter, `encode_batch` does not."""
    text = TEXTS[0] * 300
    assert tokenizer.encode(text) == reference.encode(text)
    batches = SimpleNamespace(encode_batch=lambda texts, add_special_tokens: [SimpleNamespace(ids=[len(texts[0])])])
    assert FolderTokenizer(batches, {}, None, lambda: None).encode(text) == [len(text)]
