"""Texts of the embedded model under JSON schemas, sampled at temperature 1, are valid with every drafter.

`jsonschema` is the oracle.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from slipstream import LLM, SamplingParams, Structured
from slipstream.drafters.registry import DRAFTERS, Needs
from tests.grammar.schemas import SCHEMAS

MADE = [
    name
    for name, spec in DRAFTERS.items()
    if spec.needs not in (Needs.EARLY_EXIT, Needs.MTP_LAYERS) and name not in ("eagle", "dflash")  # no such head ships
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", executor="torch", dtype="float32", draft_tokens=4)


@pytest.mark.parametrize("name", MADE)
def test_sampled_texts_are_valid_with_every_drafter(llm: LLM, name: str) -> None:
    needs = DRAFTERS[name].needs
    options = {"model": "embedded"} if needs is Needs.DRAFT_MODEL or name == "hybrid" else {}
    llm.use(name, **options)
    each = [
        SamplingParams(structured=Structured(json_schema=schema), temperature=1.0, seed=seed, max_tokens=96)
        for seed, schema in enumerate(SCHEMAS.values())
    ]
    done = llm.generate(["import json\n\nvalue = "] * len(each), each)
    for schema, completion in zip(SCHEMAS.values(), done, strict=True):
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
        assert not completion.stats.drafter_faults
    finished = sum(completion.finish_reason == "stop" for completion in done)
    assert finished >= len(SCHEMAS) / 2, "too few to be a test"


def test_any_object_and_a_value_after_a_free_part(llm: LLM) -> None:
    llm.use("suffix")
    for seed in range(5):
        how: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 96}
        completion = llm.generate("value = ", SamplingParams(structured=Structured(json_object=True), **how))[0]
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), dict)
        form = Structured(json_schema={"enum": [1, 2]}, after="=")
        completion = llm.generate("def f(x):\n", SamplingParams(structured=form, **how))[0]
        if "=" in completion.text and completion.finish_reason == "stop":
            assert json.loads(completion.text.partition("=")[2]) in (1, 2)
