"""The tokenizer of the embedded models: byte-level BPE over Python source, with tokens for a chat turn."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream.errors import CheckpointError

EOS, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (EOS, USER, ASSISTANT, END)

# In this order: a line break with the indentation that follows it (so that an indented new line is one
# token), one digit, a word with one leading mark or space, punctuation, other runs of blanks (all but the
# last, which goes with the next word).
SPLIT = (
    r"(?:[ \t]*\r?\n)+[ \t]*"
    r"|\p{N}"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[ \t]+(?=[ \t]\S)"
    r"|\s+"
)

PRE_TOKENIZERS: dict[str, Any] = {
    "code": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}
"""How text is split before it is merged: as for the embedded models, or as GPT-2 does. The second makes a vocabulary of
its own, for a draft model whose tokenizer is not the target's."""

# A system message is put before the first user turn: small models see too few of them for a separate token.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{%- set ns.system = message['content'] + '\n\n' -%}"
    "{%- elif message['role'] == 'user' -%}"
    "{{- '<|user|>\n' + ns.system + message['content'] + '<|end|>\n' -}}"
    "{%- set ns.system = '' -%}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>\n' + message['content'] + '<|end|>\n' -}}"
    "{%- else -%}"
    "{{- raise_exception('Unknown role: ' + message['role'] + '. Use system, user or assistant.') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)


def chat(user: str, assistant: str) -> str:
    """One exchange as text, exactly as `CHAT_TEMPLATE` renders it."""
    return f"{USER}\n{user}{END}\n{ASSISTANT}\n{assistant}{END}\n"


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of one of `SPECIAL`.

    Raises:
        CheckpointError: when the tokenizer lacks it.
    """
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise CheckpointError(f"The tokenizer has no token {token}", fix="use the tokenizer of this recipe")
    return number


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096, pre_tokenizer: str = "code") -> Tokenizer:
    """Train byte-level BPE. Ids 0..3 are `SPECIAL`, then the 256 bytes, then the merges. pre_tokenizer: one of
    `PRE_TOKENIZERS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` so that `AutoTokenizer` loads them as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
