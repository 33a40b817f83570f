"""A fake batch engine of another system, for tests of `RowDrafts`. It decodes known texts, verifies drafts, reads
prompts in chunks, moves rows, preempts requests, and drops draft tokens."""

import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from slipstream.integrations.row_drafts import Row, RowDrafts, RowRequest

VOCAB = 1000


@dataclass
class Running:
    """A request: its known greedy output, and how many tokens are decoded."""

    id: str
    prompt: Seq[int]
    answer: Seq[int]
    prediction: Seq[int] = ()
    read: int = 0
    emitted: int = 0
    draft: Seq[int] = ()

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.answer[: self.emitted]]


@dataclass
class BatchEngine:
    """chunk: most tokens of a prompt that a step reads. forward: called with the number of rows after each forward
    pass."""

    drafts: RowDrafts
    chunk: int = 64
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    shuffled: bool = True
    forward: Callable[[int], None] = lambda rows: None
    preempted: float = 0.0
    dropped: float = 0.0
    steps: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: dict[str, list[int]] = field(default_factory=dict)
    calls: list[list[list[int]]] = field(default_factory=list)

    def run(self, requests: Seq[Running]) -> None:
        """Decode all requests together."""
        running = list(requests)
        while running:
            self.step(running)
            running = [one for one in running if one.emitted < len(one.answer)]

    def step(self, running: list[Running]) -> None:
        """Run one step with the requests that are not preempted in this step."""
        batch = [one for one in running if self.rng.random() >= self.preempted] or running[:1]
        if self.shuffled:
            self.rng.shuffle(batch)
        rows = [self._row(one) for one in batch]
        self.forward(sum(row.rows for row in rows))
        drafts = self.drafts.propose(rows, {one.id for one in running})
        self.calls.append(drafts)
        self.steps += 1
        assert len(drafts) == len(batch)
        for one, draft in zip(batch, drafts, strict=True):
            assert len(draft) <= self.drafts.most
            assert not draft or (one.emitted and one.emitted + len(draft) < len(one.answer))
            one.draft = draft[: self.rng.randint(0, len(draft))] if self.rng.random() < self.dropped else draft

    def _row(self, one: Running) -> Row:
        """Return the row of one request in a step."""
        if one.read < len(one.prompt):
            rows, drafted = min(self.chunk, len(one.prompt) - one.read), 0
            one.read += rows
            gained = int(one.read == len(one.prompt))
        else:
            right = 0
            while right < len(one.draft) and one.draft[right] == one.answer[one.emitted + right]:
                right += 1
            drafted, gained = len(one.draft), right + 1
            rows = 1 + drafted
            self.verified += drafted
            self.accepted += right
        one.draft = ()
        one.emitted += gained
        self.emitted[one.id] = list(one.answer[: one.emitted])
        text = one.text[: one.read + one.emitted]
        limit = len(one.prompt) + len(one.answer)
        request = RowRequest(len(one.prompt), limit, one.prediction)
        return Row(one.id, len(text), lambda a, b: text[a:b], gained, drafted, rows, lambda: request)


def repetitive(seed: int, count: int = 120) -> list[int]:
    """Return a text that repeats some of its passages."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 12))] for _ in range(4)]
    text: list[int] = []
    while len(text) < count:
        text += rng.choice(phrases)
    return text[:count]


def novel(seed: int, count: int = 120) -> list[int]:
    """Return a text in which no token occurs twice."""
    return random.Random(seed).sample(range(100_000), count)
