"""`RequestChecks`: prompts and parameters of requests, checked against one model before anything runs. Does not import
torch: the process that answers HTTP checks requests, too."""

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
"""Characters of a prediction at a server: what a suffix tree remembers of a request (131,072 tokens) is rarely more."""

Prompt = str | Seq[int]
Message = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class RequestChecks:
    """Raises ParameterError or PromptError for what the model cannot do. It needs no weights.

    tokenizer   None: prompts are token ids.
    vocab_size  width V of the target's logits.
    context     most tokens that a sequence may hold.
    encoder     of an encoder-decoder, to which prompts are sources.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, context: int, encoder: Encoder | None = None):
        self.tokenizer, self.vocab_size, self.context, self.encoder = tokenizer, vocab_size, context, encoder

    def prompt(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt: at least one, none outside the vocabulary, fewer than the context holds."""
        ids = self._prompt_ids(prompt)
        if len(ids) > self.longest and self.encoder is not None:
            raise PromptError(
                f"the source has {len(ids)} tokens, the context of the target's encoder holds {self.longest}",
                fix=f"shorten it to {self.longest} tokens",
            )
        if len(ids) > self.longest:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the target's context holds {self.context}",
                why="at least one position must be left for the answer",
                fix=f"shorten it to {self.longest} tokens",
            )
        return ids

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError(
                    "a text prompt needs a tokenizer",
                    why="the target brings none",
                    fix="pass token ids or LLM(..., tokenizer=...), or put tokenizer.json next to the weights",
                )
            ids = self._encode("the prompt", prompt) if prompt else []
        else:
            ids = _token_ids(prompt)
        if not ids:
            raise PromptError("the prompt is empty", why="a model needs at least one token to continue or to answer")
        return self._within(ids, "prompt")

    @property
    def longest(self) -> int:
        return self.context - 1 if self.encoder is None else self.encoder.context

    def before(self, prompt: Seq[int]) -> Seq[int]:
        """The tokens that an output follows."""
        return prompt if self.encoder is None else self.encoder.start

    def room(self, prompt: int) -> int:
        """Return the most output tokens after a prompt of `prompt` tokens."""
        return self.context - (prompt if self.encoder is None else len(self.encoder.start))

    def prediction(self, text: Prompt, name: str = "prediction") -> list[int]:
        """The token ids of what an output is expected to be; it may be longer than the context."""
        if not isinstance(text, str):
            return self._within(_token_ids(text), name)
        if self.tokenizer is None:
            raise PromptError(f"a {name} as text needs a tokenizer", fix="give token ids")
        return self._encode(f"the {name}", text, add_special_tokens=False)

    def chat_text(self, messages: str | Seq[Message], **names: object) -> str:
        """Apply the chat template to a conversation. names: other variables that it reads, such as `tools`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        turns = _turns(messages)
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise PromptError(
                "this target has no chat template", fix="give a plain prompt to generate (without --chat)"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **names)
        except Exception as fault:  # a template is code of the checkpoint
            raise PromptError(
                "the model's chat template refuses this conversation",
                why=str(fault),
                fix="use the roles and contents that it knows",
            ) from fault
        return text

    def chat_ids(self, text: str) -> list[int]:
        return self._encode("the conversation", text, add_special_tokens=False)  # the template writes them itself

    def _encode(self, name: str, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text(name, text, PromptError)
        with reading(f"the tokenizer cannot read {name}", "correct the files of the tokenizer", PromptError):
            assert self.tokenizer is not None
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _within(self, ids: list[int], name: str) -> list[int]:
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise PromptError(f"the {name} holds id {outside}, the vocabulary is 0..{self.vocab_size - 1}")
        return ids

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same, with bad words that were given as text encoded."""
        if not isinstance(params, SamplingParams):
            raise not_params(params)
        if (params.stop or any(isinstance(w, str) for w in params.bad_words)) and self.tokenizer is None:
            raise ParameterError("stop strings and bad words as text need a tokenizer", fix="give token ids")
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
            raise ParameterError(f"logprobs is {params.logprobs}, the vocabulary has {self.vocab_size} ids")

    def beams(self, params: BeamParams) -> BeamParams:
        if not isinstance(params, BeamParams):
            raise not_params(params, "BeamParams")
        self._check_ids(params.stop_token_ids)
        return params

    def _check_ids(self, ids: Seq[int]) -> None:
        outside = next((token for token in ids if token >= self.vocab_size), None)
        if outside is not None:
            raise ParameterError(f"a parameter names id {outside}, the vocabulary is 0..{self.vocab_size - 1}")


def read_prediction(field: object) -> str:
    """The text of OpenAI's field `prediction`: {"type": "content", "content": a text, or a list of text parts}; "" for
    None. Raises PromptError for any other value."""
    if field is None:
        return ""
    content = field.get("content") if isinstance(field, Mapping) and field.get("type") == "content" else None
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    unknown = field.keys() - {"type", "content"} if isinstance(field, Mapping) and content is not None else set[str]()
    if unknown or len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        accepted = '{"type": "content", "content": a text or a list of text parts}'
        raise PromptError(f"prediction is {field!r:.60}", fix=f"write {accepted}")
    text = "".join(map(str, texts))
    if len(text) > MOST_PREDICTED:
        raise PromptError(f"prediction has {len(text):,} characters, at most {MOST_PREDICTED:,} are copied from")
    return text


def _turns(messages: object) -> list[Message]:
    """The messages of a conversation. Raises PromptError for what is none."""
    fix = 'write [{"role": "user", "content": "..."}, ...]'
    turns = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, (bytes, Mapping)) else []
    if not turns:
        raise PromptError(f"the conversation is {messages!r:.60}, must be a list of messages", fix=fix)
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise PromptError(f"message {i} of the conversation is {turn!r:.60}", fix=fix)
        if not isinstance(turn.get("role"), str):
            raise PromptError(f"message {i} of the conversation has no role: {dict(turn)!r:.60}", fix=fix)
    return turns


def takes_params(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method refuse arguments that other programs have, with what to write instead."""
    known = inspect.signature(method).parameters

    @wraps(method)
    def call(*given: P.args, **named: P.kwargs) -> T:
        for name in named.keys() - known.keys():
            meant = {"max_new_tokens": "max_tokens", "sampling_params": "params"}.get(name) or OTHER_NAMES.get(
                name, name
            )
            fix = f"write it as {meant!r}" if meant in known else did_you_mean(name, known)
            if meant in SamplingParams.__dataclass_fields__:
                fix = f"write params=SamplingParams({meant}={named[name]!r})"
            elif name == "stream":
                fix = "write for chunk in llm.stream(prompt, params)"
            raise ParameterError(f"{method.__name__} has no parameter {name!r}", fix=fix)
        return method(*given, **named)

    return call


def not_params(given: object, wanted: str = "SamplingParams") -> ParameterError:
    named = ", ".join(f"{name}=..." for name in given) if isinstance(given, Mapping) else "..."
    return ParameterError(f"the parameters are a {type(given).__name__}: {given!r}", fix=f"write {wanted}({named})")


def _token_ids(prompt: object) -> list[int]:
    """The ids in a prompt that is not text. Raises PromptError for anything else."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)):
        torch = sys.modules.get("torch")  # who has a tensor has imported it
        arrays = np.ndarray if torch is None else (np.ndarray, torch.Tensor)
        given = prompt.tolist() if isinstance(prompt, arrays) else list(prompt)
        if all(type(each) is int for each in given):  # a check of the protocol takes microseconds per token
            return given
        wrong = (each for each in given if isinstance(each, bool) or not isinstance(each, SupportsIndex))
        if (first := next(wrong, wrong)) is wrong:
            return [index(each) for each in given]
        what = f"a prompt holds {first!r:.60}, which is not a token id"
    else:
        what = f"a prompt is {prompt!r}"
    raise PromptError(what, why="a prompt is text, or a sequence of integer token ids", fix="encode it first")
