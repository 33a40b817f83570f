"""`Service`: the objects that the endpoints share: facts about the model, tokenizer, the engine's streams, limits."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time

from slipstream.core.encoder import Encoder
from slipstream.engine.messages import Streams
from slipstream.engine.request_checks import RequestChecks
from slipstream.errors import PromptError
from slipstream.server.api_error import ApiError
from slipstream.server.reply_format import ReplyFormat
from slipstream.server.server_metrics import PREFIX, ServerMetrics
from slipstream.tokens.text import TextStream, decoder_keeping, decoder_of, stray_byte, token_text_of
from slipstream.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineFacts:
    """Describes the model to a process that has no weights.

    vocab_size, context  see `Target`. max_batch, draft_tokens: see `LLM`.
    drafter, rule        names of the drafter and of the verification rule.
    backend, weights     name of the backend, format of the weights; empty if the target does not give them.
    encoder              see `Capabilities`.
    kv_blocks            (tokens in a block of the KV cache, number of blocks); see `engine_thread.kv_blocks`.
    sampling             the model's defaults for fields of `SamplingParams` that a request does not set.
    """

    vocab_size: int
    context: int
    max_batch: int
    drafter: str
    rule: str
    draft_tokens: int
    backend: str = ""
    weights: str = ""
    encoder: Encoder | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    kv_blocks: tuple[int, int] | None = None


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    body                largest body of a request, in bytes.
    waiting             number of choices that may wait, besides `max_batch` running ones; more are refused with 429.
    per_key             number of choices of one API key that may wait or run; 0: no limit.
    choices             number of choices (prompts times n) that one request may have.
    first_token_seconds, total_seconds  longest time from a request's arrival to its first and its last token.
    send_seconds        longest time to send one piece of a stream; after it the request is aborted.
    """

    body: int = 8 << 20
    waiting: int = 256
    per_key: int = 0
    choices: int = 128
    first_token_seconds: float = 120.0
    total_seconds: float = 1800.0
    send_seconds: float = 30.0


class Service:
    """The objects that the endpoints share. name: the model's name in requests; keys: API keys (if there are any, a
    request must give one of them); replies: how the model writes reasoning and calls, by default found from the
    tokenizer; metrics_prefix: as in `ServerMetrics`."""

    def __init__(
        self,
        name: str,
        facts: EngineFacts,
        tokenizer: Tokenizer,
        streams: Streams,
        limits: Limits | None = None,
        keys: tuple[str, ...] = (),
        replies: ReplyFormat | None = None,
        metrics_prefix: str = PREFIX,
    ):
        self.name, self.facts, self.tokenizer, self.streams = name, facts, tokenizer, streams
        self.limits, self.keys = limits or Limits(), keys
        self.replies = replies or ReplyFormat.of(tokenizer)
        self.checks = RequestChecks(tokenizer, facts.vocab_size, facts.context, facts.encoder)
        self.started = self.now()
        self.draining = False
        """True if the server is about to stop and takes no more requests."""
        self.admitted = 0
        """Number of choices that wait or run."""
        self.admitted_of: Counter[bytes] = Counter()
        """API key -> number of choices that wait or run."""
        self.metrics = ServerMetrics(name, metrics_prefix, facts.kv_blocks)
        streams.on_report = self.metrics.take_report
        self._stray = stray_byte(tokenizer)
        self.text = decoder_of(tokenizer)
        """Function that turns ids into text, without special tokens."""
        self.token_text = token_text_of(tokenizer)
        """Function that returns the text of one token."""
        self._marked = decoder_keeping(tokenizer, self.replies.markers) if self.replies.markers else self.text

    @staticmethod
    def now() -> int:
        return int(time())

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for another model's name."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has only {self.name!r}. "
                "A LoRA adapter is merged when the server starts (--lora)",
                param="model",
                code="model_not_found",
            )

    def check_up(self) -> None:
        """Raise ApiError 503 unless requests can run."""
        if self.streams.dead is not None:
            raise ApiError(503, str(self.streams.dead), code="engine_unavailable", retry_after=10)
        if self.draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=10)

    @contextmanager
    def admit(self, choices: int, key: bytes = b"") -> Iterator[None]:
        """Reserve places in the queue for a number of choices. Raises ApiError 429 if the queue is full or the API key
        has too many choices, 503 if requests cannot run."""
        self.check_up()
        room, most = self.facts.max_batch + self.limits.waiting, self.limits.per_key
        full = code = ""
        if self.admitted + choices > room:
            full, code = (f"the queue is full: {self.admitted} of at most {room} choices", "queue_full")
        elif most and self.admitted_of[key] + choices > most:
            full, code = (f"this API key has {self.admitted_of[key]} of at most {most} choices", "key_limit")
        if full:
            self.metrics.refused.inc()
            raise ApiError(429, f"{full}, and this request needs {choices}; retry later", code=code)
        self.admitted += choices
        self.admitted_of[key] += choices
        try:
            yield
        finally:
            self.admitted -= choices
            self.admitted_of[key] -= choices

    def describe_prompt_error(self, fault: PromptError, field: str) -> ApiError:
        code = "context_length_exceeded" if "context" in fault.what else "invalid_prompt"
        return ApiError(400, str(fault), field, code)

    def text_stream(self, stop: tuple[str, ...], prompt: Seq[int] = (), marked: bool = False) -> TextStream:
        """Make the stream that turns the tokens of one choice into text. prompt: ids of the prompt; marked: True to
        keep the special tokens in `ReplyFormat.markers`."""
        return TextStream(self._marked if marked else self.text, stop, self._stray, self.checks.before(prompt))
