"""Writes the verdicts of `verify` as a JUnit file, which CI systems show test by test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from slipstream.measure.results import Result
from slipstream.verify.served import UNJUDGED
from slipstream.verify.texts import BUG
from slipstream.verify.verification import CHECKS, FEW, UNTESTED

KINDS = {BUG: "failure", UNJUDGED: "error", UNTESTED: "skipped", FEW: "skipped"}


def write_junit(file: Path, result: Result | None, failed: str = "") -> None:
    """Write a test case for each verdict, and a test case for the end of the run. failed: why the run ended early."""
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


def _cases(data: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield (check, name, verdict, details) for each verdict in a `VerifyData` or `ServedData`."""
    control = getattr(data, "control", None)
    rows = {"control": [control] if control else [], **{name: getattr(data, name, []) for name in (*CHECKS, "sampled")}}
    for check, each in rows.items():
        for row in each:
            names = ("prompt", "place", "draft_tokens", "batch")
            named = [str(getattr(row, name)) for name in names if hasattr(row, name)]
            yield check, ", ".join(named) or "logits", row.verdict, str(row)
    for i, fault in enumerate(getattr(data, "faults", [])):
        yield "texts", f"fault {i + 1}", BUG, fault
    for check, row in data.coverage.items():
        yield "coverage", check, row.verdict, str(row)
