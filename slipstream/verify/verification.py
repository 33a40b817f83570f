"""`slipstream verify`: checks that speculation does not change the output of a target, with a given drafter, rule and
sampling parameters.

Four checks, each of which can fail:

    control       no drafter: the target's own text, scored one row per pass and k + 1 rows per pass. A difference of
                  the logits is rounding, or a bug in the target; each token must be the target's most likely one.
    greedy        compares texts with and without the drafter at temperature 0: identical, a tie within the measured
                  noise, or a bug. Texts are decoded alone with K draft tokens, in one batch with one and with two draft
                  tokens, and in a batch with requests of other parameters (`panel_requests`). Without the drafter, each
                  token must be the token that the reference chooses.
    coupled       the greedy check above temperature 0, with rule `coupled` and one seed: the random numbers belong to
                  positions, so the text depends only on the target and the seed.
    distribution  samples under the given rule against the target's exact distribution: every position of whole texts,
                  and pairs of neighbouring positions (`outcomes`).

Every text must end where its parameters say.

The reference distribution is computed from the target's logits by separate code (`reference`). A test of a distribution
that fails at level `SCREEN` is repeated on new samples, and only the second p-value decides (see `decisive_level`). So
a correct run is called a bug with a probability of at most `level`, over all tests.

A check in which too few draft tokens were verified is "not tested", because equal texts would prove nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from slipstream.core.params import SamplingParams, Strict, integer, number, option
from slipstream.core.random import VERIFY
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError, did_you_mean
from slipstream.llm import LLM
from slipstream.measure.prompts import PromptSet
from slipstream.measure.provenance import note_provenance
from slipstream.measure.results import Result, record
from slipstream.verify import panel_requests
from slipstream.verify.outcomes import BINS, CHOSEN, OUTCOMES, PLACES, SCREEN, decisive_level, judge, shift_seen
from slipstream.verify.panel_requests import ENDS, PanelRequest, among, continue_requests, cross_requests, panel
from slipstream.verify.positions import Positions
from slipstream.verify.reference import wrong_end
from slipstream.verify.report_verify import UNTESTED as UNTESTED, ComparedText, Coverage, TestedPlace, VerifyData
from slipstream.verify.seeded_lengths import SeededLengths
from slipstream.verify.texts import BUG, Control, Pass, compare, control, passes, texts, verdict, wrong_token

CHECKS = ("greedy", "coupled", "distribution")
SAME, FEW = "no difference seen", "too few to test"
FEWEST_DRAFTED = {"greedy": 20, "coupled": 20, "distribution": 100}
"""Check -> fewest verified draft tokens; with fewer draft tokens the check is "not tested"."""
POWER = 0.9
"""Probability that a bias of the reported smallest size is called a bug."""


@dataclass(frozen=True)
class VerifyConfig(Strict):
    """params      sampling parameters; greedy checks set temperature 0, other checks replace a temperature of 0 by 1.
    checks       which of `CHECKS` to run; the control always runs.
    texts        number of texts to sample with each setting (see `panel_requests`); three times as many with the given
                 parameters, for the draft lengths 1, 2 and K.
    reach        one of these texts is as long as this position in the context (0: all are short).
    level        probability that a correct run is called a bug, over all tests of distributions together.
    seed         seed of all samples. Runs with different seeds share no random number.
    """

    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=48))
    checks: tuple[str, ...] = CHECKS
    texts: int = option(10, check=integer(1))
    reach: int = option(512, check=integer(0))
    level: float = option(1e-3, check=number(0.0, 0.5, open_low=True))
    seed: int = option(0, check=integer(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.checks:
            if name not in CHECKS:
                raise ParameterError(f"there is no check {name!r}", fix=did_you_mean(name, CHECKS))

    @property
    def greedy(self) -> SamplingParams:
        return replace(self.params.unfiltered, temperature=0.0, seed=0)

    @property
    def sampled(self) -> SamplingParams:
        return replace(self.params, temperature=self.params.temperature or 1.0)


def steps(prompts: PromptSet, config: VerifyConfig, draft_tokens: int) -> int:
    """Return how often `verify` calls `advance`, if no test is repeated."""
    n = len(prompts.prompts)
    of_texts = n * (1 + len(passes(draft_tokens, n)))
    of_check = {"greedy": of_texts, "coupled": of_texts, "distribution": 6 * config.texts}
    return 2 * n + sum(of_check[name] for name in set(config.checks))


def seconds(llm: LLM, prompts: PromptSet, config: VerifyConfig) -> float:
    """Estimate the seconds that `verify` takes, from the time to decode one text without the drafter."""
    drafter, n, tokens = llm.drafter, len(prompts.prompts), config.params.max_tokens
    began = perf_counter()
    (seq,) = texts(llm, None, [PanelRequest("", prompts.prompts[0].ids, config.greedy)], lambda: None)
    took = (perf_counter() - began) / len(seq.output) * tokens
    llm.use(drafter)
    short = min(1.0, panel_requests.SHORT / tokens)  # requests of a panel; see `_compare` and `_look`
    pair, sampled = 11 * n + 100 * short, config.texts * (6 + 17 * short) + 24 * short + config.reach / tokens
    each = {"greedy": pair, "coupled": pair, "distribution": sampled}
    return took * (3 * n + sum(each[name] for name in set(config.checks)))


def verify(
    llm: LLM, prompts: PromptSet, config: VerifyConfig, out: str | Path | None = None,
    advance: Callable[[], None] = lambda: None, label: str = "",
) -> Result:  # fmt: skip
    """Check the drafter of `llm`. Writes the result to `out` after every check, so Ctrl-C keeps finished checks."""
    config = replace(config, params=llm.defaults.fill(config.params))
    if llm.drafter.name == "none" or not llm.most_draft_tokens:
        raise ParameterError(
            "no drafter was given, or --draft-tokens is 0, so there is nothing to check",
            fix="give --drafter ngram, with --draft-tokens > 0",
        )
    about = {
        "drafter": label or llm.drafter.name,
        "draft_tokens": llm.most_draft_tokens,
        "rule": llm.rule.name,
        **asdict(config),
    }
    result = Result("verify", about, note_provenance(llm, config.seed, prompts=prompts.digest))
    checks = Checks(llm, prompts, config, advance)

    def collect() -> VerifyData:
        result.warnings = [*prompts.warnings, *checks.warnings()]
        checks.data.verdict = checks.data.judge()
        return checks.data

    rule = llm.rule
    try:
        with record(result, out, collect) as save:
            checks.control()
            save()
            for name in CHECKS:
                if name in config.checks:
                    getattr(checks, name)()
                    save()
    finally:
        llm.use(checks.drafter)
        llm._rule = rule
    return result


class Checks:
    """The checks of one run; each adds its rows to `data`."""

    def __init__(self, llm: LLM, prompts: PromptSet, config: VerifyConfig, advance: Callable[[], None] = lambda: None):
        self.llm, self.config, self.advance = llm, config, advance
        order = panel_requests.across_kinds(prompts)
        self.ids, self.names = [list(p.ids) for p in order], [p.name for p in order]
        self.drafter: Any = llm.drafter
        self.most = llm.most_draft_tokens
        self.noise: Control
        self.plain: list[list[int]] = []
        self.settings: dict[str, SamplingParams] = {}
        self.stats = SpecStats()
        self.data = VerifyData(prompts.as_dict())

    @property
    def rows(self) -> int:
        """Return the number of rows of a pass that verifies a draft. A tree has more nodes than levels."""
        proposed = -(-self.stats.proposed // max(1, self.stats.steps - self.stats.undrafted))
        return max(self.most, proposed) + 1

    def control(self) -> None:
        greedy = self.config.greedy
        requests = [PanelRequest(name, ids, greedy) for name, ids in zip(self.names, self.ids, strict=True)]
        self.plain = [seq.output for seq in self._decode(None, requests)]
        self.noise = self.data.control = control(self.llm, requests, self.plain, self.most + 1, self.advance)
        self.settings = panel_requests.settings(self.llm, self.config.sampled, self.ids, self.plain)

    def greedy(self) -> None:
        self._compare("greedy", lambda params, i: replace(params, temperature=0.0, seed=0))

    def coupled(self) -> None:
        """Compare sampled texts. Always uses rule `coupled`, as this checks drafter and caches, not the rule."""
        rule = self.llm.rule
        self.llm._rule = RULES["coupled"]
        try:
            self._compare("coupled", lambda params, i: replace(params, seed=next(self._seeds("coupled", i))))
        finally:
            self.llm._rule = rule

    def _compare(self, check: str, changed: Callable[[SamplingParams, int], SamplingParams]) -> None:
        """Compare texts with and without the drafter. changed: (parameters, i) -> parameters of the i-th request."""
        before, n = self.stats, len(self.ids)
        unmixed = [PanelRequest(name, ids, self.config.sampled) for name, ids in zip(self.names, self.ids, strict=True)]
        mixed = unmixed + panel(self.names, self.ids, self.settings, 1, panel_requests.mix_lengths(self.most))
        mixed += panel(self.names, self.ids, among(self.settings, panel_requests.HISTORY), 2, [self.most])
        mixed += panel(self.names, self.ids, among(self.settings, ENDS), 3, [self.most])
        mixed += continue_requests(unmixed, self.plain, self.llm.checks.longest)
        mixed = [replace(one, params=changed(one.params, i)) for i, one in enumerate(mixed)]
        plain = [seq.output for seq in self._decode(None, mixed)]
        for request, text in zip(mixed, plain, strict=True):
            self._fault(request, wrong_token(self.llm, request, text, self.noise.noise))
        for how in passes(self.most, n):
            requests = mixed if how.mixed else mixed[:n]
            for request, text, seq in zip(requests, plain, self._decode(self.drafter, requests, how), strict=False):
                self.stats += seq.stats
                getattr(self.data, check).append(self._row(request, text, seq, how))
        self._cover(check, self.stats.proposed - before.proposed, self.stats.accepted - before.accepted)

    def _decode(self, drafter: Any, requests: Seq[PanelRequest], how: Pass | None = None) -> list[Sequence]:
        seqs = texts(self.llm, drafter, requests, self._at_most(len(self.ids)), how)
        for request, seq in zip(requests, seqs, strict=True):
            self._fault(request, wrong_end(seq))
        return seqs

    def _at_most(self, count: int) -> Callable[[], None]:
        """Return an `advance` that does nothing after `count` calls, the number that the progress bar expects."""
        left = iter(range(count))
        return lambda: None if next(left, None) is None else self.advance()

    def _fault(self, request: PanelRequest, wrong: str | None) -> None:
        if wrong is not None:
            self.data.faults.append(f"{request.name}: {wrong}")

    def _row(self, request: PanelRequest, plain: Seq[int], seq: Sequence, how: Pass) -> ComparedText:
        parted = compare(self.llm, request.ids, request.params, plain, seq.output, self.rows, self.noise)
        drafted, accepted = seq.stats.proposed, seq.stats.accepted
        return ComparedText(
            request.name, verdict(parted), len(seq.output), parted, request.params.seed, drafted, accepted, **vars(how)
        )

    def _cover(self, check: str, drafted: int, accepted: int) -> None:
        verdict = "tested" if drafted >= FEWEST_DRAFTED[check] else UNTESTED
        self.data.coverage[check] = Coverage(drafted, accepted, verdict)

    def distribution(self) -> None:
        unseeded = replace(self.config.sampled, seed=None)
        one, other = (self.llm.sequence(self.ids[0], unseeded).random.uniforms(VERIFY, 0, 4) for _ in range(2))
        if (one == other).all():
            self.data.faults.append("two requests without a seed have the same random numbers")
        decisive = decisive_level(self.config.level, (1 + len(OUTCOMES)) * len(PLACES))
        first = self._look(0, 1)
        tests = [judge(place, first.evidence[place]) for place in PLACES if place in first.evidence]
        suspects = [test.place for test in tests if SCREEN * decisive <= test.p < SCREEN]
        certain = any(test.p < SCREEN * decisive for test in tests)
        again = self._look(1, 2).evidence if suspects and not certain else {}
        each = math.sqrt(POWER)
        for test in tests:
            second = judge(test.place, again[test.place]) if test.place in suspects and test.place in again else None
            shift = shift_seen(BINS - 1, decisive, each) / (4 * test.positions)
            said = FEW if test.ranks is None and not test.outcomes and not test.forbidden else SAME
            if test.p < SCREEN * decisive or (second is not None and second.p < decisive):
                said = BUG
            bias = math.sqrt(shift) if test.ranks is not None and shift < 1 else None
            again_p = None if second is None else second.p
            self.data.distribution.append(TestedPlace(**vars(test), second_p=again_p, verdict=said, smallest_bias=bias))
        self.data.sampled_tokens = first.stats.tokens
        self._cover("distribution", first.stats.proposed, first.stats.accepted)

    def _look(self, number: int, times: int) -> Positions:
        """Collect the evidence of complete texts: with the user's parameters at each draft length (one text is long);
        with all settings in one batch; of texts that continue other texts; and with draft lengths chosen per step."""
        config, llm = self.config, self.llm
        seeds = self._seeds("positions", number)
        positions = Positions(llm, self.drafter, self.noise, next(seeds))
        base, longest = replace(config.sampled, seed=None), llm.checks.longest
        requests = panel(self.names, self.ids, {"": base}, 3 * times * config.texts, panel_requests.lengths(self.most))
        further = min(config.reach, longest) - len(requests[0].ids)
        requests[0] = replace(
            requests[0], params=replace(base, max_tokens=max(base.max_tokens, further), draft_tokens=None)
        )
        settings = {name: replace(params, seed=None) for name, params in self.settings.items()}
        beside = panel(self.names, self.ids, settings, times * config.texts, panel_requests.mix_lengths(self.most))
        beside += panel(self.names, self.ids, among(settings, ENDS), times * config.texts, [self.most])
        alike = {"": base} | among(settings, panel_requests.HISTORY)
        chosen = panel(self.names, self.ids, alike, 2 * times * config.texts, [self.most])
        before, llm.draft_tokens = llm.draft_tokens, self.most
        unseen = self._at_most(0)
        try:
            outputs = positions.decode(requests, seeds, panel_requests.BATCH, self.advance)
            positions.decode(beside, seeds, panel_requests.TOGETHER, self._at_most(len(requests)))
            further_on = continue_requests(requests, outputs, longest)[: config.texts] + self._cross(requests, outputs)
            positions.decode(further_on, seeds, panel_requests.TOGETHER, unseen)
            positions.decode_at_ends(
                panel(self.names, self.ids, settings, 2, [self.most]), seeds, panel_requests.TOGETHER
            )
            llm.draft_tokens, positions.further = SeededLengths(self.most, next(seeds)), [CHOSEN]
            positions.decode(chosen, seeds, panel_requests.TOGETHER, unseen)
        finally:
            llm.draft_tokens = before
        self.data.faults += positions.faults
        return positions

    def _cross(self, requests: Seq[PanelRequest], outputs: Seq[Seq[int]]) -> list[PanelRequest]:
        memory, longest = self.llm.target.capabilities.memory, self.llm.checks.longest
        each = [] if memory is None else cross_requests(requests, outputs, memory.block)
        return [one for one in each if len(one.ids) + one.params.max_tokens <= longest][: self.config.texts]

    def _seeds(self, purpose: str, number: int) -> Iterator[int]:
        """Yield seeds of requests that no other purpose, number or run uses."""
        key = int.from_bytes(purpose.encode(), "little")
        while True:
            yield from np.random.SeedSequence([self.config.seed, key, number]).generate_state(1024, np.uint64).tolist()
            number += 1000

    def warnings(self) -> list[str]:
        messages = []
        for check, row in self.data.coverage.items():
            if row.verdict == UNTESTED:
                messages.append(
                    f"{check}: {row.drafted} draft tokens were verified, {FEWEST_DRAFTED[check]} are needed: not "
                    "tested. Give more prompts, longer texts, or prompts that this drafter can continue"
                )
            elif not row.accepted:
                messages.append(f"{check}: no draft token was accepted, so acceptance itself was not tested")
        if self.stats.drafter_faults:
            messages.append(
                f"the drafter failed {self.stats.drafter_faults} times; plain decoding continued instead, so that is "
                "what was compared"
            )
        return messages
