"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

from fastapi import APIRouter

from slipstream.core.token_logprob import TokenLogprob
from slipstream.errors import PromptError
from slipstream.server.api_error import ApiError
from slipstream.server.choice_script import ChoiceScript
from slipstream.server.fields import COMPLETIONS, count, flag, sampling_params
from slipstream.server.generation import Choice, Generation, Part, generation_of
from slipstream.server.script import Object, endpoint
from slipstream.server.service import Service

LENGTHS = ("max_tokens", "max_completion_tokens")


class CompletionScript(ChoiceScript):
    """echo: the text of each prompt that comes before its choices; empty without."""

    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def __init__(self, generation: Generation, given: Object, echo: list[str]):
        super().__init__(generation, given)
        self.echo = echo

    def choice(self, choice: Choice) -> Object:
        before = self._before(choice)
        logprobs = self._logprobs(choice.logprobs, choice.pieces, len(before))
        if self.echo and logprobs is not None:
            of_prompt = self._of_prompt(choice)
            logprobs = {name: of_prompt[name] + each for name, each in logprobs.items()}
        return self.common(choice, logprobs, choice.finish) | {"text": before + choice.text}

    def first(self, choice: Choice) -> Object | None:
        if not self.echo:
            return None
        logprobs = None if self.generation.params.logprobs is None else self._of_prompt(choice)
        return self.common(choice, logprobs, None) | {"text": self.echo[choice.prompt]}

    def part(self, part: Part) -> Object:
        offset = len(self._before(part.choice)) + part.offset
        logprobs = self._logprobs(part.logprobs, [text for text, _ in part.tokens], offset)
        return self.common(part.choice, logprobs, part.finish) | {"text": part.text}

    def _before(self, choice: Choice) -> str:
        return self.echo[choice.prompt] if self.echo else ""

    def _logprobs(self, found: list[TokenLogprob], pieces: Seq[str], offset: int) -> Object | None:
        """pieces: the text that each token added; of a character that several write, the last one adds all of it.
        offset: where the first one begins."""
        if self.generation.params.logprobs is None:
            return None
        text = self.generation.service.token_text
        return {
            "tokens": [text(each.id) for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{text(token): logprob for token, logprob in each.top} for each in found],
            "text_offset": [offset + length for length in accumulate(map(len, pieces), initial=0)][:-1],
        }

    def _of_prompt(self, choice: Choice) -> Object:
        """Those of the tokens of a prompt. Before the first one is nothing that says how likely it is."""
        generation = self.generation
        assert generation.scores is not None
        service, prompt = generation.service, generation.prompts[choice.prompt]
        added = service.text_stream(()).add(prompt, [False] * len(prompt), last=True)
        pieces = [piece.text for piece in added]
        found = self._logprobs(generation.scores[choice.prompt], pieces[1:], len(pieces[0]))
        assert found is not None
        first = service.token_text(prompt[0])
        before = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        return {name: before[name] + each for name, each in found.items()}


def completions(service: Service) -> APIRouter:
    """The route."""
    return endpoint(service, COMPLETIONS, "/v1/completions", "Complete a text", _completion)


async def _completion(service: Service, given: Object) -> CompletionScript:
    prompts = await asyncio.to_thread(_prompts, service, given.get("prompt"))
    n = count(given, "n", 1, service.limits.choices, 1)
    if n * len(prompts) > service.limits.choices:
        raise ApiError(400, f"{len(prompts)} prompts times n={n} are more than {service.limits.choices} choices", "n")
    echo = flag(given, "echo")
    if echo and service.facts.encoder is not None:
        raise ApiError(400, "echo: an encoder-decoder answers its prompt, which is no part of the text", "echo")
    nothing = any(type(given.get(name)) is int and given[name] == 0 for name in LENGTHS)
    if nothing:  # the specification allows it
        given = {name: value for name, value in given.items() if name not in LENGTHS}
    room = service.checks.room(max(map(len, prompts)))
    params = service.checked(sampling_params(given, COMPLETIONS, room, service.facts.sampling))
    scored = echo and params.logprobs is not None
    generation = await generation_of(service, prompts, params, n, given, scored=scored)
    if nothing:
        generation.finish_empty()
    return CompletionScript(generation, given, [service.text(prompt) for prompt in prompts] if echo else [])


def _prompts(service: Service, prompt: Any) -> list[list[int]]:
    """The ids of each prompt: text, ids, or a list of either. Raises ApiError 400."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], (str, list))):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, f"prompt is {prompt!r}, must be text, token ids, or a list of these, not empty", "prompt")
    if len(prompt) > service.limits.choices:
        raise ApiError(400, f"prompt holds {len(prompt)} prompts, at most {service.limits.choices}", "prompt")
    try:
        return [service.checks.prompt(each) for each in prompt]
    except PromptError as fault:
        raise service.prompt_error(fault, "prompt") from fault
