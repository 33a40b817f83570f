"""`slipstream verify`: checks that speculation does not change the output of a target, with a given drafter, rule and
sampling parameters.

Four checks, each of which can fail:

    control       no drafter: the target's own text, scored one row per pass and k + 1 rows per pass. A difference of
                  the logits is rounding, or a bug in the target.
    greedy        texts with and without the drafter at temperature 0: identical, a tie within the measured noise, or a
                  bug.
    coupled       the same above temperature 0, with rule `coupled` and one seed: the random numbers belong to
                  positions, so the text depends only on the target and the seed.
    distribution  samples under the given rule, tested against the target's exact distribution (`verify_distribution`).

A difference of the distribution is only reported as a bug if a second, independent sample shows it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.params import SamplingParams, Strict, check_integer, check_number
from slipstream.core.rules import RULES
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError, did_you_mean
from slipstream.lab.prompts import PromptSet
from slipstream.lab.provenance import provenance
from slipstream.lab.results import Result, recording
from slipstream.lab.verify_distribution import DistributionTest, cells, distribution_test, sample
from slipstream.lab.verify_texts import BUG, LOSSY, Comparison, Control, compared, control, texts, verdict

if TYPE_CHECKING:
    from slipstream.llm import LLM

CHECKS = ("greedy", "coupled", "distribution")
SAME = "no difference seen"
BLIND = "nothing could be seen"


@dataclass(frozen=True)
class VerifyConfig(Strict):
    """params      sampling; above temperature 0 as given, for the greedy check with temperature 0.
    temperature  temperature of the sampled checks if `params` is greedy.
    checks       which of `CHECKS` to run; the control always runs.
    samples      texts sampled for each prompt of the distribution test.
    distribution_prompts  number of prompts of the distribution test.
    tail         the distribution test uses only this many last tokens of a prompt: the test stays exact, and prefill,
                 which each sample repeats, is short.
    length       number of first tokens whose joint distribution is tested. The first of them comes from prefill.
    batch        samples decoded at once.
    level        probability that a correct run fails the first test of any prompt (Bonferroni).
    power        probability that a bias of the reported smallest size is called a bug, by both tests together.
    """

    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=48))
    temperature: float = 1.0
    checks: tuple[str, ...] = CHECKS
    samples: int = 2000
    distribution_prompts: int = 2
    tail: int = 16
    length: int = 3
    batch: int = 32
    level: float = 1e-3
    power: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "distribution_prompts", "tail", "batch"):
            check_integer(name, getattr(self, name), 1)
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


def steps(prompts: PromptSet, config: VerifyConfig) -> int:
    """How often `verify` calls `advance`, if no second test is needed."""
    n, tested = len(prompts.prompts), min(config.distribution_prompts, len(prompts.prompts))
    batches = -(-config.samples // config.batch)
    of_check = {"greedy": n, "coupled": 2 * n, "distribution": tested * batches}
    return 2 * n + sum(of_check[name] for name in set(config.checks))


def verify(
    llm: LLM,
    prompts: PromptSet,
    config: VerifyConfig,
    out: str | Path | None = None,
    advance: Callable[[], None] = lambda: None,
    label: str = "",
) -> Result:
    """Checks the drafter that `llm` uses. Writes the result to `out` after every check, so an interruption keeps the
    checks that were done."""
    if llm.drafter.name == "none" or not llm.draft_tokens:
        raise ParameterError("there is no drafter to check", fix="name one: --drafter ngram, with --draft-tokens > 0")
    settings = {
        "drafter": label or llm.drafter.name,
        "draft_tokens": llm.draft_tokens,
        "rule": llm.rule.name,
        "lossless": llm.rule.lossless,
        **asdict(config),
    }
    result = Result("verify", settings, provenance(llm, config.seed, prompts=prompts.digest))
    data: dict[str, Any] = {
        "prompts": prompts.as_dict(),
        "control": None,
        "greedy": [],
        "coupled": [],
        "distribution": [],
    }
    check = _Check(llm, prompts, config, data, advance)

    def collect() -> dict[str, Any]:
        result.warnings = [*prompts.warnings, *check.warnings()]
        return data | {"verdict": overall(data)}

    drafter, rule = check.drafter, llm.rule
    try:
        with recording(result, out, collect) as save:
            check.control()
            save()
            for name in CHECKS:
                if name in config.checks:
                    getattr(check, name)()
                    save()
    except BaseException as fault:
        if data["control"] is not None:
            fault.result = result  # type: ignore[attr-defined]
        raise
    finally:
        llm.use(drafter)
        llm._rule = rule
    return result


def overall(data: dict[str, Any]) -> str:
    """ "BUG" if any check found one, "lossy" if only a lossy rule changed texts, "ok" otherwise."""
    said = [row["verdict"] for name in CHECKS for row in data[name]]
    if data["control"] is not None:
        said.append(data["control"]["verdict"])
    return BUG if BUG in said else "lossy" if LOSSY in said else "ok"


class _Check:
    """The checks of one run; each adds its rows to `data`."""

    def __init__(
        self, llm: LLM, prompts: PromptSet, config: VerifyConfig, data: dict[str, Any], advance: Callable[[], None]
    ):
        self.llm, self.config, self.data, self.advance = llm, config, data, advance
        self.ids, self.names = [list(p.ids) for p in prompts.prompts], [p.name for p in prompts.prompts]
        self.drafter: Any = llm.drafter
        self.noise: Control = Control(1, 0, 0.0, 0.0, 0.0, 0)
        self.plain: list[list[int]] = []
        self.stats = SpecStats()

    @property
    def rows(self) -> int:
        """Rows of a pass that verifies a draft. A tree has more nodes than levels."""
        proposed = -(-self.stats.proposed // max(1, self.stats.steps - self.stats.undrafted))
        return max(self.llm.draft_tokens, proposed) + 1

    def control(self) -> None:
        greedy = [self.config.greedy] * len(self.ids)
        self.plain = [ids for ids, _ in texts(self.llm, None, self.ids, greedy, self.advance)]
        rows = self.llm.draft_tokens + 1
        found = []
        for prompt, text in zip(self.ids, self.plain, strict=True):
            found.append(control(self.llm.target, prompt, text, min(rows, max(1, len(text)))))
            self.advance()
        self.noise = replace(found[0], rows=rows)
        for each in found[1:]:
            self.noise += each
        self.data["control"] = asdict(self.noise) | {"verdict": self.noise.verdict}

    def greedy(self) -> None:
        params = [self.config.greedy] * len(self.ids)
        self._compare("greedy", params, self.plain)

    def coupled(self) -> None:
        """Always uses rule `coupled`, because it checks the drafter and the caches, not the rule."""
        rule = self.llm.rule
        params = [replace(self.config.sampled, seed=self.config.seed + i) for i in range(len(self.ids))]
        self.llm._rule = RULES["coupled"]
        try:
            plain = [ids for ids, _ in texts(self.llm, None, self.ids, params, self.advance)]
            self._compare("coupled", params, plain)
        finally:
            self.llm._rule = rule

    def _compare(self, check: str, params: Seq[SamplingParams], plain: Seq[Seq[int]]) -> None:
        lossless = self.llm.rule.lossless
        fast = texts(self.llm, self.drafter, self.ids, params, self.advance)
        self.stats = sum((stats for _, stats in fast), self.stats)
        for i, (ids, stats) in enumerate(fast):
            parted = compared(self.llm, self.ids[i], params[i], plain[i], ids, self.rows, self.noise)
            row = Comparison(self.names[i], verdict(parted, lossless), len(ids), parted, params[i].seed)
            self.data[check].append(row.as_dict() | {"drafted": stats.proposed, "accepted": stats.accepted})

    def distribution(self) -> None:
        config, llm = self.config, self.llm
        chosen = range(min(config.distribution_prompts, len(self.ids)))
        level = config.level / len(chosen)
        each = math.sqrt(config.power)  # both tests have to reject
        params = config.sampled
        for i in chosen:
            prompt = self.ids[i][-config.tail :]
            llm.use(None)
            made = cells(llm, prompt, params, config.samples, config.length, self.noise.noise)
            llm.use(self.drafter)
            tests: list[DistributionTest] = []
            for attempt in range(2):
                seed = config.seed + (2 * i + attempt) * config.samples
                drawn = sample(llm, prompt, params, config.samples, config.length, config.batch, seed, self.advance)
                tests.append(distribution_test(drawn, made, level, each))
                if tests[-1].p >= level:
                    break
            first, wrong = tests[0], tests[-1].p < level
            said = BLIND if first.smallest_bias is None else SAME
            if wrong:
                said = BUG if llm.rule.lossless else LOSSY
            self.data["distribution"].append(
                first.as_dict()
                | {"prompt": self.names[i], "verdict": said, "level": level, "power": config.power}
                | {"second_p": tests[1].p if len(tests) > 1 else None, "cells": first.freedom + 1}
                | {"largest": [self._cell(*row) for row in first.largest]}
            )

    def _cell(self, cell: Seq[int], expected: float, counted: int) -> dict[str, Any]:
        kept = [token for token in cell if token >= 0]
        tokenizer = self.llm.tokenizer
        text = tokenizer.decode(kept) if tokenizer is not None else " ".join(map(str, kept))
        return {"tokens": list(cell), "text": text + " *" * (-1 in cell), "expected": expected, "counted": counted}

    def warnings(self) -> list[str]:
        found = []
        if not self.llm.rule.lossless:
            found.append(f"the rule {self.llm.rule.name!r} is lossy: differences are expected, they are not bugs")
        compared_texts = [*self.data["greedy"], *self.data["coupled"]]
        if compared_texts and not self.stats.proposed:
            found.append("no draft token was proposed in any text: equal texts prove nothing")
        if self.stats.drafter_faults:
            found.append(
                f"the drafter failed {self.stats.drafter_faults} times; plain decoding continued instead, so that is "
                "what was compared"
            )
        return found
