"""`python -m benchmarks.architectures` tries every causal architecture of the installed transformers, as a tiny model.

    python -m benchmarks.architectures                    # all architectures; writes the table in docs/support.md
    python -m benchmarks.architectures bloom gemma4_text  # only these two; prints the results

Each architecture runs in its own process with limited memory and time. The exit code is 1 if an output differs from the
output of `generate`, or if an error is not one of Slipstream's own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.architectures.table import PAGE, replaced
from benchmarks.architectures.worker import CRASHED, DIFFERS, Found, confine, tried

SECONDS = 120
"""Time limit of one architecture."""


def names() -> list[str]:
    """Return the `model_type` of every causal language model of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _in_child(model_type: str, to: Any) -> None:
    confine()
    to.send(tried(model_type))


def apart(model_type: str) -> Found:
    """Call `tried` in a new process, which is forked and so has imported all modules already."""
    fork = multiprocessing.get_context("fork")
    receiver, its = fork.Pipe(duplex=False)
    child = fork.Process(target=_in_child, args=(model_type, its), daemon=True)
    child.start()
    its.close()
    try:
        if receiver.poll(SECONDS):
            outcome: Found = receiver.recv()
            return outcome
        return Found(CRASHED, f"took more than {SECONDS} seconds")
    except EOFError:
        child.join()
        return Found(CRASHED, f"the process ended with exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument("model_type", nargs="*", help="all of them by default")
    asked = parser.parse_args(words).model_type
    outcomes: dict[str, Found] = {}
    for model_type in asked or names():
        one = outcomes[model_type] = apart(model_type)
        words = f"{model_type}: {one.outcome} {one.why} {one.note}"
        print(" ".join(words.split()), file=sys.stderr, flush=True)
    if not asked:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), outcomes), encoding="utf-8")
    return int(bad(outcomes))


def bad(outcomes: Mapping[str, Found]) -> bool:
    return any(one.outcome in (DIFFERS, CRASHED) for one in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
