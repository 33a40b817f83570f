"""Tools for the blocks of the tutorial: they run commands as shown, render results as Markdown, and write plots to
files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.cli.report import make_section
from slipstream.measure import plots
from slipstream.measure.results import Result, read
from slipstream.measure.tables import Plot, Section, remark

WIDTH = 100
LONGEST_ALT = 400
"""Most characters of the alternative text of a plot."""
ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Kit:
    """Runs commands and writes plots. folder: working folder of the commands. figures: folder for SVG files. quick: use
    tiny settings. sources: provenance of the measurements so far."""

    folder: Path
    figures: Path
    quick: bool = False
    sources: list[dict[str, Any]] = field(default_factory=list)

    def run(self, command: str, fails: bool = False) -> str:
        """Return the output of a `slipstream` or `python -m` command. Raises CalledProcessError if its exit code is not
        0. fails: also allow exit code 1, which means that a check of the command failed."""
        words = shlex.split(command)
        words = ["-m", "slipstream.cli.main", *words[1:]] if words[0] == "slipstream" else words[1:]
        place = os.environ | {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *words], cwd=self.folder, env=place, capture_output=True, text=True)
        if done.returncode not in ((0, 1) if fails else (0,)):
            sys.stderr.write(done.stderr)
            done.check_returncode()
        return done.stdout.replace(f"{ROOT}/", "")  # no paths of this machine

    def json(self, command: str) -> dict[str, Any]:
        """Return the object that `command --json` prints."""
        output: dict[str, Any] = json.loads(self.run(f"{command} --json"))
        return output

    def measure(self, command: str) -> tuple[Result, Section]:
        """Return the result file that a command writes with --out, and its section."""
        self.run(command, fails=True)
        result = read(self.folder / shlex.split(command)[-1])
        self.sources.append(result.provenance)
        return result, make_section(result)

    def draw(self, name: str, plot: Plot) -> str:
        """Write a plot to a file, and return the Markdown that shows it."""
        self.figures.mkdir(exist_ok=True)
        text = re.sub(r"<metadata>.*?</metadata>\s*", "", plots.draw_svg(plot), flags=re.DOTALL)
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        (self.figures / f"{name}.svg").write_text(text, "utf-8")
        alt = re.sub(r"[\[\]\n]", " ", f"{plot.title}. {textwrap.shorten(plot.alt, LONGEST_ALT, placeholder=' ...')}")
        return f"![{alt}](figures/{name}.svg)\n\n*{plot.title}. {plot.caption}*"


def fence(text: str, kind: str = "sh") -> str:
    body = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    return f"```{kind}\n" + re.sub(r"\n{3,}", "\n\n", body) + "\n```"


def named(section: Section, name: str) -> Plot:
    """Return the plot with this name."""
    return next(plot for plot in section.plots if plot.name == name)


def warnings(result: Result) -> str:
    """Write the warnings of a run, in italics."""
    return "*Warning of this run: " + " ".join(map(remark, result.warnings)) + "*" if result.warnings else ""


def block(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
