"""docs/server.md lists every field and every metric, as the code has them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from slipstream.core.stats import SpecStats
from slipstream.server.fields import ENDPOINTS, FIELDS
from slipstream.server.server_metrics import ServerMetrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE, DASHBOARD = (DOCS / "server.md").read_text(encoding="utf-8"), DOCS / "grafana.json"


def fields() -> list[str]:
    rows = ["| field | where | |", "|---|---|---|"]
    for each in FIELDS:
        where = "all" if each.where == ENDPOINTS else ", ".join(each.where)
        rows.append(f"| `{each.name}` | {where} | {'refused: ' if each.refused else ''}{each.text} |")
    return rows


def metrics() -> list[str]:
    rows = ["| metric | kind | |", "|---|---|---|"]
    for each in ServerMetrics("m", kv_blocks=(16, 64)).registry.collect():
        name = each.name.removeprefix("slipstream:") + ("_total" if each.type == "counter" else "")
        rows.append(f"| `{name}` | {each.type} | {each.documentation} |")
    return rows


def test_every_metric_of_the_dashboard_exists_and_has_its_labels() -> None:
    metrics = ServerMetrics("m")
    metrics.ended("stop", 1, 1, SpecStats(steps=2, proposed=2, accepted=1, accepted_at=Counter({1: 1})))
    samples = {sample.name: sample.labels for family in metrics.registry.collect() for sample in family.samples}
    shown = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in shown["panels"] for target in panel["targets"]]
    for query in [*queries, *(each["query"] for each in shown["templating"]["list"])]:
        names = re.findall(r"slipstream:\w+", query)
        assert names or query == "prometheus"
        for name in names:
            assert name in samples, f"{name} of the dashboard is no metric"
        for label in re.findall(r"by \((\w+)\)", query):
            assert label in samples[names[0]]
    assert queries


@pytest.mark.parametrize(("name", "rows"), [("fields", fields()), ("metrics", metrics())])
def test_the_page_lists_what_the_code_has(name: str, rows: list[str]) -> None:
    shown = PAGE.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    assert shown.strip().splitlines() == rows
