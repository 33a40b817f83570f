"""`slipstream report`."""

import copy
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from slipstream.cli.report import SECTIONS, make_page, make_section, write_page
from slipstream.errors import ResultError
from slipstream.measure.provenance import public
from slipstream.measure.results import Result, to_json


@pytest.fixture
def result_file(cli, pair, tmp_path):
    path = tmp_path / "t.json"
    cli("trace", "def add", *pair, "--drafter", "ngram", "-n", "12", "--out", path, code=0)
    return path


def test_one_page_of_several_results(cli, result_file, tmp_path):
    """Also of a file with several runs of a benchmark."""
    run, several, out = json.loads(result_file.read_text()), tmp_path / "several.json", tmp_path / "out.html"
    several.write_text(json.dumps({"figures": [], "runs": {"one": run, "two": run}}))
    result = cli("report", result_file, several, "--out", out, code=0)
    assert out.read_text().count("<h1") == 3
    assert 'aria-label="Contents"' in out.read_text()
    assert f"wrote {out}" in result.said
    several.write_text(json.dumps({"runs": {"one": run, "two": {}}}))
    assert "run 'two', is not a result file" in cli("report", several).said


VOID = {"meta", "br", "input", "img", "link", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what the tests ask about."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def results(bench_result, grid_result, trace_result) -> list[Result]:
    return [bench_result, grid_result, trace_result]


@pytest.fixture(scope="module")
def text(results) -> str:
    return make_page(results)


def test_no_two_columns_of_a_table_have_one_name(results):
    for result in results:
        for table in make_section(result).tables:
            headings = [column.heading for column in table.columns]
            assert len(headings) == len(set(headings)), table.title


def test_the_page_is_well_formed_fetches_nothing_and_its_tables_have_captions_and_headers(text):
    parsed = Page(text)
    assert len(parsed.ids) == len(set(parsed.ids))
    for tag, attrs in parsed.tags:
        assert attrs.get("aria-labelledby", parsed.ids[0]) in parsed.ids
        if tag == "use":
            assert attrs["xlink:href"][1:] in parsed.ids
        assert tag not in ("link", "img", "iframe")
        assert "src" not in attrs
        assert not str(attrs.get("href", "#")).startswith("http")
    assert "@import" not in text
    assert "url(http" not in text
    regions = [a for t, a in parsed.tags if t == "div" and a.get("role") == "region"]
    assert len(regions) == sum(t == "table" for t, _ in parsed.tags)
    assert all(a["aria-label"] for a in regions)
    assert {a["scope"] for t, a in parsed.tags if t == "th"} == {"col", "row"}


def test_every_figure_states_date_machine_and_what_it_shows(text, results):
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.DOTALL)
    assert len(captions) == sum(len(make_section(r).plots) for r in results)
    for caption in captions:
        assert results[0].provenance["date"][:10] in caption
        assert "cores" in caption
        unseen = re.search(r'class="unseen">(.*?)</span>', caption, re.DOTALL)
        assert len(unseen.group(1)) > 10


def test_a_figure_is_drawn_once_in_colours_of_the_page_and_its_text_is_legible_on_a_phone(text, results):
    """On a phone, 358 of its 390 pixels are left for a drawing."""
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) == sum(len(make_section(r).plots) for r in results)
    for figure in figures:
        assert figure.count("<svg ") == 1
        width = float(re.search(r'width="100%" viewBox="0 0 ([\d.]+) ', figure)[1])
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px", figure))) * 358 / width > 10
        assert "var(--c0)" in figure
        assert not re.search(": #(1b1f24|0072b2|ffffff)", figure)
    assert re.search(r"figure svg \{[^}]*width: 100%; max-width: \d+rem; height: auto;", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_model_output_is_escaped(trace_result):
    result = copy.deepcopy(trace_result)
    evil = "</script><img src=x onerror=alert(1)>"
    result.data = replace(
        result.data, pieces=[evil] * len(result.data.pieces), vocabulary=dict.fromkeys(result.data.vocabulary, evil),
        prompt={"text": evil},
    )  # fmt: skip
    result.warnings = [evil]
    result.provenance["command"] = evil
    text = make_page([result])
    assert not [tag for tag, _ in Page(text).tags if tag == "img"]
    assert "</script><img" not in text
    assert not [tag for tag, _ in Page(text).tags if tag == "script"]


def test_every_token_of_a_trace_says_where_it_is_from(trace_result):
    parsed = Page(make_page([trace_result]))
    said = [a["title"] for t, a in parsed.tags if t == "span" and "title" in a]
    tokens = trace_result.data.tokens
    assert len(said) == len(tokens) == 40
    for text, token in zip(said, tokens, strict=True):
        assert text.startswith(f"step {token.step + 1}: ")
        assert f"p {token.p:.3f}" in text
        assert (", q " in text.partition(";")[0]) == token.drafted
        assert text.count("rejected: ") == len(token.rejected)


def test_an_interrupted_run_is_marked(bench_result):
    result = copy.deepcopy(bench_result)
    result.complete = False
    assert "The run was interrupted" in make_page([result])
    result.data = replace(result.data, arms=[])
    assert "Nothing was measured" in make_page([result])


def test_unknown_and_damaged_results_are_refused(bench_result, tmp_path):
    with pytest.raises(ResultError, match="did you mean 'bench'"):
        make_section(Result("bensh", {}, {}))
    result = Result(**vars(bench_result) | {"data": to_json(bench_result.data)})
    del result.data["arms"][0]["overall"]["shares"]
    with pytest.raises(ResultError, match="lacks data that its report needs"):
        make_page([result])
    with pytest.raises(ResultError, match="does not exist"):
        write_page([bench_result], tmp_path / "no" / "x.html")
    assert {"bench", "trace"} <= set(SECTIONS)


def test_a_command_stands_once_in_its_section_and_without_private_paths(bench_result):
    private = Result(**vars(bench_result))
    line = "slipstream bench /home/me/my-prompts.jsonl -m org/model"
    private.provenance = bench_result.provenance | {"command": line}
    text = make_page([private])
    assert text.count("slipstream bench my-prompts.jsonl -m org/model") == 2  # in its line, and among the conditions
    assert "/home/me" not in text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("-m /data/models/Llama-3 -o out/r.json", "-m Llama-3 -o out/r.json"),
        ("-m org/model https://host/a/b", "-m org/model https://host/a/b"),
        ("--out=/tmp/r.json 1/2", "--out=r.json 1/2"),
        ("~/models/x", "x"),
    ],
)
def test_absolute_paths_are_shortened_to_their_last_name(said, shown):
    assert public(said) == shown
