"""The tokenizer of a GGUF file.

If the file contains the tokenizer.json of its checkpoint, this is the tokenizer. For other files, we build byte-level
BPE ("gpt2") from tokens and merges, if we know how it splits texts into words (`SPLITS`); SentencePiece ("llama") from
tokens and scores; and Gemma 4's tokenizer ("gemma4") from tokens and merges. Other kinds raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.checkpoints import gguf_header
from slipstream.checkpoints.gguf_config import same_token
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.gguf_keys import WHOLE
from slipstream.errors import LoadError
from slipstream.tokens.folder_tokenizer import ROLES, FolderTokenizer

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Mapping[str, Seq[str]] = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "starcoder": [r"\p{N}", _GPT2],
    "llama-bpe": [_WORDS % r"\p{N}{1,3}"],
    "qwen2": [_WORDS % r"\p{N}"],
    "gpt-4o": [_CASED % (f"{_SHORT}?", f"{_SHORT}?", r"\p{N}{1,3}")],
    "tekken": [_CASED % ("", "", r"\p{N}")],
    "seed-coder": [
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
"""For values of `tokenizer.ggml.pre`, regular expressions whose matches are words, applied one after another. A text is
split into these words before merges join the words' bytes (llama-vocab.cpp of github.com/ggml-org/llama.cpp)."""

_WHOLE_WORDS = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
"""Kinds that look up complete words before they apply merges, and put BOS before a text by default."""
_ALIKE = {
    "llama-bpe": f"{_WHOLE_WORDS.removesuffix(' tekken')} dbrx smaug-bpe chatglm-bpe glm4 glm5",
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum modern-bert jina-v1-en jina-es jina-de roberta-bpe mpt olmo jais trillion "
    "granite-docling exaone4",
    "starcoder": "refact command-r codeshell exaone minerva-7b mellum2",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "gpt-4o": "llama4 minimax-m2 kanana2",
    "deepseek-v3": "hunyuan-dense joyai-llm",
}
SAME_SPLIT = {name: name for name in SPLITS} | {name: each for each, names in _ALIKE.items() for name in names.split()}
"""For values of `tokenizer.ggml.pre`, the key in `SPLITS` with the same splitting."""
_GPT2_DEFAULTS, _SENTENCEPIECE_DEFAULTS = {"bos": 11, "eos": 11}, {"bos": 1, "eos": 2, "unknown": 0}
"""Default ids of special tokens, if the file does not give them, as in llama.cpp. (11 is a comma in GPT-2.)"""
_NOT_CUT = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 after which white space is kept. llama.cpp recognises Phi-3 by its name."""
_SPACE = "▁"
"""Character that stands for a space in the tokens of SentencePiece."""


def gguf_tokenizer(header: GgufHeader) -> FolderTokenizer | None:
    """Return the tokenizer of a file; None if it has none. Raises LoadError for one that cannot be read."""
    if not header.has_tokenizer:
        return None
    metadata = header.metadata
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre") or "default"
    if WHOLE not in metadata and kind not in ("llama", "gemma4") and not (kind == "gpt2" and split in SAME_SPLIT):
        raise LoadError(
            f"{header.path.name} has a tokenizer of an unknown kind ({kind}, {split})",
            why=f"texts would be tokenized wrongly; known kinds are llama, gemma4, and gpt2 with {', '.join(SPLITS)}",
            fix="give the checkpoint's tokenizer: LLM(file, tokenizer=AutoTokenizer.from_pretrained(...)); or let "
            "llama-server run the file, and measure that server with --base-url",
        )
    try:
        if WHOLE in metadata:
            backend = Tokenizer.from_str(str(metadata[WHOLE]))
        elif (why := same_token(header)) is not None:
            raise ValueError(why)
        else:
            backend = _byte_level(header) if kind == "gpt2" else _sentencepiece(header)
    except Exception as fault:  # the library raises bare Exception
        raise LoadError(
            f"the tokenizer in {header.path.name} cannot be read: {fault}", fix="convert the model again"
        ) from fault
    return _folder_tokenizer(header, backend)


def _byte_level(header: GgufHeader) -> Tokenizer:
    split = header.metadata.get("tokenizer.ggml.pre") or "default"
    whole = split in f"{_WHOLE_WORDS} glm4 glm5".split()
    backend = Tokenizer(models.BPE(_ids(header), _merges(header), ignore_merges=whole))
    words = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[SAME_SPLIT[split]]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_of])
    backend.decoder = decoders.ByteLevel()
    _add_special(header, backend, _GPT2_DEFAULTS, bos=split in _WHOLE_WORDS.split())
    return backend


def _sentencepiece(header: GgufHeader) -> Tokenizer:
    """Build BPE over characters, with `_SPACE` for each space, which falls back to bytes for unknown characters."""
    metadata, scored = header.metadata, header.metadata["tokenizer.ggml.model"] == "llama"
    defaults = _SENTENCEPIECE_DEFAULTS if scored else {}
    unknown = header.token_id("unknown")
    backend = Tokenizer(
        models.BPE(
            _ids(header),
            _merges_by_score(header) if scored else _merges(header),
            unk_token=header.token_texts.get(defaults.get("unknown", -1) if unknown is None else unknown),
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    spaced = metadata.get("tokenizer.ggml.add_space_prefix", scored)
    marked = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marked]) if spaced else marked
    if not scored:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if spaced else parts)
    _add_special(header, backend, defaults, bos=scored)
    return backend


def _ids(header: GgufHeader) -> dict[str, int]:
    return {text: i for i, text in header.token_texts.items()}


def _merges(header: GgufHeader) -> list[tuple[str, str]]:
    pairs = [merge.partition(" ") for merge in header.metadata.get("tokenizer.ggml.merges") or []]
    return [(left, right) for left, _, right in pairs]


def _merges_by_score(header: GgufHeader) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: every pair of tokens that joins to a token, best score first."""
    scores: Seq[float] = header.metadata.get("tokenizer.ggml.scores") or []
    if len(scores) < len(header.tokens):
        raise ValueError(f"it has {len(header.tokens)} tokens but {len(scores)} scores")
    ids, apart = _ids(header), header.tokens_of(gguf_header.CONTROL, gguf_header.UNKNOWN, gguf_header.BYTE)
    found = []
    for text, i in ids.items():
        for at in range(1, len(text) if i not in apart else 0):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None and left not in apart and right not in apart:
                found.append((-scores[i], i, left, right))
    texts = header.token_texts
    return [(texts[left], texts[right]) for _, _, left, right in sorted(found)]


def _add_special(header: GgufHeader, backend: Tokenizer, defaults: Mapping[str, int], bos: bool) -> None:
    """Mark special tokens as special, and make the tokenizer put BOS and EOS around a text. bos: whether it puts BOS if
    the file does not say."""
    texts, metadata = header.token_texts, header.metadata
    cut = "phi-3" in (name := str(metadata.get("general.name", "")).lower()) or "phi3" in name
    for kind in (gguf_header.CONTROL, gguf_header.UNKNOWN, gguf_header.USER_DEFINED):
        special, ids = kind != gguf_header.USER_DEFINED, sorted(header.tokens_of(kind))
        tokens = [
            AddedToken(texts[i], normalized=False, special=special, rstrip=cut and texts[i] not in _NOT_CUT)
            for i in ids
            if i in texts
        ]
        backend.add_tokens(tokens)
    around = {"bos": bos, "eos": False}
    used = [role for role, given in around.items() if metadata.get(f"tokenizer.ggml.add_{role}_token", given)]
    ids_of = {role: i if (i := header.token_id(role)) in texts else defaults.get(role, -1) for role in used}
    if nameless := [role for role, i in ids_of.items() if i not in texts]:
        raise ValueError(f"it adds {nameless[0].upper()} to texts, but does not define this token")
    if used:
        single = [*used[: "bos" in used], "$A", *used["bos" in used :]]
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *("$B" if part == "$A" else part for part in single)],
            special_tokens=[{"id": role, "ids": [i], "tokens": [texts[i]]} for role, i in ids_of.items()],
        )


def _folder_tokenizer(header: GgufHeader, backend: Tokenizer) -> FolderTokenizer:
    backend.no_truncation()
    backend.no_padding()
    special, template = special_tokens(header), header.templates

    def load() -> Any:
        from transformers import PreTrainedTokenizerFast

        text = backend.to_str()
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), chat_template=template, **special)

    return FolderTokenizer(backend, special, template, load)


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """Return the text of each special token that a file names, such as {"bos_token": "<s>"}."""
    ids = {f"{role}_token": header.token_id(role) for role in ROLES}
    return {name: header.token_texts[i] for name, i in ids.items() if i is not None and i in header.token_texts}
