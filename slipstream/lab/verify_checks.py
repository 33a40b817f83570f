"""The checks of `slipstream verify`, one method each. `verification` says what they are for and runs them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.params import SamplingParams, Strict, check_integer, check_number
from slipstream.core.rules import RULES
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError, did_you_mean
from slipstream.lab.prompts import Prompt, PromptSet
from slipstream.lab.verify_distribution import Samples, cells, distribution_test, sample, shift_seen
from slipstream.lab.verify_positions import BINS, PLACES, Positions, tested
from slipstream.lab.verify_texts import (
    BUG,
    LOSSY,
    Comparison,
    Control,
    Pass,
    compared,
    control,
    passes,
    scores,
    texts,
    verdict,
)

if TYPE_CHECKING:
    from slipstream.llm import LLM

CHECKS = ("greedy", "coupled", "distribution")
SAME = "no difference seen"
BLIND = "nothing could be seen"
FEW = "too few to test"
UNTESTED = "not tested"
SCREEN = 0.01
"""Level of the first look of a test of a distribution. A test that fails it is repeated on new samples."""
FEWEST_DRAFTED = {"greedy": 20, "coupled": 20, "distribution": 100}
"""Fewest draft tokens that must have been verified in a check; below that it says "not tested"."""
TESTED_TOGETHER = 16
"""Texts of the test of positions that are decoded in one batch."""


@dataclass(frozen=True)
class VerifyConfig(Strict):
    """params      sampling; above temperature 0 as given, for the greedy check with temperature 0.
    temperature  temperature of the sampled checks if `params` is greedy.
    checks       which of `CHECKS` to run; the control always runs.
    samples      texts sampled for each prompt of the test of the first tokens.
    distribution_prompts  number of prompts of that test.
    tail         that test uses only this many last tokens of a prompt: it stays exact, and prefill, which each sample
                 repeats, is short.
    length       number of first tokens whose joint distribution is tested. The first of them comes from prefill.
    batch        samples decoded at once.
    texts        whole texts sampled for each draft length (1, 2 and K) by the test of positions.
    reach        one of them goes on to this position in its context (0: none does).
    level        probability that a correct run is called a bug, over all tests of distributions together.
    power        probability that a bias of the reported smallest size is called a bug.
    seed         of all samples. Runs with different seeds share no random number.
    """

    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=48))
    temperature: float = 1.0
    checks: tuple[str, ...] = CHECKS
    samples: int = 1000
    distribution_prompts: int = 3
    tail: int = 16
    length: int = 5
    batch: int = 32
    texts: int = 16
    reach: int = 512
    level: float = 1e-3
    power: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "distribution_prompts", "tail", "batch", "texts"):
            check_integer(name, getattr(self, name), 1)
        check_integer("reach", self.reach, 0)
        check_integer("seed", self.seed, 0)
        check_integer("length", self.length, 2)
        check_number("level", self.level, 0.0, 0.5, open_low=True)
        check_number("power", self.power, 0.5, 0.999)
        check_number("temperature", self.temperature, 0.0, 100.0, open_low=True)
        for name in self.checks:
            if name not in CHECKS:
                raise ParameterError(f"there is no check {name!r}", fix=did_you_mean(name, CHECKS))

    @property
    def greedy(self) -> SamplingParams:
        return replace(self.params.unfiltered, temperature=0.0, seed=0)

    @property
    def sampled(self) -> SamplingParams:
        return replace(self.params, temperature=self.params.temperature or self.temperature)


def decisive_level(level: float, tests: int) -> float:
    """The level of the second look, so that all tests together call a correct run a bug with at most `level`."""
    return min(SCREEN, level / SCREEN / tests)


def lengths(draft_tokens: int) -> list[int]:
    """The draft lengths of sampled texts."""
    return sorted({1, min(2, draft_tokens), draft_tokens})


def across_kinds(prompts: PromptSet) -> list[Prompt]:
    """The prompts, one of each category in turn, so that the first ones are of different kinds."""
    seen: Counter[str] = Counter()
    places = []
    for prompt in prompts.prompts:
        places.append(seen[prompt.category])
        seen[prompt.category] += 1
    return [prompt for _, prompt in sorted(zip(places, prompts.prompts, strict=True), key=lambda pair: pair[0])]


class Checks:
    """The checks of one run; each adds its rows to `data`."""

    def __init__(
        self, llm: LLM, prompts: PromptSet, config: VerifyConfig, data: dict[str, Any], advance: Callable[[], None]
    ):
        self.llm, self.config, self.data, self.advance = llm, config, data, advance
        order = across_kinds(prompts)
        self.ids, self.names = [list(p.ids) for p in order], [p.name for p in order]
        self.drafter: Any = llm.drafter
        self.most = llm.most_draft_tokens
        self.noise: Control = Control(1, 0, 0.0, 0.0, 0.0, 0)
        self.plain: list[list[int]] = []
        self.stats = SpecStats()

    @property
    def rows(self) -> int:
        """Rows of a pass that verifies a draft. A tree has more nodes than levels."""
        proposed = -(-self.stats.proposed // max(1, self.stats.steps - self.stats.undrafted))
        return max(self.most, proposed) + 1

    def control(self) -> None:
        greedy = self.config.greedy
        self.plain = [ids for ids, _ in texts(self.llm, None, self.ids, [greedy] * len(self.ids), self.advance)]
        rows = self.most + 1
        found = []
        for prompt, text in zip(self.ids, self.plain, strict=True):
            maximised = scores(self.llm, prompt, greedy)
            found.append(control(self.llm.target, prompt, text, min(rows, max(1, len(text))), maximised, greedy))
            self.advance()
        self.noise = replace(found[0], rows=rows)
        for each in found[1:]:
            self.noise += each
        self.data["control"] = asdict(self.noise) | {"verdict": self.noise.verdict}

    def greedy(self) -> None:
        self._compare("greedy", [self.config.greedy] * len(self.ids), self.plain)

    def coupled(self) -> None:
        """Always uses rule `coupled`, because it checks the drafter and the caches, not the rule."""
        rule = self.llm.rule
        params = [replace(self.config.sampled, seed=self._seed("coupled", i)) for i in range(len(self.ids))]
        self.llm._rule = RULES["coupled"]
        try:
            plain = [ids for ids, _ in texts(self.llm, None, self.ids, params, self.advance)]
            self._compare("coupled", params, plain)
        finally:
            self.llm._rule = rule

    def _compare(self, check: str, params: Seq[SamplingParams], plain: Seq[Seq[int]]) -> None:
        before = self.stats
        for how in passes(self.most, len(self.ids)):
            fast = texts(self.llm, self.drafter, self.ids, params, self.advance, how)
            self.stats = sum((stats for _, stats in fast), self.stats)
            for i, (ids, stats) in enumerate(fast):
                self.data[check].append(self._row(i, params[i], plain[i], ids, stats, how))
        self._cover(check, self.stats.proposed - before.proposed, self.stats.accepted - before.accepted)

    def _row(
        self, i: int, params: SamplingParams, plain: Seq[int], ids: Seq[int], stats: SpecStats, how: Pass
    ) -> dict[str, Any]:
        parted = compared(self.llm, self.ids[i], params, plain, ids, self.rows, self.noise)
        row = Comparison(self.names[i], verdict(parted, self.llm.rule.lossless), len(ids), parted, params.seed)
        return row.as_dict() | asdict(how) | {"drafted": stats.proposed, "accepted": stats.accepted}

    def _cover(self, check: str, drafted: int, accepted: int) -> None:
        verdict = "tested" if drafted >= FEWEST_DRAFTED[check] else UNTESTED
        self.data["coverage"][check] = {"drafted": drafted, "accepted": accepted, "verdict": verdict}

    def distribution(self) -> None:
        prompts = list(range(min(self.config.distribution_prompts, len(self.ids))))
        decisive = decisive_level(self.config.level, len(prompts) + 2 * len(PLACES))
        self._first_tokens(prompts, decisive)
        self._positions(decisive)

    def _first_tokens(self, chosen: Seq[int], decisive: float) -> None:
        config, llm = self.config, self.llm
        prompts = [self.ids[i][-config.tail :] for i in chosen]
        each = math.sqrt(config.power)  # both looks have to fail
        llm.use(None)
        made = [cells(llm, p, config.sampled, config.samples, config.length, self.noise.noise) for p in prompts]
        llm.use(self.drafter)

        def look(number: int) -> list[Samples]:
            seeds = self._seeds("first tokens", number)
            return sample(
                llm, prompts, config.sampled, config.samples, config.length, config.batch, seeds,
                lengths(self.most), self.advance,
            )  # fmt: skip

        drawn = look(0)
        first = [distribution_test(s.outputs, m, decisive, each) for s, m in zip(drawn, made, strict=True)]
        again = look(1) if any(test.p < SCREEN for test in first) else None
        for i, place in enumerate(chosen):
            test, second = first[i], None
            if again is not None and test.p < SCREEN:
                second = distribution_test(again[i].outputs, made[i], decisive, each).p
            said = self._said(second, decisive, BLIND if test.smallest_bias is None else SAME)
            if said == SAME and drawn[i].drafted < config.samples / 10:
                said = UNTESTED
            self.data["distribution"].append(
                test.as_dict()
                | {"prompt": self.names[place], "verdict": said, "level": decisive, "power": config.power}
                | {"second_p": second, "cells": test.freedom + 1, "drafted": drawn[i].drafted}
                | {"largest": [self._cell(*row) for row in test.largest]}
            )

    def _positions(self, decisive: float) -> None:
        first = self._look(0, 1)
        tests = [tested(place, first.found[place]) for place in PLACES if place in first.found]
        suspects = [test.place for test in tests if min(test.p, default=1.0) < SCREEN]
        again = self._look(1, 2).found if suspects else {}
        each = math.sqrt(self.config.power)
        for test in tests:
            second = tested(test.place, again[test.place]) if test.place in suspects and test.place in again else None
            worst = None if second is None else min(second.p, default=1.0)
            shift = shift_seen(BINS - 1, decisive, each) / (4 * test.positions)
            self.data["positions"].append(
                test.as_dict()
                | {"second_p": worst, "verdict": self._said(worst, decisive, SAME if test.p else FEW)}
                | {"smallest_bias": math.sqrt(shift) if test.ranks is not None and shift < 1 else None}
            )
        self._cover("distribution", first.stats.proposed, first.stats.accepted)

    def _look(self, number: int, times: int) -> Positions:
        """The evidence of whole texts, for each draft length; the first text is a long one."""
        config, llm = self.config, self.llm
        seeds = self._seeds("positions", number)
        found = Positions(llm, self.drafter, self.noise.noise, next(seeds))
        for k in lengths(self.most):
            order = [i % len(self.ids) for i in range(times * config.texts)]
            params = [replace(config.sampled, seed=None, stop=())] * len(order)
            further = min(config.reach, llm.target.context) - len(self.ids[order[0]])
            params[0] = replace(params[0], max_tokens=max(params[0].max_tokens, further))
            for start in range(0, len(order), TESTED_TOGETHER):
                part = slice(start, start + TESTED_TOGETHER)
                some = [self.ids[i] for i in order[part]]
                found.decode(some, params[part], [next(seeds) for _ in some], k)
                self.advance()
        return found

    def _said(self, second: float | None, decisive: float, otherwise: str) -> str:
        if second is None or second >= decisive:
            return otherwise
        return BUG if self.llm.rule.lossless else LOSSY

    def _seeds(self, purpose: str, number: int) -> Iterator[int]:
        """Seeds of requests that no other purpose, look or run has."""
        key = int.from_bytes(purpose.encode(), "little")
        while True:
            yield from np.random.SeedSequence([self.config.seed, key, number]).generate_state(1024, np.uint64).tolist()
            number += 1000

    def _seed(self, purpose: str, number: int) -> int:
        return next(self._seeds(purpose, number))

    def _cell(self, cell: Seq[int], expected: float, counted: int) -> dict[str, Any]:
        kept = [token for token in cell if token >= 0]
        tokenizer = self.llm.tokenizer
        text = tokenizer.decode(kept) if tokenizer is not None else " ".join(map(str, kept))
        return {"tokens": list(cell), "text": text + " *" * (-1 in cell), "expected": expected, "counted": counted}

    def warnings(self) -> list[str]:
        found = []
        if not self.llm.rule.lossless:
            found.append(f"the rule {self.llm.rule.name!r} is lossy: differences are expected, they are not bugs")
        for check, row in self.data["coverage"].items():
            if row["verdict"] == UNTESTED:
                found.append(
                    f"{check}: {row['drafted']} draft tokens were verified, {FEWEST_DRAFTED[check]} are needed: not "
                    "tested. Give more prompts, longer texts, or prompts that this drafter can continue"
                )
            elif not row["accepted"]:
                found.append(f"{check}: no draft token was accepted, so acceptance itself was not tested")
        if self.stats.drafter_faults:
            found.append(
                f"the drafter failed {self.stats.drafter_faults} times; plain decoding continued instead, so that is "
                "what was compared"
            )
        return found
