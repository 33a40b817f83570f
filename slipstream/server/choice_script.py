"""`ChoiceScript`: answers with a list of choices, as both kinds of OpenAI's completions are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

from slipstream.server.api_error import ApiError
from slipstream.server.event_stream import DONE
from slipstream.server.fields import flag, members
from slipstream.server.generation import Choice, Generation, Part
from slipstream.server.script import Event, Object, Script, stop_text


class ChoiceScript(Script):
    """given: the fields of the request. chunk_name, name: the values of `object`; prefix: of ids."""

    name = chunk_name = prefix = ""
    done = DONE

    def __init__(self, generation: Generation, given: Mapping[str, Any]):
        super().__init__(generation)
        service = generation.service
        self._head = {"id": f"{self.prefix}-{uuid4().hex}", "created": service.now(), "model": service.name}
        self._statistics = flag(given, "statistics")
        options = members(given, "stream_options", ("include_usage", "continuous_usage_stats"))
        self._usage = flag(options, "include_usage")
        self._continuous = flag(options, "continuous_usage_stats") and self._usage

    @abstractmethod
    def choice(self, choice: Choice) -> Object:
        """A choice of a whole answer."""

    @abstractmethod
    def first(self, choice: Choice) -> Object | None:
        """What comes before the first part of a choice in a stream, if anything does."""

    @abstractmethod
    def part(self, part: Part) -> Object:
        """A part of a choice in a stream."""

    def common(self, choice: Choice, logprobs: Object | None, finish: str | None) -> Object:
        """What a choice, or a part of one, has at both endpoints."""
        stop = stop_text(choice, finish)
        return {"index": choice.index, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    def hear(self, part: Part) -> None:
        """Nothing: the choices themselves hold what a whole answer needs."""

    def begun(self) -> Iterator[Event]:
        for choice in self.generation.choices:
            if (before := self.first(choice)) is not None:
                yield self._chunk([before])

    def added(self, part: Part) -> Iterator[Event]:
        if part.text or part.deltas or part.logprobs or part.finish or (self._statistics and part.tokens):
            written = self.part(part)
            if self._statistics:
                written["tokens"] = [{"text": text, "drafter": drafter} for text, drafter in part.tokens]
            if part.finish is not None:
                written |= self._of_choice(part.choice)
            yield self._chunk([written])

    def ended(self) -> Iterator[Event]:
        if self._usage:
            yield self._chunk([], last=True)

    def failed(self, fault: ApiError) -> Iterator[Event]:
        yield "", fault.body

    def whole(self) -> Object:
        choices = [self.choice(choice) | self._of_choice(choice) for choice in self.generation.choices]
        return self._head | {"object": self.name, "choices": choices, "usage": self.generation.usage} | self._metrics()

    def _chunk(self, choices: list[Object], last: bool = False) -> Event:
        body = self._head | {"object": self.chunk_name, "choices": choices}
        if self._usage:
            body["usage"] = self.generation.usage if last or self._continuous else None
        return "", body | (self._metrics() if last else {})

    def _of_choice(self, choice: Choice) -> Object:
        """The statistics of a choice that has ended, if they were asked for."""
        if not self._statistics or choice.stats is None:
            return {}
        more = {
            "drafted_by": choice.proposers,
            "others": choice.others,
            "decode_tokens": choice.decode_tokens,
            "decode_seconds": choice.decode_seconds,
        }
        return {"statistics": choice.stats.as_dict() | more}

    def _metrics(self) -> Object:
        """What vLLM answers under --per-request-spec-decode-metrics summary, of a request that has one choice."""
        first, *more = self.generation.choices
        facts, stats = self.generation.service.facts, first.stats
        if not self._statistics or more or stats is None or not facts.draft_tokens:
            return {}
        most, steps = max(facts.draft_tokens, *stats.histogram), stats.steps - stats.undrafted
        found = {
            "mean_acceptance_length": 1 + stats.accepted / max(1, steps),
            "draft_acceptance_rate": stats.acceptance_rate or 0.0,
            "acceptance_histogram": [stats.histogram[i] - (0 if i else stats.undrafted) for i in range(most + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.proposed,
            "num_spec_tokens": most,
        }
        return {"metrics": {"speculative_decoding": found}}
