"""Lists the files and functions through which one greedy step with a draft model runs.

    python -m benchmarks.step_walk [--list] [--draft-tokens 4]

A function is a code object of the package. A comprehension belongs to its function, as in Python 3.12, where it has no
frame of its own; a generator counts. A hop is a call or return from one file of the package to another. Only the thread
that calls `Engine.step` is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import slipstream
from slipstream.core.params import SamplingParams
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.engine import Engine
from slipstream.llm import LLM

PACKAGE = Path(slipstream.__file__).parent
WARM_STEPS = 12
"""Number of steps before the profiled step, in which the prompt is read, caches are filled, and the cost of draft
lengths is learnt."""


@dataclass
class Walk:
    """Collects the functions that a call runs. calls: how often each function was entered."""

    calls: dict[CodeType, int] = field(default_factory=dict)
    hops: int = 0
    _file: str = ""

    @property
    def files(self) -> list[str]:
        """Return the files, as paths inside the package."""
        return sorted({str(Path(code.co_filename).relative_to(PACKAGE)) for code in self.calls})

    @property
    def functions(self) -> list[str]:
        """Return the functions, each with its file in front."""
        return sorted(f"{Path(code.co_filename).relative_to(PACKAGE)}  {name_of(code)}" for code in self.calls)

    def watch(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count an event of `sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>"):
            return
        if event == "call":
            self.calls[code] = self.calls.get(code, 0) + 1
        if code.co_filename != self._file:
            self.hops += bool(self._file)
            self._file = code.co_filename


def name_of(code: CodeType) -> str:
    return f"{getattr(code, 'co_qualname', code.co_name)}:{code.co_firstlineno}"  # co_qualname: from Python 3.11 on


def walk(call: Callable[[], object]) -> Walk:
    """Run a call and return the functions that it ran."""
    seen = Walk()
    sys.setprofile(seen.watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def step_walk(draft_tokens: int | DraftLengths = 4) -> Walk:
    """Profile one step with a draft, in the middle of a greedy output of the embedded models."""
    llm = LLM("embedded", draft="embedded")
    engine = Engine(llm.target, llm.drafter, llm.rule, draft_tokens, llm.max_batch)
    seq = llm.sequence("def add(a, b):", SamplingParams(max_tokens=256))
    engine.add(seq)
    for _ in range(WARM_STEPS):
        engine.step()
    while True:  # until a step has a draft: a plain step may be timed in between
        proposed = seq.stats.proposed
        seen = walk(engine.step)
        if seq.stats.proposed > proposed:
            return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also list the functions")
    parser.add_argument("--draft-tokens", default="4", help="draft tokens a step, or auto")
    given = parser.parse_args()
    seen = step_walk(DraftLengths() if given.draft_tokens == "auto" else int(given.draft_tokens))
    print(f"{len(seen.files)} files, {len(seen.functions)} functions, {seen.hops} hops from file to file")
    if given.list:
        print(*seen.functions, sep="\n")


if __name__ == "__main__":
    main()
