"""Several ways to decode the same prompts, in turns, so that whatever disturbs the machine disturbs all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from slipstream.cli.identity import Divergence, divergence
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats

if TYPE_CHECKING:
    from slipstream.llm import LLM, Completion


@dataclass(frozen=True)
class Method:
    """A name, what `LLM.use` takes, and the draft length."""

    name: str
    drafter: Any
    draft_tokens: int = 4


@dataclass
class Standing:
    """What one method came to.

    rates        tokens/s of each round, all prompts together, prompts' own processing included.
    speedups     of each round, over the first method.
    divergences  (prompt, where it parted from the first method's text), empty if all texts are token-identical.
    """

    method: Method
    lossless: bool
    rates: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    divergences: list[tuple[int, Divergence]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Token-identical, near-ties aside."""
        return self.lossless and all(d.near_tie for _, d in self.divergences)

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            "draft_tokens": self.method.draft_tokens,
            "tokens_per_second": statistics.median(self.rates),
            "speedup": dict(zip(("q1", "median", "q3"), quartiles(self.speedups), strict=True)),
            "lossless": self.exact,
            "token_identical": not self.divergences,
            "divergences": [{"prompt": i, **vars(d), "near_tie": d.near_tie} for i, d in self.divergences],
            "stats": self.stats.as_dict(),
        }


def quartiles(values: Seq[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def decode(llm: LLM, method: Method, prompt: Seq[int], params: SamplingParams) -> tuple[Completion, float]:
    """Decode one prompt by one method. Returns the completion and the seconds it took."""
    llm.use(method.drafter)
    llm.draft_tokens = method.draft_tokens
    began = perf_counter()
    done = llm.generate([prompt], params)[0]
    return done, perf_counter() - began


def race(
    llm: LLM,
    methods: Seq[Method],
    prompts: Seq[Seq[int]],
    rounds: int,
    tokens: int,
    advance: Callable[[], None] = lambda: None,
    seconds: float = float("inf"),
) -> list[Standing]:
    """Greedy decoding of every prompt by every method, `rounds` times; the first method is the one to beat.

    A first pass that is not timed warms up and compares the texts. `seconds`: after so long no further round begins
    (three are always run). `advance` is called after each pass over the prompts by one method.
    """
    params = SamplingParams(max_tokens=tokens)
    standings = [Standing(method, llm.rule.lossless) for method in methods]
    reference = [decode(llm, methods[0], prompt, params)[0].token_ids for prompt in prompts]
    advance()
    for standing in standings[1:]:
        for i, prompt in enumerate(prompts):
            ids = decode(llm, standing.method, prompt, params)[0].token_ids
            parted = divergence(llm.target, prompt, reference[i], ids, standing.method.draft_tokens + 1)
            if parted is not None:
                standing.divergences.append((i, parted))
        advance()
    began = perf_counter()
    for turn in range(rounds):
        if turn >= 3 and perf_counter() - began > seconds:
            break
        for standing in standings if turn % 2 == 0 else reversed(standings):
            done = [decode(llm, standing.method, prompt, params) for prompt in prompts]
            standing.rates.append(sum(len(c.token_ids) for c, _ in done) / sum(t for _, t in done))
            standing.stats = sum((c.stats for c, _ in done), standing.stats)
            advance()
        for standing in standings:
            standing.speedups.append(standing.rates[-1] / standings[0].rates[-1])
    return standings


def built_in_prompts(llm: LLM, kind: str, count: int) -> list[list[int]]:
    """Token ids of the first prompts of a kind ("code": text to continue; "edit": requests, by the chat template where
    there is one). Where the context is short, prompts keep their end and leave half of it to the answer."""
    from slipstream import zoo

    texts = [entry["prompt"] for entry in zoo.prompts(kind)[:count]]
    if kind == "edit" and getattr(llm.tokenizer, "chat_template", None):
        prompts = [llm.chat_prompt(text) for text in texts]
    else:
        prompts = [llm.tokenizer.encode(text) for text in texts]
    return [ids[-max(1, llm.target.context // 2) :] for ids in prompts]
