"""Prompts, a target with slow passes, and a drafter that knows the target's output."""

from pathlib import Path

from slipstream.core.drafter import Drafter
from slipstream.llm import LLM
from slipstream.measure.benchmark import Contender
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.measure.results import Result
from slipstream.measure.tuning import TuneConfig, tune
from tests.drafters.scripted_drafters import Script, ScriptedDrafter, right
from tests.measure.clock import sleep
from tests.targets.toy import ToyTarget

PROMPTS = PromptSet("made up", [Prompt([1, 2], "a", "1"), Prompt([3, 4, 0], "a", "2"), Prompt([5], "a", "3")], "0")


class Slow(ToyTarget):
    """A target whose passes take 2 ms, and `row` seconds for each row after the first."""

    row = 0.0

    def run(self, seqs, draft, taps=()):
        sleep(0.002 + self.row * len(draft))
        return super().run(seqs, draft, taps)


def scripted(target: ToyTarget, script: Script = right) -> ScriptedDrafter:
    texts = {tuple(p.ids): LLM(target, draft_tokens=4).generate([p.ids])[0].token_ids for p in PROMPTS.prompts}
    return ScriptedDrafter(texts, target.vocab_size, script)


def tuned(target: ToyTarget, drafter: Drafter, config: TuneConfig, length: int = 4, out: Path | None = None) -> Result:
    """Return the result of `tune` for one drafter."""
    return tune(LLM(target, draft_tokens=4), [Contender("planted", drafter, length)], PROMPTS, config, out)
