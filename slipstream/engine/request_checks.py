"""`RequestChecks`: checks prompts and parameters of requests against one model before anything runs. Does not import
torch, because the process that answers HTTP checks requests, too."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import replace
from functools import wraps
from operator import index
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import numpy as np

from slipstream.core.encoder import Encoder
from slipstream.core.params import SamplingParams
from slipstream.core.strict import check_text
from slipstream.engine.beam_params import BeamParams
from slipstream.errors import OTHER_NAMES, ParameterError, PromptError, did_you_mean, reading
from slipstream.tokens.tokenizer import Tokenizer

MOST_PREDICTED = 1 << 19
"""Largest number of characters of a prediction at a server: rarely more tokens than a suffix tree remembers."""

Prompt = str | Seq[int]
Message = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class RequestChecks:
    """Checks requests without weights. Raises ParameterError or PromptError for a request that the model cannot serve.

    tokenizer   None: prompts are token ids.
    vocab_size  width V of the target's logits.
    context     largest number of tokens in a sequence.
    encoder     the encoder of an encoder-decoder, whose prompts are sources.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, context: int, encoder: Encoder | None = None):
        self.tokenizer, self.vocab_size, self.context, self.encoder = tokenizer, vocab_size, context, encoder

    def prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: at least one, none outside the vocabulary, fewer than the context holds."""
        ids = self._prompt_ids(prompt)
        if len(ids) > self.longest and self.encoder is not None:
            raise PromptError(
                f"the source has {len(ids)} tokens, but the context of the target's encoder holds {self.longest}",
                fix=f"shorten it to {self.longest} tokens",
            )
        if len(ids) > self.longest:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but the target's context holds {self.context}",
                why="at least one position must be left for the answer",
                fix=f"shorten it to {self.longest} tokens",
            )
        return ids

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError(
                    "the prompt is text, but the target has no tokenizer",
                    fix="give token ids, or LLM(..., tokenizer=...), or put tokenizer.json next to the weights",
                )
            ids = self._encode("the prompt", prompt) if prompt else []
        else:
            ids = _token_ids(prompt)
        if not ids:
            raise PromptError("the prompt is empty", why="a model needs at least one token", fix="give a prompt")
        return self._within(ids, "prompt")

    @property
    def longest(self) -> int:
        return self.context - 1 if self.encoder is None else self.encoder.context

    def before(self, prompt: Seq[int]) -> Seq[int]:
        """Return the tokens that come directly before the output in the target's sequence."""
        return prompt if self.encoder is None else self.encoder.start

    def room(self, prompt: int) -> int:
        """Return the largest number of output tokens after a prompt of `prompt` tokens."""
        return self.context - (prompt if self.encoder is None else len(self.encoder.start))

    def prediction(self, text: Prompt) -> list[int]:
        """Return the token ids of a predicted output. It may be longer than the context."""
        if not isinstance(text, str):
            return self._within(_token_ids(text), "prediction")
        if self.tokenizer is None:
            raise PromptError("the prediction is text, but the target has no tokenizer", fix="give token ids")
        return self._encode("the prediction", text, add_special_tokens=False)

    def chat_text(self, messages: str | Seq[Message], **names: object) -> str:
        """Apply the chat template to a conversation. names: other variables of the template, such as `tools`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        turns = _turns(messages)
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise PromptError(
                "a conversation was given, but the target has no chat template",
                fix="give a plain prompt: LLM.generate, or slipstream generate without --chat",
            )
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **names)
        except Exception as fault:  # a template is code of the checkpoint
            raise PromptError(
                "the model's chat template refuses this conversation",
                why=str(fault),
                fix="use only roles and contents that the template supports",
            ) from fault
        return text

    def chat_ids(self, text: str) -> list[int]:
        return self._encode("the conversation", text, add_special_tokens=False)  # the template wrote the special tokens

    def _encode(self, name: str, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text(name, text, PromptError)
        with reading(f"the tokenizer cannot read {name}", "correct the files of the tokenizer", PromptError):
            assert self.tokenizer is not None
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _within(self, ids: list[int], name: str) -> list[int]:
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise PromptError(f"the {name} contains id {outside}, but the vocabulary is 0..{self.vocab_size - 1}")
        return ids

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the checked parameters; bad words that are text become token ids."""
        if not isinstance(params, SamplingParams):
            raise not_params(params)
        if (params.stop or any(isinstance(w, str) for w in params.bad_words)) and self.tokenizer is None:
            raise ParameterError("stop or bad_words is text, but the target has no tokenizer", fix="give token ids")
        if self.tokenizer is not None and any(isinstance(word, str) for word in params.bad_words):
            words: list[Seq[int]] = []
            for word in params.bad_words:
                if isinstance(word, str):
                    words += [self.tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word)]
                else:
                    words.append(list(word))
            params = replace(params, bad_words=tuple(words))
        self.in_vocabulary(params)
        return params

    def in_vocabulary(self, params: SamplingParams) -> None:
        """Raise ParameterError for ids that the target does not have. Needs no tokenizer."""
        self._check_ids(params.token_ids)
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise ParameterError(f"logprobs is {params.logprobs}, but the vocabulary has {self.vocab_size} ids")

    def beams(self, params: BeamParams) -> BeamParams:
        if not isinstance(params, BeamParams):
            raise not_params(params, "BeamParams")
        self._check_ids(params.stop_token_ids)
        return params

    def _check_ids(self, ids: Seq[int]) -> None:
        outside = next((token for token in ids if token >= self.vocab_size), None)
        if outside is not None:
            raise ParameterError(f"a parameter contains id {outside}, but the vocabulary is 0..{self.vocab_size - 1}")


def read_prediction(field: object) -> str:
    """Return the text of OpenAI's field `prediction`, {"type": "content", "content": a text, or a list of text parts};
    "" if the field is None. Raises PromptError for any other value."""
    if field is None:
        return ""
    content = field.get("content") if isinstance(field, Mapping) and field.get("type") == "content" else None
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    unknown = field.keys() - {"type", "content"} if isinstance(field, Mapping) and content is not None else set[str]()
    if unknown or len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        accepted = '{"type": "content", "content": a text or a list of text parts}'
        raise PromptError(f"prediction is {field!r:.60}, in an unknown form", fix=f"write {accepted}")
    text = "".join(map(str, texts))
    if len(text) > MOST_PREDICTED:
        raise PromptError(f"prediction has {len(text):,} characters, but at most {MOST_PREDICTED:,} are allowed")
    return text


def _turns(messages: object) -> list[Message]:
    """Return the messages of a conversation. Raises PromptError if `messages` is not a conversation."""
    fix = 'write [{"role": "user", "content": "..."}, ...]'
    turns = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, (bytes, Mapping)) else []
    if not turns:
        raise PromptError(f"the conversation is {messages!r:.60}, but must be a list of messages", fix=fix)
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise PromptError(f"message {i} of the conversation is {turn!r:.60}, but must be a mapping", fix=fix)
        if not isinstance(turn.get("role"), str):
            raise PromptError(f"message {i} of the conversation has no role: {dict(turn)!r:.60}", fix=fix)
    return turns


def takes_params(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method refuse unknown arguments; for the names of other programs, the error says what to write instead."""
    known = inspect.signature(method).parameters

    @wraps(method)
    def call(*given: P.args, **named: P.kwargs) -> T:
        for name in named.keys() - known.keys():
            meant = {"max_new_tokens": "max_tokens", "sampling_params": "params"}.get(name) or OTHER_NAMES.get(
                name, name
            )
            fix = f"write {meant!r} instead" if meant in known else did_you_mean(name, known)
            if meant in SamplingParams.__dataclass_fields__:
                fix = f"write params=SamplingParams({meant}={named[name]!r})"
            elif name == "stream":
                fix = "write: for chunk in llm.stream(prompt, params)"
            raise ParameterError(f"{method.__name__} has no parameter {name!r}", fix=fix)
        return method(*given, **named)

    return call


def not_params(given: object, wanted: str = "SamplingParams") -> ParameterError:
    named = ", ".join(f"{name}=..." for name in given) if isinstance(given, Mapping) else "..."
    return ParameterError(
        f"params is a {type(given).__name__}, not a {wanted}: {given!r}",
        fix=f"write {wanted}({named})",
    )


def _token_ids(prompt: object) -> list[int]:
    """Return the ids of a prompt that is not text. Raises PromptError for anything but integers."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)):
        torch = sys.modules.get("torch")  # imported if the prompt is a tensor
        arrays = np.ndarray if torch is None else (np.ndarray, torch.Tensor)
        given = prompt.tolist() if isinstance(prompt, arrays) else list(prompt)
        if all(type(each) is int for each in given):  # fast path: the check below takes microseconds per token
            return given
        wrong = (each for each in given if isinstance(each, bool) or not isinstance(each, SupportsIndex))
        if (first := next(wrong, wrong)) is wrong:
            return [index(each) for each in given]
        what = f"a prompt contains {first!r:.60}, which is not a token id"
    else:
        what = f"a prompt is {prompt!r}"
    raise PromptError(what, why="a prompt is text, or a sequence of integer token ids", fix="give one of these")
