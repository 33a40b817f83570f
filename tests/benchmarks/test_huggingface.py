"""The comparison with transformers' own loop: contenders, figures, and what its workers answer."""

from pathlib import Path

from benchmarks.derived_models import random_weights
from benchmarks.huggingface import slipstream_worker
from benchmarks.huggingface.__main__ import fastest
from benchmarks.huggingface.lineup import ASSISTED, CONTENDERS, FIGURES, GROUPS, KINDS, models
from benchmarks.peers import transformers_peer
from benchmarks.session import Session
from slipstream import zoo
from slipstream.tokens.text import load_tokenizer


def test_every_group_names_contenders_models_and_figures_that_are_there() -> None:
    known = models("t", "d", "b")
    for group in GROUPS.values():
        for key in group.contenders:
            who = CONTENDERS[key]
            assert who.worker in KINDS
            assert (who.worker, who.model) in known
        for key in group.figures:
            ends = {FIGURES[key].top, FIGURES[key].bottom}
            assert not group.contenders or ends <= {*group.contenders, "assisted"}


def test_the_fastest_assisted_generation_is_what_we_are_compared_with() -> None:
    session = Session("t", "d", contenders=CONTENDERS)
    assert fastest(session) is None
    session.cells = {key: [[2.0 + i, 9.0], [2.0 + i, 1.0]] for i, key in enumerate(ASSISTED)}
    session.cells["confident"] = [[1.0, 1.0], [1.5, 1.5]]
    assert fastest(session) == "confident"
    assert session.series["assisted"] == session.cells["confident"]


def test_every_contender_writes_the_text_of_generate(tmp_path: Path) -> None:
    """On the embedded draft model as target and draft, so that nothing large is loaded."""
    small = str(zoo.draft_dir())
    bad = str(random_weights(tmp_path / "random", zoo.draft_dir()))
    ids = load_tokenizer(small).encode("def add(first, second):")
    texts = {}
    for (worker, name), how in models(small, small, bad).items():
        of = {"slipstream": slipstream_worker, "transformers": transformers_peer}[worker]
        of.load(name=name, **how)
        for length in (0, *([3] if "draft" in how or name == "lookup" else [])):
            texts[worker, name, length] = of.generate(name, ids, 12, length)["tokens"]
    assert len(set(map(tuple, texts.values()))) == 1
    output = slipstream_worker.batch("plain", [ids, ids[:3]], 4, rounds=2)
    assert output["same_texts"]
    assert len(output["together"]) == len(output["apart"]) == 2
