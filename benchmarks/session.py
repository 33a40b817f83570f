"""One run of a benchmark: start the contenders, choose draft lengths, warm up, and time all contenders in interleaved
rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from benchmarks.contenders import CONTENDERS, WORKERS, Contender, WorkerKind, loads
from benchmarks.prompts import SPARE, Prompt, Prompts
from benchmarks.protocol import ContenderError, Worker

ROWS_PAST, ROWS_REPEATS = 256, 200


@dataclass
class Session:
    """Holds the measurements so far.

    contenders, kinds  the contenders, and the workers that run them.
    models   arguments of the worker's `load` by (worker, model); None: the result of `contenders.loads`.
    skipped  reasons, by contender or series, why it was not measured.
    notes    by contender: the worker's note about the loaded model.
    chosen   by contender: draft length.  tuning: by contender and draft length: seconds per token.
    cells    by contender: seconds, [prompts][rounds].  outputs: by contender: tokens of each prompt in the first round.
    unstable by contender: prompts whose output was not the same in every round.
    counts   by contender: engine statistics of each cell, if the worker reports statistics.
    series   further measurements by name, [prompts][rounds] or [rounds] (see `figures`).
    """

    target: str
    draft: str
    advance: Callable[[str], None] = lambda doing: None
    contenders: Mapping[str, Contender] = field(default_factory=lambda: CONTENDERS)
    kinds: Mapping[str, WorkerKind] = field(default_factory=lambda: WORKERS)
    models: Mapping[tuple[str, str], dict[str, Any]] | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    tuning: dict[str, dict[int, float]] = field(default_factory=dict)
    cells: dict[str, list[list[float]]] = field(default_factory=dict)
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    unstable: dict[str, set[int]] = field(default_factory=dict)
    counts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    series: dict[str, list[Any]] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)

    def start(self, keys: Iterable[str]) -> None:
        """Start the workers of the contenders and load their models. A contender that cannot be loaded is skipped."""
        keys, arguments = list(keys), loads(self.target, self.draft) if self.models is None else self.models
        served = {k: (self.contenders[k].worker, self.contenders[k].model) for k in keys}
        for worker, model in dict.fromkeys(served.values()):
            self.advance(f"loading {worker}, {model}")
            users = [k for k in keys if served[k] == (worker, model)]
            kind = self.kinds[worker]
            if not kind.installed:
                self.skip(users, f"{worker} is not installed: run `make {kind.make}`")
                continue
            try:
                if worker not in self.workers:
                    self.workers[worker] = Worker(worker, kind.module, kind.python)
                reply = self.workers[worker].call("load", name=model, **arguments[worker, model])
                self.notes |= dict.fromkeys(users, reply["note"]) if "note" in reply else {}
            except ContenderError as error:
                self.skip(users, str(error))

    def skip(self, keys: Iterable[str], reason: str) -> None:
        for key in keys:
            self.skipped.setdefault(key, reason)

    def generate(self, key: str, prompt: Prompt, draft_tokens: int) -> dict[str, Any] | None:
        """Make one timed call. If it fails, return None and skip the contender from now on."""
        if key in self.skipped:
            return None
        who = self.contenders[key]
        try:
            reply = self.workers[who.worker].call(
                "generate", name=who.model, ids=prompt.ids, tokens=prompt.tokens, draft_tokens=draft_tokens
            )
            if len(reply["tokens"]) != prompt.tokens:
                raise ContenderError(f"{key} made {len(reply['tokens'])} tokens instead of {prompt.tokens}")
        except ContenderError as error:
            self.skip([key], str(error))
            return None
        return reply

    def tune(self, key: str, spare: Prompts) -> None:
        """Choose the draft length that is fastest on prompts that are not measured. Lengths are timed one after
        another."""
        who, total = self.contenders[key], dict.fromkeys(self.contenders[key].lengths, 0.0)
        prompts = spare[who.prompts]
        for length in who.lengths:
            for index, prompt in enumerate([prompts[0], *prompts]):  # the first call warms up
                self.advance(f"{who.label}: choosing a draft length")
                reply = self.generate(key, prompt, length)
                total[length] += reply["seconds"] / prompt.tokens if reply and index else 0.0
        if who.lengths:
            self.tuning[key] = {length: seconds / len(prompts) for length, seconds in total.items()}
            self.chosen[key] = min(total, key=lambda length: total[length])

    def measure(self, keys: Iterable[str], prompts: Prompts, spare: Prompts, rounds: int, deadline: float) -> None:
        """Time every contender on every prompt, `rounds` times. The order of contenders rotates by one each time.

        deadline  time on `time.monotonic`. A round after the first begins only if it would end before the deadline,
                  provided that it takes as long as the round before.
        """
        order = [key for key in keys if key not in self.skipped]
        for key in order:
            self.tune(key, spare)
        for key in order:
            who = self.contenders[key]
            self.chosen.setdefault(key, self.chosen.get(who.same_k, who.draft_tokens))
            self.advance(f"{who.label}: warming up")
            self.generate(key, spare[who.prompts][0], self.chosen[key])
            self.cells[key] = [[] for _ in prompts[who.prompts]]
        lasted = 0.0  # seconds of the previous round
        for index in range(rounds):
            began = monotonic()
            if index and began + lasted > deadline:
                break
            for number in range(max(map(len, prompts.values()))):
                for key in order:
                    if number < len(self.cells[key]):
                        self.advance(f"round {index + 1} of {rounds}: {self.contenders[key].label}")
                        self._cell(key, number, prompts[self.contenders[key].prompts][number])
                order = [*order[1:], order[0]]
            lasted = monotonic() - began
        for key in list(self.cells):
            if key in self.skipped:
                del self.cells[key]

    def _cell(self, key: str, number: int, prompt: Prompt) -> None:
        reply = self.generate(key, prompt, self.chosen[key])
        if reply is None:
            return
        self.cells[key][number].append(reply["seconds"])
        outputs = self.outputs.setdefault(key, [])
        if number == len(outputs):
            outputs.append(reply["tokens"])
        elif outputs[number] != reply["tokens"]:
            self.unstable.setdefault(key, set()).add(number)
        if "stats" in reply:
            self.counts.setdefault(key, []).append(reply["stats"])
        if "step" in reply:
            for name, seconds in (("step", reply["step"]), ("outside", reply["step"] - reply["forwards"])):
                self.series.setdefault(f"{name}_{key}", [[] for _ in self.cells[key]])[number].append(seconds)

    def rows(self, name: str, model: str) -> None:
        """Measure the series rows1_`name` and rows8_`name`: seconds of the target's forward pass over 1 and 8 rows,
        alternating."""
        self.advance(f"forward of 1 and 8 rows, {name}")
        try:
            seconds = self.workers["slipstream"].call(
                "rows", name=model, past=ROWS_PAST, counts=[1, 8], repeats=ROWS_REPEATS
            )["seconds"]
        except (ContenderError, KeyError) as error:
            self.skip((f"rows1_{name}", f"rows8_{name}"), str(error))
            return
        self.series[f"rows1_{name}"], self.series[f"rows8_{name}"] = seconds

    def margins(self, texts: list[list[int]], prompts: list[Prompt], divergences: list[dict[str, Any]]) -> None:
        """Add to each divergence the distance between the target's two largest logits there, computed by transformers.
        A small distance means that rounding may explain the divergence."""
        if "transformers" not in self.workers:
            return
        for divergence in divergences:
            number, token = divergence["prompt"], divergence["token"]
            ids = prompts[number].ids + texts[number][:token]
            try:
                divergence.update(self.workers["transformers"].call("margin", ids=ids))
            except ContenderError as error:  # other measurements must not be lost
                return self.skip(["margins"], str(error))

    def calls(self, keys: Iterable[str], prompts: int, rounds: int, spare: int = SPARE) -> int:
        """Return how often `start` and `measure` will call `advance`, which is the length of the progress bar."""
        who = [self.contenders[key] for key in keys]
        tuning = sum(len(w.lengths) for w in who) * (spare + 1)
        return len({(w.worker, w.model) for w in who}) + tuning + len(who) * (1 + prompts * rounds)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
