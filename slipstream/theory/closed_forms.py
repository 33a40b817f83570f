"""The closed forms of speculative decoding, with the letters of the papers.

    alpha   acceptance rate: probability that a draft token is accepted, E[sum min(p, q)]
    gamma   draft length: draft tokens per step
    c       cost coefficient: time of one draft step over time of one target step
    tau     tokens per step, including the bonus token

Functions of alpha assume that every draft token is accepted with the same probability, independently of the others.
Measured acceptance falls with depth, so measured speed-ups are lower. Functions of rates by position do not need this
assumption. Sources: Leviathan et al. 2211.17192 ("L"), Chen et al. 2302.01318, Sun et al. 2403.10444.

`predict` takes measured rates, costs and overheads.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.errors import ParameterError
from slipstream.theory.cost_curve import CostCurve


def expect_tokens(alpha: float, gamma: int) -> float:
    """Return tau = (1 - alpha^(gamma + 1)) / (1 - alpha): tokens per step (L, equation 1)."""
    return sum(alpha**i for i in range(gamma + 1))  # the same sum, also right at alpha = 1


def step_cost(gamma: int, c: float, costs: CostCurve | None = None, batch: int = 1, host: float = 0.0) -> float:
    """Return the time of one speculative step over the time of one decode step, for gamma draft tokens per sequence.

    costs  time of the target by rows: batch * (gamma + 1) rows in a speculative step, `batch` rows in a decode step.
           None: verification costs no more than a decode step, as L assumes.
    host   fixed work of a speculative step that a decode step does not have, in decode steps.
    """
    verification = 1 if costs is None else costs(batch * (gamma + 1)) / costs(batch)
    return gamma * c + verification + (host if gamma else 0)


def speedup(
    alpha: float, gamma: int, c: float, costs: CostCurve | None = None, batch: int = 1, host: float = 0.0
) -> float:
    """Return the expected speed-up over plain decoding, tau / `step_cost`. Without `costs` and `host` this is L's tau /
    (gamma c + 1), which assumes that verification costs no more than a decode step (L, theorem 3.8)."""
    return expect_tokens(alpha, gamma) / step_cost(gamma, c, costs, batch, host)


def best_gamma(
    alpha: float, c: float, longest: int = 256, costs: CostCurve | None = None, batch: int = 1, host: float = 0.0
) -> int:
    """Return the draft length with the greatest expected speed-up, at most `longest`; 0 if no draft pays; the shortest
    among equals. All lengths are tried: a measured cost curve has steps, and after a step the speed-up may rise again.
    """
    return best_length(geometric_rates(alpha, longest), c, costs, batch, host)


def best_length(
    position_rates: Seq[float], c: float, costs: CostCurve | None = None, batch: int = 1, host: float = 0.0
) -> int:
    """Return the best draft length as `best_gamma`, from rates by position."""
    best, most, tokens = 0, 1.0, 1.0
    for gamma, rate in enumerate(position_rates, start=1):
        tokens += rate
        gain = tokens / step_cost(gamma, c, costs, batch, host)
        if gain > most:
            best, most = gamma, gain
    return best


def break_even(gamma: int, c: float, costs: CostCurve | None = None, batch: int = 1, host: float = 0.0) -> float | None:
    """Return the smallest acceptance rate at which drafts of length gamma are no slower than plain decoding, or None.

    If verification is free and gamma is 1, this rate is c (L, corollary 3.9). Raises ParameterError unless
    gamma >= 1 and the costs are numbers >= 0."""
    check_integer("gamma", gamma, 1)
    for name, value in (("c", c), ("host", host)):
        check_number(name, value, 0.0, float("inf"))
    cost = step_cost(gamma, c, costs, batch, host)
    return None if cost > gamma + 1 else smallest(lambda alpha: expect_tokens(alpha, gamma) >= cost)


def smallest(enough: Callable[[float], bool], low: float = 0.0, high: float = 1.0) -> float:
    """Return the smallest number from `low` to `high` from which on `enough` is true; else `high`."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def geometric_rates(alpha: float, gamma: int) -> list[float]:
    """Return the share of steps that accept draft token 1, ..., gamma, if each is accepted with probability alpha."""
    return [alpha**j for j in range(1, gamma + 1)]


def check_rates(rates: Seq[float]) -> None:
    """Raise ParameterError unless these can be rates by position: one or more in [0, 1] that never rise."""
    if not rates:
        raise ParameterError("no acceptance rate was given", fix="give one for each position: 0.73, 0.52, 0.35")
    for j, rate in enumerate(rates, start=1):
        check_number(f"the rate at position {j}", rate, 0.0, 1.0)
        if j > 1 and rate > rates[j - 2]:
            raise ParameterError(
                f"the rate at position {j} is {rate:g}, above {rates[j - 2]:g} at position {j - 1}",
                why="a draft token is accepted only if all tokens before it are accepted, so rates cannot rise",
                fix="give each rate as a share of all steps, not of the steps that accepted the token before",
            )


def expect_length(position_rates: Seq[float]) -> float:
    """Return tau = 1 + the sum of the shares of steps that accept the draft token at position 1, 2, ... Exact for any
    rates if every step drafts to full depth: the expectation of a count is the sum of P(count >= j)."""
    return 1 + sum(position_rates)


@dataclass(frozen=True)
class Prediction(Strict):
    """The expectation that `predict` computes for one text (or, without a length, for one step in the long run).

    tau      tokens per step, including the bonus token, without the prefill step.
    steps    number of steps after the prefill step.
    seconds  seconds of the speculative text, in parts: prefill, draft, target, host.
    plain_seconds  seconds of the same text in plain decoding, including prefill.
    """

    tau: float
    steps: float
    seconds: dict[str, float]
    plain_seconds: float

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.total_seconds


def predict(
    position_rates: Seq[float],
    costs: CostCurve,
    draft_seconds: float,
    *,
    drafted: Seq[float] | None = None,
    step_host: float = 0.0,
    plain_host: float = 0.0,
    prefill: float = 0.0,
    draft_prefill: float = 0.0,
    tokens: int | None = None,
) -> Prediction:
    """Predict the time of a text from measured rates and costs, with chains of len(position_rates) draft tokens per
    step.

    position_rates  as `SpecStats.position_rates`: of the steps that draft at depth j or deeper, the share that accept
                    draft token j. For shorter drafts of the same drafter, give only the first rates.
    costs           seconds of the target by rows (`measure_costs`).
    draft_seconds   seconds of drafting and observing, per step.
    drafted         share of the steps that draft at depth j or deeper (drafted_at[j] / steps that could draft); None:
                    every step drafts to full depth. n-gram drafters often draft nothing.
    step_host, plain_host   seconds of a speculative step, and of a plain step, without draft and target.
    prefill  seconds of the target in the step that reads the prompt and yields the first token; plain decoding takes
             them, too. draft_prefill: seconds of the drafter in this step.
    tokens          length of the text; the shorter drafts at its end are computed exactly. None: the average of a long
                    text, without prefill.

    Exact if acceptance in a step is independent of earlier steps and of the draft length. The expected time of the last
    n tokens is one step with at most n - 1 draft tokens, plus the expected time of the tokens that then remain. Raises
    ParameterError for rates or shares that cannot have been measured, and for less than one token."""
    for j, rate in enumerate(position_rates, start=1):
        check_number(f"the rate at position {j}", rate, 0.0, 1.0)
    if drafted is not None:
        check_rates(drafted)
        if len(drafted) != len(position_rates):
            raise ParameterError(
                f"{len(position_rates)} rates by position were given, but {len(drafted)} shares of steps",
                fix="give one share for each rate",
            )
    if tokens is not None:
        check_integer("tokens", tokens, 1)
    deep = [1.0, *(drafted or [1.0] * len(position_rates)), 0.0]  # share of the steps at depth j or deeper
    reach = [1.0, *(rate * share for rate, share in zip(position_rates, deep[1:], strict=False))]
    plain = costs(1) + plain_host

    def verification(room: int) -> float:
        """Return the target's seconds in a step that may draft `room` deep."""
        return sum((here - below) * costs(min(depth, room) + 1) for depth, (here, below) in enumerate(pairwise(deep)))

    longest = len(position_rates)
    tau = sum(reach)
    if tokens is None:
        spent = {"prefill": 0.0, "draft": draft_seconds, "target": verification(longest), "host": step_host}
        return Prediction(tau, 1.0, spent, tau * plain)
    exactly = [a - b for a, b in zip(reach, [*reach[1:], 0.0], strict=True)]  # chance to accept 0, 1, ...
    full = verification(longest)
    done = [(0.0, 0.0, 0.0)]  # [n]: steps, steps that may draft, and seconds of the target for n tokens
    for left in range(1, tokens):
        room = min(longest, left - 1)
        chances = [*exactly[:room], reach[room]]
        rests = [done[left - 1 - accepted] for accepted in range(room + 1)]
        steps, drafting, target = (sum(p * r[i] for p, r in zip(chances, rests, strict=True)) for i in range(3))
        done.append((steps + 1, drafting + bool(room), target + (full if room == longest else verification(room))))
    steps, drafting, target = done[-1]
    spent = {
        "prefill": prefill + draft_prefill,
        "draft": drafting * draft_seconds,
        "target": target,
        "host": drafting * step_host + (steps - drafting) * plain_host,
    }
    return Prediction(tau, steps, spent, prefill + (tokens - 1) * plain)
