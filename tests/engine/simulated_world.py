"""A machine and requests of known costs and survival, to judge draft lengths by the time they would take."""

import itertools
import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from slipstream.engine.draft_lengths import DraftLengths, Step


@dataclass
class World:
    """acceptance: of a draft token, by request; level: seconds of drafting one token for all; row: seconds of a further
    row beyond `free` rows, where a forward of one row takes 1; noise: spread of times, as a share; stride: plain steps
    in one call, each of which takes `saved` less."""

    acceptance: Seq[float]
    level: float
    row: float
    free: int = 1
    noise: float = 0.1
    stride: int = 1
    saved: float = 0.0
    seed: int = 0
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def forward(self, rows: int) -> float:
        return 1 + self.row * max(0, rows - self.free)

    def noisy(self, seconds: float) -> float:
        slow = 3.0 if self.draw.random() < 0.02 else 1.0  # now and then another process has the core
        return seconds * slow * self.draw.uniform(1 - self.noise, 1 + self.noise)

    def accepted(self, b: int, length: int) -> int:
        count = 0
        while count < length and self.draw.random() < self.acceptance[b]:
            count += 1
        return count

    def run(self, choose: Callable[[], Seq[int]], tokens: int, learn: Callable[[Step], None] | None = None) -> float:
        """Tokens per second of all requests together, until they have `tokens` each on average."""
        count, tokens_out, spent = len(self.acceptance), 0, 0.0
        while tokens_out < tokens * count:
            lengths = list(choose())
            if any(lengths):
                accepted = [self.accepted(b, length) for b, length in enumerate(lengths)]
                draft = self.noisy(self.level * max(lengths))
                rest = self.noisy(self.forward(count + sum(lengths)))
                step = Step(range(count), lengths, lengths, accepted, draft, rest)
                tokens_out += count + sum(accepted)
            else:
                rest = self.noisy(self.stride * (self.forward(count) - self.saved))
                step = Step(range(count), lengths, lengths, lengths, 0.0, rest, self.stride)
                tokens_out += count * self.stride
            spent += step.draft + step.rest
            if learn is not None:
                learn(step)
        return tokens_out / spent


@dataclass
class BusyServer:
    """A server on such a machine at which more requests wait than it runs. Each has a prompt, whose rows are read in
    chunks beside the steps of the others, and then `tokens` tokens; the next one takes its place. reading: seconds in
    which the drafter reads a row of a prompt."""

    world: World
    prompt: int
    tokens: int
    chunk: int = 64
    reading: float = 0.0

    def run(
        self,
        choose: Callable[[Seq[int], Seq[int], int], Seq[int]],
        requests: int,
        learn: Callable[[Step], None] | None = None,
        resting: Callable[[], bool] = lambda: False,
        joined: Callable[[], None] = lambda: None,
    ) -> float:
        """Output tokens per second. choose: (ids, most draft tokens, rows of prompts) -> lengths. resting: whether the
        drafter reads no prompts. joined: called when a request begins."""
        world, ended, spent, tokens_out, ids = self.world, 0, 0.0, 0, itertools.count()
        unread = dict.fromkeys(range(len(world.acceptance)), self.prompt)
        left = dict.fromkeys(unread, self.tokens)
        names = {b: next(ids) for b in unread}
        while ended < requests:
            going, room = [b for b in unread if not unread[b]], self.chunk
            for b in unread:
                read = min(room, unread[b])
                unread[b], room = unread[b] - read, room - read
            rows = self.chunk - room
            lengths = list(choose([names[b] for b in going], [min(8, left[b] - 1) for b in going], rows))
            accepted = [world.accepted(b, length) for b, length in zip(going, lengths, strict=True)]
            draft = world.noisy(world.level * max(lengths, default=0) + (0 if resting() else self.reading * rows))
            rest = world.noisy(world.forward(len(going) + sum(lengths) + rows))
            spent += draft + rest
            if learn is not None and going:
                learn(Step([names[b] for b in going], lengths, lengths, accepted, draft, rest, prompt_rows=rows))
            for b, more in zip(going, accepted, strict=True):
                tokens_out += 1 + more
                left[b] -= 1 + more
                if left[b] <= 0:
                    ended += 1
                    unread[b], left[b], names[b] = self.prompt, self.tokens, next(ids)
                    joined()
        return tokens_out / spent


def adaptive(world: World, policy: DraftLengths, tokens: int) -> float:
    ids, limits = range(len(world.acceptance)), [policy.most] * len(world.acceptance)
    return world.run(lambda: policy.choose(ids, limits), tokens, policy.learn)


def fixed(world: World, length: int, tokens: int) -> float:
    return world.run(lambda: [length] * len(world.acceptance), tokens)
