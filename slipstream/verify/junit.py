"""Writes the verdicts of `verify` as a JUnit file, which CI systems show test by test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from slipstream.bench.results import Result
from slipstream.verify.texts import BUG
from slipstream.verify.verification import CHECKS, FEW, UNTESTED

KINDS = {BUG: "failure", UNTESTED: "skipped", FEW: "skipped"}


def write_junit(file: Path, result: Result | None, failed: str = "") -> None:
    """Write a test case for each verdict, and one that says how the run ended. failed: why it ended early."""
    suite = xml.Element("testsuite", name="slipstream verify")
    for check, name, verdict, details in [] if result is None else _cases(result.data):
        case = xml.SubElement(suite, "testcase", classname=check, name=name)
        if verdict in KINDS:
            xml.SubElement(case, KINDS[verdict], message=verdict).text = details
    run = xml.SubElement(suite, "testcase", classname="run", name="complete")
    if result is None or not result.complete:
        xml.SubElement(run, "error", message=failed or "the run was interrupted")
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    file.write_bytes(xml.tostring(suite, encoding="utf-8", xml_declaration=True))


def _cases(data: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(check, name, verdict, details) of each verdict in the data of a result."""
    if data.get("control"):
        yield "control", "logits", data["control"]["verdict"], str(data["control"])
    for check in (*CHECKS, "sampled"):
        for row in data.get(check, ()):
            how = [f"K={row['draft_tokens']} batch={row['batch']}"] if "batch" in row else []
            yield check, ", ".join([row.get("prompt") or row["place"], *how]), row["verdict"], str(row)
    for i, fault in enumerate(data.get("faults", ())):
        yield "texts", f"fault {i + 1}", BUG, fault
    for check, row in data["coverage"].items():
        yield "coverage", check, row["verdict"], str(row)
