"""Incremental detokenization, which never returns a part of a character or of a stop string."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName, read_once
from slipstream.core.text_ends import Decode, OutputText, count_begun, find_completed
from slipstream.errors import LoadError, reading
from slipstream.tokens.folder_tokenizer import FolderTokenizer, open_folder, transformers_tokenizer
from slipstream.tokens.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "spiece.model", "*.tiktoken", "special_tokens_map.json")
_FIX = "put tokenizer.json and tokenizer_config.json next to the weights, or give token ids as prompts"


@read_once
def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, which is a transformers tokenizer or an equivalent. Returns None if there
    is none, so that prompts must be token ids. Never runs code of the checkpoint. Raises LoadError."""
    if checkpoint.is_gguf:
        from slipstream.tokens.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(checkpoint.header)
    if not any(next(checkpoint.place.glob(name), None) for name in _TOKENIZER_FILES):
        return None
    with reading(f"no tokenizer could be loaded from {str(checkpoint)!r}", _FIX):
        return open_folder(checkpoint) or transformers_tokenizer(checkpoint.place)


def load_tokenizer(checkpoint: CheckpointName) -> Tokenizer:
    """Return the tokenizer as `tokenizer_of` does. Raises LoadError if the checkpoint has no tokenizer."""
    opened = Checkpoint.open(checkpoint)
    tokenizer = tokenizer_of(opened)
    if tokenizer is None:
        fix = "convert the model with its tokenizer, or give token ids as prompts" if opened.is_gguf else _FIX
        raise LoadError(f"{opened} has no tokenizer", fix=fix)
    return tokenizer


def decoder_of(tokenizer: Tokenizer) -> Decode:
    """Return a function from token ids to text without special tokens. Spaces are not cleaned up, so pieces can be
    concatenated."""
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def decoder_keeping(tokenizer: Tokenizer, markers: Seq[str]) -> Decode:
    """Return a function as `decoder_of` does, but keep special tokens in the text if they occur in `markers`."""
    special = special_tokens(tokenizer).items()
    dropped = {token for token, text in special if not any(text in marker for marker in markers)}
    return lambda ids: tokenizer.decode(
        [token for token in ids if token not in dropped], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def token_text_of(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a function from a token id to the text that the token has after another token. Special tokens have a text,
    too; a part of a character is U+FFFD. (At the beginning of a text, many tokenizers drop the space of a word.)"""
    lead = tokenizer.encode("x", add_special_tokens=False)
    before, keeping = tokenizer.decode(lead), {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}

    @lru_cache(2**16)
    def text(token: int) -> str:
        whole = tokenizer.decode([*lead, token], **keeping)
        return str(whole[len(before) :] if whole.startswith(before) else tokenizer.decode([token], **keeping))

    return text


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the names of the special tokens among the added tokens, by id."""
    if isinstance(tokenizer, FolderTokenizer):
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    else:
        added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: known.content for token, known in added.items() if known.special}


def stray_byte(tokenizer: Tokenizer) -> int | None:
    """Return the id of a byte that no UTF-8 text contains, if the tokenizer falls back to bytes (as Llama 2's does),
    else None."""
    if not isinstance(tokenizer, FolderTokenizer):
        from transformers import PreTrainedTokenizerBase  # imported here: it takes long

        if not isinstance(tokenizer, PreTrainedTokenizerBase):  # the user's own class: its tokens are unknown
            return None
    byte = tokenizer.convert_tokens_to_ids("<0xFF>")
    return byte if isinstance(byte, int) and byte != tokenizer.unk_token_id else None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token added. drafted: whether the token is an accepted draft token."""

    text: str
    token: int
    drafted: bool


class TextStream:
    """Turns tokens into pieces of text as they arrive.

    A token that ends inside a UTF-8 character gives no text until the character is complete. With a tokenizer that
    falls back to bytes, a sequence of byte tokens gives no text until it ends, because one invalid byte turns all its
    characters into U+FFFD (see the function `stray_byte`). Text that may be the beginning of a stop string is held back
    until this is ruled out. The joined pieces are the text of the complete output, cut before its stop string.

    prompt  the tokens before the output, on which the text of the first output token depends.
    """

    def __init__(self, decode: Decode, stop: Seq[str] = (), stray_byte: int | None = None, prompt: Seq[int] = ()):
        self._text, self._stop = OutputText(decode, prompt, stray_byte), tuple(stop)
        self._waiting: list[Piece] = []

    def add(self, ids: Seq[int], drafted: Seq[bool], last: bool, stop_cause: int | str | None = None) -> list[Piece]:
        """Push the tokens of a step, and return the pieces that can be shown. last: return all remaining pieces."""
        for token, accepted in zip(ids, drafted, strict=True):
            self.push(token, accepted)
        return self.finish(stop_cause) if last else self.take()

    def push(self, token: int, drafted: bool) -> None:
        self._waiting.append(Piece(self._text.add(token), token, drafted))

    def take(self) -> list[Piece]:
        """Return the pieces that can be shown now."""
        text = "".join(piece.text for piece in self._waiting)
        unsafe = max((count_begun(text, stop) for stop in self._stop), default=0)
        return self._release(len(text) - unsafe, keep=self._text.incomplete)

    def finish(self, stop_cause: int | str | None) -> list[Piece]:
        """Return the remaining pieces, up to the stop string if a stop string ended the output. An incomplete character
        at the end becomes U+FFFD."""
        if self._text.incomplete and self._waiting:
            last = self._waiting[-1]
            self._waiting[-1] = Piece(self._text.rest(), last.token, last.drafted)
        text = "".join(piece.text for piece in self._waiting)
        end = -1
        if isinstance(stop_cause, str):
            end = find_completed(text, "".join(piece.text for piece in self._waiting[:-1]), stop_cause)
        return self._release(end if end >= 0 else len(text), last=True)

    def _release(self, length: int, keep: int = 0, last: bool = False) -> list[Piece]:
        out: list[Piece] = []
        while len(self._waiting) > keep:
            piece = self._waiting[0]
            if len(piece.text) > length and not last:
                break
            out.append(Piece(piece.text[:length], piece.token, piece.drafted))
            length -= min(length, len(piece.text))
            self._waiting.pop(0)
        return out
