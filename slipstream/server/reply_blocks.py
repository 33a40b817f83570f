"""`Blocks`: a reply as a list of blocks, each of one kind: what the other forms of chats answer with.

`Script` writes such a reply, whole or as events; one for each form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.server.api_error import ApiError
from slipstream.server.generation import Generation, Part
from slipstream.server.reply import ARGUMENTS, CALL, Call, Delta

Event = tuple[str, dict[str, Any]]
"""(name, data)."""


@dataclass
class Block:
    """index: among the blocks; kind: "reasoning", "content" or "call"; text: what it holds, of a call the arguments."""

    index: int
    kind: str
    call: Call | None = None
    text: str = ""


class Script(ABC):
    """Writes one reply."""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def add(self, part: Part) -> Iterator[Event]:
        """The events of a part."""
        calls = part.choice.reply.calls
        for delta in part.deltas:
            if delta.kind == CALL:
                yield from self._close()
                yield from self._begin(Block(len(self.blocks), CALL, calls[delta.index]))
            elif delta.kind != ARGUMENTS and (self._open is None or self._open.kind != delta.kind):
                yield from self._close()
                yield from self._begin(Block(len(self.blocks), delta.kind))
            yield from self._write(delta)
        if part.finish is not None:
            yield from self._close()

    def _begin(self, block: Block) -> Iterable[Event]:
        self._open = block
        self.blocks.append(block)
        return self.opened(block)

    def _write(self, delta: Delta) -> Iterable[Event]:
        if delta.kind == CALL or self._open is None:
            return ()
        self._open.text += delta.text
        return self.written(self._open, delta.text)

    def _close(self) -> Iterable[Event]:
        block, self._open = self._open, None
        return () if block is None else self.closed(block)

    @abstractmethod
    def begun(self) -> Iterable[Event]:
        """The events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> Iterable[Event]:
        """The events at the beginning of a block."""

    @abstractmethod
    def written(self, block: Block, text: str) -> Iterable[Event]:
        """The events of more of a block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterable[Event]:
        """The events at the end of a block."""

    @abstractmethod
    def ended(self) -> Iterable[Event]:
        """The events after the last block."""

    @abstractmethod
    def failed(self, fault: ApiError) -> Iterable[Event]:
        """The events of an error within a stream."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer, when all parts were added."""
