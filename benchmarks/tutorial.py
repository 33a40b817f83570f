"""Writes every figure, table and measured number of docs/tutorial.md between marks in this file.

make figures                                # all blocks, ten minutes on a quiet machine, with SmolLM2 installed
make figures FIGURES="--only lengths tracker"
make figures FIGURES=--still                # only blocks that are computed and not measured; takes seconds
make figures FIGURES=--quick                # tiny settings: does everything run?

<!-- figure:NAME -->     rewritten by `BLOCKS[NAME]`, which runs the command that the block then shows
<!-- /figure -->
<!-- output -->          after a Python snippet: the output of the snippet
<!-- /output -->
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from benchmarks import tutorial_blocks as blocks
from benchmarks.tutorial_kit import Kit
from slipstream.zoo import has_smollm2

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"
FIGURE = re.compile(r"(<!-- figure:([\w-]+) -->\n)(.*?)(<!-- /figure -->)", re.DOTALL)
SNIPPET = re.compile(r"```python\n(.*?)```\n\n<!-- output -->\n(.*?)<!-- /output -->", re.DOTALL)

Block = Callable[[Kit], str]
STILL: dict[str, Block] = {
    "closed-form": blocks.closed_form,
    "pairs": blocks.pairs,
    "drafters": blocks.drafters,
    "load": blocks.load,
}
"""Blocks that are computed, so that they are the same in every run. Tests compare them with the tutorial."""
MEASURED: dict[str, Block] = {
    "prices": blocks.prices,
    "check-pair": blocks.check_pair,
    "lookups": blocks.lookups,
    "verify": blocks.verify,
    "bench": blocks.bench,
    "tune": blocks.tune,
    "gpt2": blocks.gpt2,
    "lengths": blocks.lengths,
    "tracker": blocks.tracker,
    "batches": blocks.batches,
    "origin": blocks.origin,  # last, because it describes the machine and the measurements before
}
BLOCKS = STILL | MEASURED
OF_SMOLLM2 = ("prices", "lookups", "bench", "tune", "lengths", "tracker", "batches")
"""Blocks that need SmolLM2. If it is not installed, these blocks are not changed."""


def snippets(text: str) -> list[tuple[str, str]]:
    """Return the tutorial's Python snippets, with the output that it shows."""
    return [(code, shown_output(output)) for code, output in SNIPPET.findall(text)]


def shown_output(block: str) -> str:
    """Return the text inside the code fence of an output block."""
    match = re.search(r"```text\n(.*?)```", block, re.DOTALL)
    return match.group(1) if match else ""


def run_snippet(code: str) -> str:
    """Run a snippet, and return its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {"__name__": "snippet"})
    return out.getvalue()


def with_outputs(text: str) -> str:
    """Return the tutorial with the current output of its snippets."""

    def again(match: re.Match[str]) -> str:
        printed = f"```text\n{run_snippet(match.group(1))}```"
        return f"```python\n{match.group(1)}```\n\n<!-- output -->\n{printed}\n<!-- /output -->"

    return SNIPPET.sub(again, text)


def with_figure(text: str, name: str, figure: str) -> str:
    """Return the tutorial with the content of one block replaced."""
    return FIGURE.sub(lambda m: f"{m[1]}{figure.strip()}\n{m[4]}" if m[2] == name else m[0], text)


def lacking(name: str) -> str | None:
    """Return why a block cannot be made here, or None if it can."""
    if name not in OF_SMOLLM2 or has_smollm2():
        return None
    return f"{name}: left as it is, SmolLM2 is not installed (make .venv/.smollm2)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=sorted(BLOCKS), default=None, help="names of the blocks to write")
    parser.add_argument("--still", action="store_true", help="only blocks that are computed and not measured")
    parser.add_argument("--quick", action="store_true", help="tiny settings")
    options = parser.parse_args()
    chosen = options.only or list(STILL if options.still else BLOCKS)
    with tempfile.TemporaryDirectory() as folder:
        kit = Kit(Path(folder), TUTORIAL.parent / "figures", options.quick)
        for name in BLOCKS:
            if name in chosen and (why := lacking(name)):
                print(why, file=sys.stderr)
            elif name in chosen:
                began = monotonic()
                block = BLOCKS[name](kit)
                # Read again and written immediately, so that an interruption keeps the finished blocks.
                TUTORIAL.write_text(with_figure(TUTORIAL.read_text("utf-8"), name, block), "utf-8")
                print(f"{name}: {monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if not options.only:
        TUTORIAL.write_text(with_outputs(TUTORIAL.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
