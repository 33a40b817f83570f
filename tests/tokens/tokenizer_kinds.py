"""Small tokenizers of every kind that causal models use, trained here on a few lines of text."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.tokens.rereading import Vocabularies
from slipstream.tokens.token_texts import TokenTexts

TEXTS = [
    "def add(first, second):\n    return first + second\n",
    "for name in names:\n    print(name)\n",
    "The quick brown Fox returns the names; it's 42, and the second name is the first.\n",
    "naïve café ☃ the decoding of speculative text, decoding speculative words\n",
]
OTHER_TEXTS = [
    "print the first name and return it: def first(names):\n  return names[0]\n",
    "Speculative decoding returns the text. It's decoded, and the words are the same, 17 times.\n",
]
TALK = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
"""A chat template."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level(
    size: int = 330, other: bool = False, split: str | None = None, special: tuple[str, ...] = ("<|end|>", "<|user|>")
) -> PreTrainedTokenizerFast:
    """Make a tokenizer like GPT-2's and Llama 3's: BPE over bytes, without a BOS. split: how words are split; default:
    as in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        words = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(OTHER_TEXTS if other else TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


@cache
def sentencepiece(size: int = 340, other: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer like Llama 2's: BPE over characters that falls back to bytes, with a BOS and a space before
    every text."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False)
    trained.train_from_iterator([text.replace("\n", " ") for text in (OTHER_TEXTS if other else TEXTS)], trainer)
    learned = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            learned["vocab"], [tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>", byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", learned["vocab"]["<s>"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unigram(size: int = 120) -> PreTrainedTokenizerFast:
    """Make a tokenizer like XGLM's: Unigram without byte tokens, so that characters may be unknown. It keeps line
    breaks."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False,
        initial_alphabet=sorted({char for text in TEXTS for char in text}),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@cache
def wordpiece(size: int = 160, lowercase: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer like BERT's: words are split at spaces and punctuation, and tokens that continue a word begin
    with "##"."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    if lowercase:
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", unk_token="[UNK]")


def vocabularies_of(target: Any, draft: Any, width: tuple[int, int] = (10**6, 10**6)) -> Vocabularies:
    """Make the vocabularies without the check that tokenizers do not change text, because the tokenizers of toy models
    have few characters."""
    return Vocabularies(TokenTexts(target, "the target"), TokenTexts(draft, "the draft model"), width)


@cache
def letters(words: tuple[str, ...], merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer for toy models, in which token i writes words[i]. Words are single letters, and letters joined
    by `merges`."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


FAITHFUL: dict[str, Any] = {
    "byte-level": byte_level, "byte-level, other merges": lambda: byte_level(290, other=True),
    "sentencepiece": sentencepiece, "unigram": unigram,
}  # fmt: skip
"""Tokenizers that do not change text."""
