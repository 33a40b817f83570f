"""Plants faults and reports which are found: see the docstring of the package."""

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

from tests.mutants.planted import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
LIMIT = 600
"""Time limit of one command in seconds. A fault with which a command hangs counts as found."""


def source(mutant: Mutant) -> Path:
    return ROOT / "slipstream" / Path(*mutant.module.split(".")).with_suffix(".py")


class Planted(SourceFileLoader):
    """Loads a module with one line changed."""

    def __init__(self, mutant: Mutant):
        super().__init__(f"slipstream.{mutant.module}", str(source(mutant)))
        self.mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        assert text.count(self.mutant.old) == 1, f"{self.mutant.name}: the line is not there once"
        return compile(text.replace(self.mutant.old, self.mutant.new), self.path, "exec")


class Finder:
    """Finds the module of a mutant in this process."""

    def __init__(self, mutant: Mutant):
        self.name, self.loader = f"slipstream.{mutant.module}", Planted(mutant)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
        assert spec is not None
        spec.loader = self.loader  # type: ignore[assignment]
        return spec


def run_planted(mutant: Mutant, command: list[str]) -> None:
    """Run `-m MODULE ARGUMENTS` in this process with the mutant planted."""
    sys.meta_path.insert(0, Finder(mutant))  # type: ignore[arg-type]
    assert command[0] == "-m"
    sys.argv = command[1:]
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def finds(mutant: Mutant, command: list[str]) -> tuple[bool, float, str]:
    """Run a command with the mutant planted. Returns (whether the command fails, seconds of processor time, last line
    of its output)."""
    before = os.times()
    run = [sys.executable, "-m", "tests.mutants", mutant.name, "--run", "--", *command]
    try:
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
        failed, text = done.returncode != 0, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        failed, text = True, "no end"
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    lines = [line for line in text.splitlines() if line.startswith(("BUG", "FAILED", "ERROR", "Error", "error"))]
    return failed, spent, (lines or text.splitlines() or [""])[0][:100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants; default: all")
    parser.add_argument("--run", action="store_true", help="run the command after -- with this one mutant")
    parser.add_argument("--only", choices=("verify", "tests"), help="run only verify, or only tests")
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.run:
        run_planted(chosen[0], command)
        return
    caught = {"verify": 0, "tests": 0, "either": 0}
    for mutant in chosen:
        found, notes = {}, []
        for way in ("verify", "tests"):
            if options.only not in (None, way):
                continue
            tests = [f"tests/{name}" for name in mutant.tests]
            ways = {
                "verify": ["-m", "tests.mutants.first_bug", json.dumps(dict(mutant.verify))],
                "tests": ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            }
            start = time.monotonic()
            found[way], spent, line = finds(mutant, ways[way])
            caught[way] += found[way]
            said = "finds" if found[way] else "MISSES"
            notes.append(f"{way} {said} it, {spent:.0f} s of processor time, {time.monotonic() - start:.0f} s: {line}")
        caught["either"] += any(found.values())
        print(f"{mutant.module}: {mutant.name}", *notes, sep="\n    ", flush=True)
    print(f"{len(chosen)} faults: " + ", ".join(f"{way} {n}" for way, n in caught.items()))


if __name__ == "__main__":
    main()
