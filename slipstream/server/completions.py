"""`/v1/completions` and `/v1/chat/completions`: answers with a list of choices."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence as Seq
from functools import cached_property
from itertools import accumulate
from uuid import uuid4

from slipstream.core.stats import TokenLogprob
from slipstream.core.strict import JsonObject
from slipstream.errors import PromptError
from slipstream.server.api_error import ApiError
from slipstream.server.chat_requests import start_chat
from slipstream.server.fields import COMPLETIONS, read_count, read_flag, read_members, read_sampling_params
from slipstream.server.generation import Choice, Generation, Part, make_generation
from slipstream.server.reply import ARGUMENTS, CALL, CONTENT, REASONING
from slipstream.server.response_writer import DONE, Event, ResponseWriter, stop_text
from slipstream.server.service import Service
from slipstream.tokens.token_texts import part_of_character

LENGTHS = ("max_tokens", "max_completion_tokens")


class ChoicesWriter(ResponseWriter):
    """Writes an answer with a list of choices. given: fields of the request. name, chunk_name: value of `object` in an
    answer and in a chunk of a stream; prefix: first part of the ids."""

    name = chunk_name = prefix = ""
    done = DONE

    def __init__(self, generation: Generation, given: JsonObject):
        super().__init__(generation)
        service = generation.service
        self._head = {"id": f"{self.prefix}-{uuid4().hex}", "created": service.now(), "model": service.name}
        self._statistics = read_flag(given, "statistics")
        options = read_members(given, "stream_options", ("include_usage", "continuous_usage_stats"))
        self._usage = read_flag(options, "include_usage")
        self._continuous = read_flag(options, "continuous_usage_stats") and self._usage

    @abstractmethod
    def write_choice(self, choice: Choice) -> JsonObject:
        """Write a choice of an answer that is not streamed."""

    @abstractmethod
    def write_first(self, choice: Choice) -> JsonObject | None:
        """Write the event before the first part of a choice in a stream, if there is one."""

    @abstractmethod
    def write_delta(self, part: Part) -> JsonObject:
        """Write a part of a choice in a stream."""

    def write_common(self, choice: Choice, logprobs: JsonObject | None, finish: str | None) -> JsonObject:
        """Write the fields that choices, and parts of choices, have at both endpoints."""
        stop = stop_text(choice, finish)
        return {"index": choice.index, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    def take(self, part: Part) -> None:
        """Do nothing with a part: `write_whole` reads the choices."""

    def write_start(self) -> Iterator[Event]:
        for choice in self.generation.choices:
            if (before := self.write_first(choice)) is not None:
                yield self._make_chunk([before])

    def write_part(self, part: Part) -> Iterator[Event]:
        if part.text or part.deltas or part.logprobs or part.finish or (self._statistics and part.tokens):
            written = self.write_delta(part)
            if self._statistics:
                written["tokens"] = [{"text": text, "drafter": drafter} for text, drafter in part.tokens]
            if part.finish is not None:
                written |= self._write_statistics(part.choice)
            yield self._make_chunk([written])

    def write_end(self) -> Iterator[Event]:
        if self._usage:
            yield self._make_chunk([], last=True)

    def write_error(self, fault: ApiError) -> Iterator[Event]:
        yield "", fault.body

    def write_whole(self) -> JsonObject:
        choices = [self.write_choice(choice) | self._write_statistics(choice) for choice in self.generation.choices]
        return self._head | {"object": self.name, "choices": choices, "usage": self.generation.usage}

    def _make_chunk(self, choices: list[JsonObject], last: bool = False) -> Event:
        body = self._head | {"object": self.chunk_name, "choices": choices}
        if self._usage:
            body["usage"] = self.generation.usage if last or self._continuous else None
        return "", body

    def _write_statistics(self, choice: Choice) -> JsonObject:
        if not self._statistics or choice.stats is None:
            return {}
        more = {"drafted_by": choice.proposers, "others": choice.concurrent}
        more |= {name: getattr(choice, name) for name in ("decode_tokens", "decode_seconds")}
        return {"statistics": choice.stats.as_dict() | more}


class CompletionsWriter(ChoicesWriter):
    """Writes the answer of /v1/completions. echo: texts of the prompts, written before their choices; or empty."""

    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def __init__(self, generation: Generation, given: JsonObject, echo: list[str]):
        super().__init__(generation, given)
        self.echo = echo

    def write_choice(self, choice: Choice) -> JsonObject:
        before = self._find_echo(choice)
        logprobs = self._write_logprobs(choice.logprobs, choice.pieces, len(before))
        if self.echo and logprobs is not None:
            of_prompt = self._of_prompts[choice.prompt]
            logprobs = {name: of_prompt[name] + each for name, each in logprobs.items()}
        return self.write_common(choice, logprobs, choice.finish) | {"text": before + choice.text}

    def write_first(self, choice: Choice) -> JsonObject | None:
        if not self.echo:
            return None
        logprobs = None if self.generation.params.logprobs is None else self._of_prompts[choice.prompt]
        return self.write_common(choice, logprobs, None) | {"text": self.echo[choice.prompt]}

    def write_delta(self, part: Part) -> JsonObject:
        offset = len(self._find_echo(part.choice)) + part.offset
        logprobs = self._write_logprobs(part.logprobs, [text for text, _ in part.tokens], offset)
        return self.write_common(part.choice, logprobs, part.finish) | {"text": part.text}

    def _find_echo(self, choice: Choice) -> str:
        return self.echo[choice.prompt] if self.echo else ""

    def _write_logprobs(self, scores: list[TokenLogprob], pieces: Seq[str], offset: int) -> JsonObject | None:
        """Write log-probabilities. pieces: the text that each token added; if several tokens write one character, the
        last token adds it. offset: position in the text of the first piece."""
        if self.generation.params.logprobs is None:
            return None
        text = self.generation.service.token_text
        return {
            "tokens": [text(each.id) for each in scores],
            "token_logprobs": [each.logprob for each in scores],
            "top_logprobs": [{text(token): logprob for token, logprob in each.top} for each in scores],
            "text_offset": [offset + length for length in accumulate(map(len, pieces), initial=0)][:-1],
        }

    @cached_property
    def _of_prompts(self) -> list[JsonObject]:
        """Log-probabilities of the tokens of each prompt. The first token has none."""
        assert self.generation.scores is not None
        return [
            self._write_prompt_logprobs(*each)
            for each in zip(self.generation.prompts, self.generation.scores, strict=True)
        ]

    def _write_prompt_logprobs(self, prompt: list[int], scores: list[TokenLogprob]) -> JsonObject:
        service = self.generation.service
        added = service.text_stream(()).add(prompt, [False] * len(prompt), last=True)
        pieces = [piece.text for piece in added]
        logprobs = self._write_logprobs(scores, pieces[1:], len(pieces[0]))
        assert logprobs is not None
        first = service.token_text(prompt[0])
        before = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        return {name: before[name] + each for name, each in logprobs.items()}


def prepare_completion(service: Service, given: JsonObject) -> ResponseWriter:
    prompts = _read_prompts(service, given.get("prompt"))
    n = read_count(given, "n", 1, service.limits.choices, 1)
    if n * len(prompts) > service.limits.choices:
        raise ApiError(400, f"{len(prompts)} prompts times n={n} are more than {service.limits.choices} choices", "n")
    echo = read_flag(given, "echo")
    if echo and service.facts.encoder is not None:
        raise ApiError(400, "echo is not supported: the text of an encoder-decoder has no prompt in it", "echo")
    nothing = any(type(given.get(name)) is int and given[name] == 0 for name in LENGTHS)
    if nothing:  # OpenAI's specification allows a length of 0
        given = {name: value for name, value in given.items() if name not in LENGTHS}
    room = service.checks.room(max(map(len, prompts)))
    params = service.checks.params(read_sampling_params(given, COMPLETIONS, room, service.facts.sampling))
    scored = echo and params.logprobs is not None
    generation = make_generation(service, prompts, params, n, given, scored=scored)
    for choice in generation.choices if nothing else ():
        choice.finish = "length"
    return CompletionsWriter(generation, given, [service.text(prompt) for prompt in prompts] if echo else [])


def _read_prompts(service: Service, prompt: object) -> list[list[int]]:
    """Return the ids of each prompt. prompt: text, ids, or a list of texts or of lists of ids. Raises ApiError 400."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], (str, list))):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, f"prompt is {prompt!r}, must be text, token ids, or a list of these, not empty", "prompt")
    if len(prompt) > service.limits.choices:
        raise ApiError(400, f"prompt has {len(prompt)} prompts, more than {service.limits.choices}", "prompt")
    try:
        return [service.checks.prompt(each) for each in prompt]
    except PromptError as fault:
        raise service.describe_prompt_error(fault, "prompt") from fault


class ChatWriter(ChoicesWriter):
    """Writes the answer of /v1/chat/completions: messages, or deltas in a stream."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def write_choice(self, choice: Choice) -> JsonObject:
        reply = choice.reply
        message: JsonObject = {"role": "assistant", "content": reply.content or None, "refusal": None}
        if not (reply.calls or reply.reasoning):
            message["content"] = reply.content
        if reply.reasoning:
            message |= _write_reasoning(reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
        return self._write_chat_common(choice, choice.logprobs, choice.finish) | {"message": message}

    def write_first(self, choice: Choice) -> JsonObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def write_delta(self, part: Part) -> JsonObject:
        delta: JsonObject = {}
        calls: dict[int, JsonObject] = {}
        for each in part.deltas:
            if each.kind == CONTENT:
                delta["content"] = delta.get("content", "") + each.text
            elif each.kind == REASONING:
                delta |= _write_reasoning(each.text)
            elif each.kind == CALL:
                call = {"id": part.choice.reply.calls[each.index].id, "type": "function"}
                calls[each.index] = {"index": each.index, **call, "function": {"name": each.text, "arguments": ""}}
            elif each.kind == ARGUMENTS:
                calls.setdefault(each.index, {"index": each.index, "function": {"arguments": ""}})
                calls[each.index]["function"]["arguments"] += each.text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return self._write_chat_common(part.choice, part.logprobs, part.finish) | {"delta": delta}

    def _write_chat_common(self, choice: Choice, logprobs: list[TokenLogprob], finish: str | None) -> JsonObject:
        written = self.write_common(choice, self._write_logprobs(logprobs), finish)
        return written | ({"finish_reason": "tool_calls"} if finish == "stop" and choice.reply.calls else {})

    def _write_logprobs(self, scores: list[TokenLogprob]) -> JsonObject | None:
        if self.generation.params.logprobs is None:
            return None

        def write_token(token_id: int, logprob: float) -> JsonObject:
            service = self.generation.service
            text = service.token_text(token_id)
            part = part_of_character(service.tokenizer, token_id) if "\ufffd" in text else text.encode()
            return {"token": text, "logprob": logprob, "bytes": None if part is None else list(part)}

        content = [
            write_token(each.id, each.logprob) | {"top_logprobs": [write_token(*top) for top in each.top]}
            for each in scores
        ]
        return {"content": content, "refusal": None}


def _write_reasoning(text: str) -> JsonObject:
    return {"reasoning_content": text, "reasoning": text}


def prepare_chat(service: Service, given: JsonObject) -> ResponseWriter:
    return ChatWriter(start_chat(service, given), given)
