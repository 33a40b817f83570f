"""`BlockScript`: answers with a list of blocks, each of one kind, as Responses and Messages are. `chat_endpoint` is the
route of such an endpoint, whose fields are translated to those of a chat."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fastapi import APIRouter

from slipstream.server.api_error import ApiError
from slipstream.server.chat_requests import chat_generation
from slipstream.server.fields import REQUIRED
from slipstream.server.generation import Generation, Part
from slipstream.server.reply import ARGUMENTS, CALL, Call, Delta
from slipstream.server.script import Event, Object, Script, endpoint
from slipstream.server.service import Service


@dataclass
class Block:
    """index: among the blocks; kind: "reasoning", "content" or "call"; text: what it holds, of a call the arguments."""

    index: int
    kind: str
    call: Call | None = None
    text: str = ""


class BlockScript(Script):
    """Sees where blocks begin and end, and asks how that is written."""

    def __init__(self, generation: Generation):
        super().__init__(generation)
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def added(self, part: Part) -> Iterator[Event]:
        calls = part.choice.reply.calls
        for delta in part.deltas:
            if delta.kind == CALL:
                yield from self._begin(Block(len(self.blocks), CALL, calls[delta.index]))
            elif delta.kind != ARGUMENTS and (self._open is None or self._open.kind != delta.kind):
                yield from self._begin(Block(len(self.blocks), delta.kind))
            yield from self._write(delta)
        if part.finish is not None:
            yield from self._close()

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.blocks.append(block)
        yield from self.block_begun(block)

    def _write(self, delta: Delta) -> Iterable[Event]:
        if delta.kind == CALL or self._open is None:
            return ()
        self._open.text += delta.text
        return self.block_written(self._open, delta.text)

    def _close(self) -> Iterable[Event]:
        block, self._open = self._open, None
        return () if block is None else self.block_ended(block)

    @abstractmethod
    def block_begun(self, block: Block) -> Iterable[Event]:
        """The events at the beginning of a block."""

    @abstractmethod
    def block_written(self, block: Block, text: str) -> Iterable[Event]:
        """The events of more of a block."""

    @abstractmethod
    def block_ended(self, block: Block) -> Iterable[Event]:
        """The events at the end of a block."""


def chat_endpoint(
    router: APIRouter,
    service: Service,
    where: str,
    summary: str,
    chat_of: Callable[[Object], Object],
    script: Callable[[Generation, Object], Script],
    names: Mapping[str, str],
) -> None:
    """The route /v1/WHERE.

    chat_of  its fields -> those of a chat. names: field of a chat -> the one that it comes from, for errors.
    """

    async def answered(service: Service, given: Object) -> Script:
        for name in REQUIRED[where]:
            if name not in given:
                raise ApiError(400, f"{name} is missing", name)
        try:
            return script(await chat_generation(service, chat_of(given)), given)
        except ApiError as fault:
            raise renamed(fault, names) from fault

    endpoint(router, service, where, f"/v1/{where}", summary, answered)


def renamed(fault: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with the names of the endpoint's own fields."""
    if fault.param is None or fault.param.split(".")[0].split("[")[0] not in names:
        return fault
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    message, param = (pattern.sub(lambda found: names[found[0]], each) for each in (fault.message, fault.param))
    return ApiError(fault.status, message, param, fault.code)
