"""`LoadPrompts`: prompts as requests to a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from time import time_ns
from typing import Any

from slipstream.bench.load_client import CHAT, COMPLETIONS, Request
from slipstream.bench.prompts import Entry
from slipstream.bench.provenance import text_digest

NO_EFFECT: Mapping[str, Any] = {"top_k": 0, "top_p": 1.0, "ignore_eos": False}
"""Values that change nothing. They are not sent, because not every server knows these fields."""


@dataclass(frozen=True)
class LoadPrompts:
    """entries   prompts; a request for an answer goes to /chat/completions, text to continue to /completions, unless
              `template` ("chat", "raw") says otherwise. They are asked in turn, from a new one on in each pass.
    tokens    most new tokens.
    sampling  temperature, top_k, top_p, ignore_eos. Each request has a seed of its own if the temperature is above 0.
    distinct  whether each prompt begins with a line of its own, so that no prefix cache has it.
    """

    entries: Seq[Entry]
    tokens: int
    sampling: Mapping[str, Any]
    seed: int = 0
    template: str = "auto"
    distinct: bool = False
    _made: Iterator[int] = field(default_factory=lambda: count(time_ns()), init=False, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """For the result file."""
        texts = text_digest(*(entry.text for entry in self.entries))
        names = ("tokens", "sampling", "template", "distinct")
        return {"prompts": texts} | {name: getattr(self, name) for name in names}

    def request(self, number: int, i: int) -> Request:
        """The i-th request of a pass."""
        entry = self.entries[(i + number + 1) % len(self.entries)]
        text = f"# {next(self._made)}\n{entry.text}" if self.distinct else entry.text
        sampling = {name: value for name, value in self.sampling.items() if NO_EFFECT.get(name) != value}
        body: dict[str, Any] = {"max_tokens": self.tokens, **sampling}
        if sampling["temperature"] > 0:
            body["seed"] = (self.seed + number + 1) * 100_003 + i
        if self.template == "chat" or (self.template == "auto" and entry.request):
            return Request(CHAT, body | {"messages": [{"role": "user", "content": text}]})
        return Request(COMPLETIONS, body | {"prompt": text})
