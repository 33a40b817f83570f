"""`slipstream verify --base-url URL --against URL`: compares a server that speculates with one that does not.

Only texts and log-probabilities are visible from outside, so both servers must serve the same model with the same
sampling parameters, and the comparison is between two samples:

    greedy    the same prompts at temperature 0. Log-probabilities of the shared beginning give the noise between the
              servers. The reference answers twice, which shows whether its own texts are stable. At the first
              difference, the reference's margin between the two tokens is compared with the noise: a small margin is a
              near-tie, a large margin a bug.
    sampled   texts with other seeds at each server. For each prompt, a permutation test of the counts of all
              n-grams of up to three tokens, in which whole texts change sides (exact for any dependence within a text).
              Over all prompts together, the same test of how often a token is the most frequent follower of the token
              before it, the second most frequent, and so on. `choices` computes the size of faults that it finds.

A server that drafts nothing passes every comparison, so its counters are read before and after each check; with fewer
draft tokens than in `verification` the check is "not tested".

As in `verification`, a sampled test that fails at level `SCREEN` is repeated on new samples, and only the second
p-value decides, at a level that keeps the probability of a false alarm over all tests below `level`.
"""

import asyncio
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.core.params import Strict, integer, number, option
from slipstream.core.sequence import count_common
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import ParameterError
from slipstream.measure.counters import Counters
from slipstream.measure.endpoint import Answer, Endpoint
from slipstream.measure.provenance import note_conditions, text_digest
from slipstream.measure.results import Result, record
from slipstream.measure.tables import Alarm, Column, Section, Table, small, tabulate, words
from slipstream.measure.traffic_client import TrafficClient
from slipstream.verify.choices import count_choices, smallest_shift
from slipstream.verify.outcomes import SCREEN, decisive_level
from slipstream.verify.report_verify import mark, shorten
from slipstream.verify.texts import BUG, IDENTICAL, TIE
from slipstream.verify.verification import FEWEST_DRAFTED, POWER, SAME, UNTESTED

BLIND_TO = (
    "What this comparison cannot see: whose tokens were drafted, if others use the server, too; faults of both; "
    "biases too small for this many samples; other prompts, sampling parameters and loads."
)
UNJUDGED = "differs; without logprobs it cannot be judged"
NGRAMS = 3
PERMUTATIONS = 4999
FLOOR = 1e-3
"""Smallest assumed noise of log-probabilities, in nats, because servers round them."""


@dataclass(frozen=True)
class ServedConfig(Strict):
    """tokens       length of the greedy texts.
    samples      sampled texts of each prompt at each server.
    length       length of the sampled texts.
    temperature  of the sampled texts.
    clients      requests in flight at once.
    level        probability that two equal servers are called different, over all tests.
    more         further sampling parameters of all requests, by their names in the API.
    """

    tokens: int = option(128, check=integer(1))
    samples: int = option(200, check=integer(1))
    length: int = option(16, check=integer(1))
    temperature: float = option(1.0, check=number(0.0, 100.0, open_low=True))
    clients: int = option(8, check=integer(1))
    level: float = option(1e-3, check=number(0.0, 0.5, open_low=True))
    seed: int = option(0, check=integer(0))
    more: JsonMapping = field(default_factory=dict)


ALL_PROMPTS = "all prompts"


@dataclass(frozen=True)
class ServedText:
    """A compared greedy text. repeats: True if the reference gave the same text twice. noise, in nats: how far
    log-probabilities differ. position: place of the first difference; margin: the reference's margin there."""

    prompt: str
    tokens: int
    repeats: bool
    noise: float
    verdict: str
    position: int | None
    margin: float | None


@dataclass(frozen=True)
class SampledPrompt:
    """A test of samples. p, second_p: p-values of the permutation test, and of its repetition on new samples, which
    decides at `level`. smallest_shift: from `choices.smallest_shift`; None: not known."""

    prompt: str
    samples: int
    p: float
    second_p: float | None
    level: float
    verdict: str
    smallest_shift: float | None = None


@dataclass(frozen=True)
class ServedCoverage:
    """Numbers of draft and accepted tokens at the server, and of draft tokens at the reference; None: unknown."""

    drafted: float | None
    accepted: float | None
    reference: float | None
    verdict: str


@dataclass
class ServedData:
    verdict: str = "ok"
    coverage: dict[str, ServedCoverage] = field(default_factory=dict)
    greedy: list[ServedText] = field(default_factory=list)
    sampled: list[SampledPrompt] = field(default_factory=list)


def count_requests(prompts: int, config: ServedConfig) -> int:
    """Return how often `verify_served` calls `advance`, if no test is repeated."""
    return prompts * (3 + 2 * config.samples)


def verify_served(
    served: Endpoint, reference: Endpoint, prompts: Seq[tuple[str, str]], config: ServedConfig,
    out: str | Path | None = None, advance: Callable[[], None] = lambda: None,
) -> Result:  # fmt: skip
    """Compare `served`, which speculates, with `reference`. prompts: (name, text) of each. Writes the result to `out`
    after each check. Raises ServedError if a server cannot be reached or refuses, ParameterError if both are equal."""
    one, other = (place.base_url.rstrip("/").replace("//localhost", "//127.0.0.1") for place in (served, reference))
    if one == other:
        raise ParameterError(f"{one} would be compared with itself", fix="start a second server without speculation")
    served, reference = served.resolve(), reference.resolve()
    places = {"served": served.base_url, "reference": reference.base_url}
    models = {"served_model": served.model, "reference_model": reference.model}
    about = note_conditions(config.seed, prompts=text_digest(*(text for _, text in prompts)))
    result = Result("verify-served", places | models | asdict(config), about)
    data = ServedData()

    def collect() -> ServedData:
        rows: list[Any] = [*data.greedy, *data.sampled, *data.coverage.values()]
        said = {row.verdict for row in rows}
        data.verdict = next((each for each in (BUG, UNTESTED) if each in said), "ok")
        return data

    with record(result, out, collect) as save, ThreadPoolExecutor(config.clients) as pool:
        before = [read_counters_of(place) for place in (served, reference)]
        for check, compare, fewest in (("greedy", _greedy, "greedy"), ("sampled", _sample, "distribution")):
            getattr(data, check).extend(compare(served, reference, prompts, config, pool, advance))
            after = [read_counters_of(place) for place in (served, reference)]
            (drafted, accepted), (shared, _) = map(count_drafted, before, after)
            tested = "not known" if drafted is None else "tested" if drafted >= FEWEST_DRAFTED[fewest] else UNTESTED
            data.coverage[check] = ServedCoverage(drafted, accepted, shared, tested)
            if shared:
                result.warnings.append(
                    f"{check}: the reference drafted {shared:.0f} tokens: shared faults are not seen"
                )
            if drafted and not accepted:
                result.warnings.append(f"{check}: no draft token was accepted, so acceptance itself was not tested")
            before = after
            save()
    if any(row.verdict == UNJUDGED for row in data.greedy):
        result.warnings.append("a server gives no logprobs: rounding and a bug look the same where greedy texts differ")
    return result


def read_counters_of(place: Endpoint) -> Counters | None:
    """Read the server's counters; None if it shows no known counters."""

    async def read() -> Counters | None:
        async with TrafficClient(place, place.timeout) as client:
            return await client.counters()

    return asyncio.run(read())


def count_drafted(before: Counters | None, after: Counters | None) -> tuple[float | None, float | None]:
    """Return the numbers of draft tokens (of drafts, if the server does not count tokens) and of accepted tokens
    between two readings; None: not known."""
    if before is None or after is None:
        return None, None
    seen = after.since(before).as_dict()
    if seen["drafts"] is None and (seen["server"] == "llamacpp" or seen["accept_length"]):
        return None, None
    return seen["draft_tokens"] or seen["drafts"] or 0.0, seen["accepted_tokens"]


def _greedy(
    served: Endpoint, reference: Endpoint, prompts: Seq[tuple[str, str]], config: ServedConfig,
    pool: ThreadPoolExecutor, advance: Callable[[], None],
) -> list[ServedText]:  # fmt: skip
    def ask(place: Endpoint, text: str) -> Answer:
        answer = place.complete(text, config.tokens, 0.0, config.seed, 5, config.more)
        advance()
        return answer

    asked = [[pool.submit(ask, place, text) for place in (served, reference, reference)] for _, text in prompts]
    answers = [[future.result() for future in row] for row in asked]
    noise = max((measure_noise(*pair) for a, b, c in answers for pair in ((a, b), (b, c))), default=0.0)
    return [
        ServedText(name, len(fast.tokens), plain.text == again.text, noise, *judge_texts(fast, plain, noise))
        for (name, _), (fast, plain, again) in zip(prompts, answers, strict=True)
    ]


def measure_noise(a: Answer, b: Answer) -> float:
    """Return the largest difference of a token's log-probability in the shared beginning of two answers, in nats."""
    same = count_common(a.tokens, b.tokens)
    return max((abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True)), default=0.0)


def judge_texts(fast: Answer, plain: Answer, noise: float) -> tuple[str, int | None, float | None]:
    """Return the verdict on two greedy texts, the position of the first difference, and the margin there in nats."""
    if fast.text == plain.text:
        return IDENTICAL, None, None
    at = count_common(fast.tokens, plain.tokens)
    if not plain.top or not fast.tokens or at >= len(plain.top):
        return UNJUDGED, at, None
    likely = plain.top[at]
    taken = likely.get(fast.tokens[at]) if at < len(fast.tokens) else None
    # A token that is not reported among the most likely tokens has at least the margin of the last of them.
    margin = max(likely.values()) - (taken if taken is not None else min(likely.values()))
    tie = taken is not None and margin <= 2 * max(noise, FLOOR)
    return TIE if tie else BUG, at, margin


def _sample(
    served: Endpoint, reference: Endpoint, prompts: Seq[tuple[str, str]], config: ServedConfig,
    pool: ThreadPoolExecutor, advance: Callable[[], None],
) -> list[SampledPrompt]:  # fmt: skip
    decisive = decisive_level(config.level, len(prompts) + 1)

    def draw(place: Endpoint, i: int, side: int, look: int) -> list[tuple[str, ...]]:
        """Sample texts, and return the tokens of each, or its characters if the server does not report tokens."""
        key = [config.seed, i, side, look]
        seeds = np.random.SeedSequence(key).generate_state(config.samples, np.uint32).tolist()

        def ask(seed: int) -> Answer:
            answer = place.complete(prompts[i][1], config.length, config.temperature, seed, 0, config.more)
            advance()
            return answer

        return [tuple(answer.tokens or answer.text) for answer in pool.map(ask, seeds)]

    @cache
    def samples(look: int, i: int) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        return draw(served, i, 0, look), draw(reference, i, 1, look)

    def look_at(name: str, texts: int, test: Callable[[int], float]) -> SampledPrompt:
        """Run a test, and repeat it on new samples if it fails. Returns the row of the report."""
        p = test(0)
        second = test(1) if p < SCREEN else None
        said = BUG if second is not None and second < decisive else SAME
        return SampledPrompt(name, texts, p, second, decisive, said)

    def of_prompt(i: int, look: int) -> float:
        return compare_ngrams(*samples(look, i), np.random.default_rng([config.seed, i, look]))

    def of_all(look: int) -> float:
        each = [count_choices(*samples(look, i)) for i in range(len(prompts))]
        return permute(each, np.random.default_rng([config.seed, len(prompts), look]), PERMUTATIONS)

    rows = [look_at(name, config.samples, partial(of_prompt, i)) for i, (name, _) in enumerate(prompts)]
    together = look_at(ALL_PROMPTS, config.samples * len(prompts), of_all)
    shift = smallest_shift([samples(0, i) for i in range(len(prompts))], config.level)
    return [*rows, replace(together, smallest_shift=shift)]


def compare_ngrams(
    one: Seq[Seq[str]], other: Seq[Seq[str]], rng: np.random.Generator, permutations: int = PERMUTATIONS
) -> float:
    """Return the p-value for two samples of texts from one distribution, by the counts of n-grams (n = 1, 2, 3)."""
    texts = [*one, *other]
    index: dict[tuple[str, ...], int] = {}
    places = [
        [
            index.setdefault(tuple(text[i : i + n]), len(index))
            for n in range(1, NGRAMS + 1)
            for i in range(len(text) - n + 1)
        ]
        for text in texts
    ]
    counts = np.zeros((len(texts), max(1, len(index))), dtype=np.float32)  # [texts, n-grams]
    for row, place in zip(counts, places, strict=True):
        np.add.at(row, place, 1.0)
    counts = counts[:, counts.sum(0) > 1]  # an n-gram that occurs once does not change the statistic
    return permute([(counts[: len(one)], counts[len(one) :])], rng, permutations)


def permute(groups: Seq[tuple[np.ndarray, np.ndarray]], rng: np.random.Generator, permutations: int) -> float:
    """Return the p-value of the hypothesis that both samples of each group have the same distribution. A sample is the
    number of occurrences of each kind (of n-gram, for example) in each text, float32 [texts, kinds].

    Statistic: sum over kinds of (a - b)^2 / (a + b), a and b the counts of all groups together. Texts change sides
    within their group, so the test is exact for any dependence within a text. The smallest p-value is
    1 / (permutations + 1).
    """
    total = sum(one.sum(0) + other.sum(0) for one, other in groups)
    weights = 1 / np.maximum(total, 1)
    apart = sum(one.sum(0) / max(1, len(one)) - other.sum(0) / max(1, len(other)) for one, other in groups)
    seen = float((apart**2 * weights).sum())
    above = 0
    for start in range(0, permutations, 100):
        times = min(100, permutations - start)
        difference = np.zeros((times, len(total)), dtype=np.float32)
        for one, other in groups:
            counts = np.concatenate([one, other])
            shares = np.full((times, len(counts)), 1 / max(1, len(one)), dtype=np.float32)
            for row in shares:
                row[rng.permutation(len(counts))[: len(other)]] = -1 / max(1, len(other))
            difference += shares @ counts
        above += int(((difference**2 * weights).sum(-1) >= seen * (1 - 1e-6)).sum())
    return (1 + above) / (1 + permutations)


def make_section(result: Result) -> Section:
    data, settings = result.read_data(ServedData), result.settings
    shown = Section("Do two servers give the same output?", _lead(data, settings))
    shown.tables += [_greedy_table(data.greedy)] if data.greedy else []
    shown.tables += [_make_sampled_table(data.sampled, settings)] if data.sampled else []
    shown.notes.append(BLIND_TO)
    return shown


def _lead(data: ServedData, settings: JsonObject) -> str:
    what = f"{settings['served']} and {settings['reference']}"
    if data.verdict == BUG:
        return Alarm(f"BUG: {what} do not give the same output.")
    if data.verdict == UNTESTED:
        few = [f"{row.drafted:.0f} ({name})" for name, row in data.coverage.items() if row.verdict == UNTESTED]
        return Alarm(f"Not tested: {settings['served']} drafted too few tokens: {', '.join(few)}.")
    known = [row.drafted for row in data.coverage.values() if row.drafted is not None]
    drafts = f"{sum(known):.0f} tokens were drafted" if known else "whether anything was drafted is not known"
    same = sum(row.verdict == IDENTICAL for row in data.greedy)
    shift = data.sampled[-1].smallest_shift if data.sampled else None
    power = f", found with probability {POWER:g}: the most likely token {shift:.1%} too often" if shift else ""
    return (
        f"No difference found between {what} that rounding does not explain: {same} of {len(data.greedy)} greedy "
        f"texts identical, {sum(row.prompt != ALL_PROMPTS for row in data.sampled)} prompts sampled "
        f"{settings['samples']} times each (false-alarm probability {settings['level']:g}{power}); {drafts}."
    )


def _greedy_table(rows: list[ServedText]) -> Table:
    columns = [
        words("prompt", lambda row: shorten(row.prompt)),
        Column("tokens", cell=lambda row: row.tokens),
        words("reference repeats", lambda row: "yes" if row.repeats else "no"),
        Column("differs at token", cell=lambda row: row.position),
        Column("margin", "g", 3, cell=lambda row: row.margin),
        words("verdict", lambda row: mark(row.verdict)),
    ]
    return tabulate(
        "Greedy texts", rows, columns,
        f"Log-probabilities of shared beginnings differ by at most {small(rows[0].noise)} nats. A near-tie is a "
        "margin of at most twice that. Reference repeats: it gave the same text twice.",
    )  # fmt: skip


def _make_sampled_table(rows: list[SampledPrompt], settings: JsonObject) -> Table:
    columns = [
        words("prompt", lambda row: shorten(row.prompt)),
        Column("samples", cell=lambda row: row.samples),
        Column("p", "g", 2, cell=lambda row: row.p),
        Column("p, again", "g", 2, cell=lambda row: row.second_p),
        words("verdict", lambda row: mark(row.verdict)),
    ]
    return tabulate(
        f"Sampled texts of {settings['length']} tokens", rows, columns,
        f"p: permutation test over whole texts, by their n-grams. Again: p-value on new samples, if the first p-value "
        f"was below {SCREEN:g}; then only this value decides. {ALL_PROMPTS.capitalize()}: how often a token is the "
        "most frequent follower of the token before it, the second most frequent, and so on; a total variation is "
        "between these shares.",
    )  # fmt: skip
