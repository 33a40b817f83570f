"""`slipstream verify`: checks that speculation does not change the output of a target, with a given drafter, rule and
sampling parameters.

Four checks, each of which can fail:

    control       no drafter: the target's own text, scored one row per pass and k + 1 rows per pass. A difference of
                  the logits is rounding, or a bug in the target; each token must be the target's most likely one.
    greedy        texts with and without the drafter at temperature 0: identical, a tie within the measured noise, or a
                  bug. Each text alone with K draft tokens; all in one batch with one draft token, and with two; and
                  beside requests with other parameters (`panel_requests`). Each token of the texts without the
                  drafter must be the one that the reference picks.
    coupled       the same above temperature 0, with rule `coupled` and one seed: the random numbers belong to
                  positions, so the text depends only on the target and the seed.
    distribution  samples under the given rule against the target's exact distribution: every position of whole texts,
                  and pairs of neighbouring positions (`outcomes`).

Every text must end where its parameters say.

The reference is computed from the target's logits by code of its own (`reference`). A test of a distribution
that fails at level `SCREEN` is repeated on new samples, and only the second p-value decides (see `decisive_level`). So
a correct run is called a bug with a probability of at most `level`, over all tests.

A check in which too few draft tokens were verified says "not tested": equal texts would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.bench.prompts import PromptSet
from slipstream.bench.provenance import provenance
from slipstream.bench.results import Result, recording
from slipstream.errors import ParameterError
from slipstream.verify.checks import CHECKS, UNTESTED, Checks, VerifyConfig
from slipstream.verify.texts import BUG, LOSSY, passes

if TYPE_CHECKING:
    from slipstream.llm import LLM


def steps(prompts: PromptSet, config: VerifyConfig, draft_tokens: int) -> int:
    """How often `verify` calls `advance`, if no test is repeated."""
    n = len(prompts.prompts)
    of_texts = n * (1 + len(passes(draft_tokens, n)))
    of_check = {"greedy": of_texts, "coupled": of_texts, "distribution": 6 * config.texts}
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
    config = replace(config, params=llm.defaults.fill(config.params))
    if llm.drafter.name == "none" or not llm.most_draft_tokens:
        raise ParameterError("there is no drafter to check", fix="name one: --drafter ngram, with --draft-tokens > 0")
    settings = {
        "drafter": label or llm.drafter.name,
        "draft_tokens": llm.most_draft_tokens,
        "rule": llm.rule.name,
        "lossless": llm.rule.lossless,
        **asdict(config),
    }
    result = Result("verify", settings, provenance(llm, config.seed, prompts=prompts.digest))
    data = empty(prompts)
    check = Checks(llm, prompts, config, data, advance)

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
    finally:
        llm.use(drafter)
        llm._rule = rule
    return result


def empty(prompts: PromptSet) -> dict[str, Any]:
    """What `Checks` fill in."""
    rows: dict[str, Any] = {name: [] for name in (*CHECKS, "faults")}
    return {"prompts": prompts.as_dict(), "control": None, "coverage": {}, "sampled_tokens": 0, **rows}


def overall(data: dict[str, Any]) -> str:
    """ "BUG" if any check found one, "lossy" if only a lossy rule changed texts, "not tested" if too little was drafted
    in a check, else "ok"."""
    said = [row["verdict"] for name in CHECKS for row in data[name]]
    if data["control"] is not None:
        said.append(data["control"]["verdict"])
    said += [row["verdict"] for row in data["coverage"].values()] + [BUG] * bool(data["faults"])
    return next((each for each in (BUG, LOSSY, UNTESTED) if each in said), "ok").replace(LOSSY, "lossy")
