"""Runs `slipstream verify` on the embedded models with its default settings, up to the first check that finds a bug."""

import sys
from typing import Any

from slipstream.llm import LLM
from slipstream.measure import prompts
from slipstream.verify.report_verify import VerifyData
from slipstream.verify.verification import Checks, VerifyConfig


def first_bug(options: dict[str, Any], seed: int = 1) -> str | None:
    """Return the check that found a bug, or None. options: arguments of `LLM`."""
    llm = LLM("embedded", **{"draft": "embedded", "threads": 1} | options)
    chosen = prompts.choose_prompts(llm, "code,edit,varied", 9, tokens=48)
    checks = Checks(llm, chosen, VerifyConfig(seed=seed))
    for check in (checks.control, checks.greedy, checks.coupled, checks.distribution):
        check()
        if checks.data.judge() == "BUG":
            return "; ".join(reasons(checks.data))
    return None


def reasons(data: VerifyData) -> list[str]:
    control = data.control
    faults = [f"control {control.behind:.2g}"] if control and control.verdict == "BUG" else []
    wrong = {name: [row for row in rows if row.verdict == "BUG"] for name, rows in data.compared.items()}
    faults += [f"{name} {len(rows)}" for name, rows in wrong.items() if rows]
    for row in data.distribution:
        if row.verdict == "BUG":
            least = min(row.outcomes, key=lambda name: row.outcomes[name], default="ranks")
            faults.append(f"{row.place}: {'impossible' if row.forbidden else least}")
    return [*data.faults[:1], *faults][:4]


if __name__ == "__main__":
    import json

    found = first_bug(json.loads(sys.argv[1]))
    print(f"BUG: {found}" if found else "nothing found")
    sys.exit(found is not None)
