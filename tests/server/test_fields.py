"""Every sampling parameter can be asked for, and arrives as it was sent; docs/server.md lists each field and metric."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.declaration import declared
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.core.structured import Structured
from slipstream.server.fields import CHAT, COMPLETIONS, ENDPOINTS, FIELDS, check_fields, fields_of, read_sampling_params
from slipstream.server.server_metrics import ServerMetrics
from tests.core.changed_parameters import CHANGED

DOCS = Path(__file__).parents[2] / "docs"
PAGE, DASHBOARD = (DOCS / "server.md").read_text(encoding="utf-8"), DOCS / "grafana.json"
SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def params(where: str, **body: Any) -> SamplingParams:
    return read_sampling_params(check_fields(json.loads(json.dumps(body)), fields_of(where)), where, 100)


@pytest.mark.parametrize("where", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", sorted(declared(SamplingParams)))
def test_every_sampling_parameter_arrives_as_it_was_sent(name: str, where: str) -> None:
    value = CHANGED[name]
    sent: dict[str, Any] = {name: value}
    if name == "structured":
        sent = {"structured_outputs": {"regex": value.regex}}
    elif name == "draft_tokens":
        sent = {"speculation": {"draft_tokens": value}}
    elif name == "logprobs" and where == CHAT:
        sent = {"logprobs": True, "top_logprobs": value}
    assert getattr(params(where, **sent), name) == value


def test_what_is_not_given_is_the_apis_default() -> None:
    assert params(COMPLETIONS) == SamplingParams(temperature=1.0, max_tokens=16)
    assert params(CHAT) == SamplingParams(temperature=1.0, max_tokens=100)
    assert read_sampling_params({}, COMPLETIONS, 5).max_tokens == 5


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured(json_object=True)),
        ({"response_format": NAMED}, Structured(json_schema=SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, Structured(json_schema=SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Structured(json_object=True)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structured(json_schema=SCHEMA)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structured(choice=["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Structured(grammar='start: "a"')),
    ],
)
def test_forms_are_understood_in_each_way_of_writing_them(body: dict[str, Any], form: Structured | None) -> None:
    assert params(CHAT, **body).structured == form


def test_each_field_is_listed_once_under_all_its_names_and_explained() -> None:
    assert params(CHAT, max_completion_tokens=7).max_tokens == 7
    assert params(CHAT, max_completion_tokens=7, max_tokens=7).max_tokens == 7
    names = [(where, each.name) for each in FIELDS for where in each.where]
    assert len(names) == len(set(names))
    assert all(each.text for each in FIELDS)


def fields() -> list[str]:
    """Fields of the same endpoints with the same explanation share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in FIELDS:
        where = "all" if each.where == ENDPOINTS else ", ".join(each.where)
        rows.setdefault((where, ("refused: " if each.refused else "") + each.text), []).append(f"`{each.name}`")
    listed = [f"| {', '.join(names)} | {where} | {text} |" for (where, text), names in rows.items()]
    return ["| field | where | |", "|---|---|---|", *listed]


def metrics() -> list[str]:
    rows = ["| metric | kind | |", "|---|---|---|"]
    for each in ServerMetrics("m", kv_blocks=(16, 64)).registry.collect():
        name = each.name.removeprefix("slipstream:") + ("_total" if each.type == "counter" else "")
        rows.append(f"| `{name}` | {each.type} | {each.documentation} |")
    return rows


def test_every_metric_of_the_dashboard_exists_and_has_its_labels() -> None:
    metrics = ServerMetrics("m")
    metrics.count_choice("stop", 1, 1, SpecStats(steps=2, proposed=2, accepted=1, accepted_at=Counter({1: 1})))
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
