"""Dataclasses of measurements, which `results.to_json` writes and `results.from_json` reads. Fields without a default
are in each file; fields with a default were added later and may be missing. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.strict import JsonObject
from slipstream.measure.tables import Estimate


@dataclass(frozen=True)
class Divergence:
    """The first difference between two outputs.

    position  index of the first differing output token.
    margin    logit of the target's most likely token at this position, minus the logit of the other text's token (or
              the second largest logit, if one text ended earlier).
    noise     how much the logits at this position change with the other rows of the pass (largest |difference|).
    """

    position: int
    margin: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """True if rounding explains the margin: each of the two logits may be off by the noise."""
        return self.margin <= 2 * self.noise

    def __str__(self) -> str:
        verdict = "a near-tie that rounding decides" if self.near_tie else "too far apart for rounding: this is a bug"
        return (
            f"token {self.position}: the target's two best logits are {self.margin:.2g} apart, rounding moves them by "
            f"{self.noise:.2g}: {verdict}"
        )


@dataclass(frozen=True)
class Figures:
    """The figures of one arm over some prompts. stats: from `SpecStats.as_dict`."""

    tokens_per_second: Estimate
    speedup: Estimate
    first_token_seconds: float
    seconds_per_later_token: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    position_rates: list[float]
    shares: dict[str, float]
    stats: JsonObject


@dataclass(frozen=True)
class Forecasted:
    """The prediction of the closed forms for an arm."""

    tokens_per_second: float
    speedup: float
    mean_acceptance_length: float


@dataclass(frozen=True)
class NamedDivergence(Divergence):
    """A divergence, with the name of its prompt."""

    prompt: str


@dataclass(frozen=True)
class BenchArm:
    """One way of decoding under one condition.

    against      index of plain decoding under the same condition; None for plain decoding itself.
    exact        True if every text is identical to plain decoding's, except for near-ties. texts: see `judge_texts`.
    categories   the figures for each category of prompts.
    loops        share of the output tokens in loops, and the looping prompts.
    cells        the single measurements: prompts of each batch, seconds and tokens [batches][passes].
    """

    label: str
    plain: bool
    draft_tokens: int | str
    temperature: float
    batch: int
    against: int | None
    rounds: int
    exact: bool
    texts: str
    divergences: list[NamedDivergence]
    overall: Figures
    categories: dict[str, Figures]
    cells: JsonObject
    loops: JsonObject = field(default_factory=dict)
    context: int | None = None
    predicted: Forecasted | None = None


@dataclass(frozen=True)
class BenchData:
    prompts: JsonObject
    arms: list[BenchArm]


@dataclass(frozen=True)
class TriedToken:
    """A token and its proposer. by: "target", or the name of the drafter (in a stack, of the member).

    p, q  the token's probability under the target and under the drafter. p is taken from the distribution that
          verification used, or, at temperature 0, from the softmax of the target's logits. q is None for tokens of the
          target, and for draft tokens that were chosen deterministically.
    """

    token: int
    by: str
    p: float
    q: float | None

    @property
    def chances(self) -> str:
        return f"p {self.p:.3f}" + ("" if self.q is None else f", q {self.q:.3f}")


@dataclass(frozen=True)
class TracedToken(TriedToken):
    """An output token.

    drafted   True for an accepted draft token.
    step      index of the step, from 0 (prefill); place: index of the token within the step, from 0.
    rejected  draft tokens for this position that were rejected.
    """

    drafted: bool
    step: int
    place: int
    rejected: list[TriedToken]


@dataclass(frozen=True)
class TracedStep:
    """The numbers of verified draft tokens, accepted draft tokens and output tokens of a step."""

    drafted: int
    accepted: int
    tokens: int


@dataclass(frozen=True)
class RollingRate:
    """The acceptance rate over the last steps that drafted (`rate`), and over all steps (`overall`). token: number of
    output tokens so far."""

    token: int
    rate: float
    overall: float


@dataclass(frozen=True)
class TraceData:
    """The data of a trace. prompt: name, text and number of tokens of the prompt. pieces: the text that each token
    adds. vocabulary: id -> text of the token."""

    prompt: JsonObject
    tokens: list[TracedToken]
    pieces: list[str]
    vocabulary: dict[str, str]
    steps: list[TracedStep]
    rolling: list[RollingRate]
    stats: JsonObject
    finish: str | None


Percentiles = dict[str, float]
"""p50, p95, p99, mean and max."""


@dataclass(frozen=True)
class ServedArm:
    """One server under one kind of traffic.

    load      the traffic in words; concurrency, rate, requests, warm_up: as in `Traffic`.
    against   index of the arm with which `ratio` compares this arm; None: no comparison.
    errors    fault -> number of requests; said: the server's answer to a request that failed.
    counted   True if the server reports usage; otherwise pieces of text were counted as tokens.
    first, next, gap, whole, late   see `traffic_figures`; None if no request has this figure.
    counters  the server's counters (`Counters.as_dict`); None if the server shows none.
    cells     the single measurements.
    """

    name: str
    url: str
    load: str
    concurrency: int | None
    rate: float | None
    requests: int
    warm_up: int
    against: int | None
    rounds: int
    answered: int
    errors: dict[str, int]
    said: str
    tokens_per_second: Estimate | None
    ratio: Estimate | None
    requests_per_second: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    counted: bool
    first: Percentiles | None
    next: Percentiles | None
    gap: Percentiles | None
    whole: Percentiles | None
    late: Percentiles | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    cells: JsonObject
    counters: JsonObject | None = None

    @property
    def who(self) -> str:
        return f"{self.name}, {self.load}"


@dataclass(frozen=True)
class TrafficData:
    arms: list[ServedArm]
