"""`slipstream verify` on the embedded models with its default settings, up to the first check that finds a bug."""

import sys
from typing import Any

from slipstream.bench import prompts
from slipstream.llm import LLM
from slipstream.verify.verification import Checks, VerifyConfig


def first_bug(options: dict[str, Any], seed: int = 1) -> str | None:
    """What found it, or None. options: of `LLM`."""
    llm = LLM("embedded", **{"draft": "embedded", "threads": 1} | options)
    chosen = prompts.load(llm, "code,edit,varied", 9, tokens=48)
    checks = Checks(llm, chosen, VerifyConfig(seed=seed))
    for check in (checks.control, checks.greedy, checks.coupled, checks.distribution):
        check()
        if checks.overall == "BUG":
            return "; ".join(reasons(checks.data))
    return None


def reasons(data: dict[str, Any]) -> list[str]:
    rows = {k: [row for row in data[k] if row["verdict"] == "BUG"] for k in ("greedy", "coupled", "distribution")}
    faults = [f"control {data['control']['behind']:.2g}"] if data["control"]["verdict"] == "BUG" else []
    faults += [f"{name} {len(values)}" for name, values in rows.items() if values and name != "distribution"]
    for row in rows["distribution"]:
        least = min(row["outcomes"], key=row["outcomes"].get, default="ranks")
        faults.append(f"{row['place']}: {'impossible' if row['forbidden'] else least}")
    return [*data["faults"][:1], *faults][:4]


if __name__ == "__main__":
    import json

    found = first_bug(json.loads(sys.argv[1]))
    print(f"BUG: {found}" if found else "nothing found")
    sys.exit(found is not None)
