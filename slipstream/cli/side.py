"""One prompt decoded plainly, by the drafter alone, and speculatively: `/side` of a chat."""

from __future__ import annotations

from slipstream.cli import render
from slipstream.cli.generate import run
from slipstream.core.params import SamplingParams
from slipstream.drafters.model import ModelDrafter
from slipstream.llm import LLM, Completion, Prompt


def three_ways(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Decode one after the other, so that they do not compete for the CPU, and stream each text."""
    request, drafter = llm.sequence(prompt, params).asked, llm.drafter  # checks the prompt before anything is printed
    alone = LLM(drafter.model, tokenizer=llm.tokenizer) if isinstance(drafter, ModelDrafter) else None
    plain: Completion | None = None
    for title, engine in (("plain", llm), ("drafter alone", alone), ("speculative", llm)):
        render.out().print(f"--- {title}", style="bold")
        if engine is None:
            render.line(f"{drafter.name!r} cannot generate text alone: it is not a model")
            continue
        try:
            if title == "plain":
                llm.use(None)
            done, finish = run(engine, request, params, shown=True, legend=False)
        finally:
            llm.use(drafter)
        if not render.out().is_terminal:
            print()  # elsewhere a text ends with its last character
        plain = plain or done
        said = render.summary(done.stats, llm.rule.name, done.lossless, finish)
        if finish == "interrupted":
            render.line(said)
            break
        render.line(f"{said}; {against_plain(llm, params, plain, done)}" if title == "speculative" else said)


def against_plain(llm: LLM, params: SamplingParams, plain: Completion, fast: Completion) -> str:
    """Whether the speculative text is the plain one, or why it need not be."""
    if plain.token_ids == fast.token_ids:
        return "identical text"
    if not llm.rule.lossless:
        return f"differs from plain: the rule {llm.rule.name} is lossy"
    if not params.greedy and llm.rule.name != "coupled":
        return "another sample of the same distribution (rule coupled or temperature 0 would repeat the plain text)"
    if not params.greedy and params.seed is None:
        return "another sample: no seed is set"
    return "differs from plain: `slipstream verify` tells rounding from a bug"
