"""`python -m benchmarks.architectures`: the table in docs/support.md is that of the installed transformers."""

import pytest
import transformers

from benchmarks.architectures.__main__ import bad, names
from benchmarks.architectures.table import PAGE, RUN, listed, replaced
from benchmarks.architectures.tiny import SIZES, shrunk
from benchmarks.architectures.worker import CRASHED, NOT_BUILT, ONE_EACH, PACKED, REFUSED, Found, tried
from slipstream.targets.huggingface import kinds

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_has_every_architecture_as_the_package_says_and_no_text_differs() -> None:
    if f"transformers {transformers.__version__}," not in TEXT:
        pytest.skip("another version of transformers is installed than docs/support.md was made with")
    assert sorted(listed(TEXT)) == names(), "run `make architectures`"
    assert set(listed(TEXT).values()) <= {*RUN.values(), REFUSED, NOT_BUILT}
    here = listed(TEXT)
    for name, kind in kinds.ARCHITECTURES.items():
        if name in here and "encoder-decoder" not in kind.name:
            assert (here[name] == RUN[PACKED]) == kind.trees, name


@pytest.mark.parametrize("name", ["bloom", "gemma4_text", "rwkv"])
def test_an_architecture_that_is_tried_anew_is_where_the_table_has_it(name: str) -> None:
    outcome = tried(name).outcome
    assert RUN.get(outcome, outcome) == listed(TEXT)[name]


def test_sizes_become_small_and_each_kind_of_layer_is_kept() -> None:
    config = shrunk(transformers.Gemma4Config).get_text_config()
    assert (config.hidden_size, config.vocab_size) == (SIZES["hidden_size"], SIZES["vocab_size"])
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.head_dim for layer in config.per_layer_config] == [8, 16]


def test_a_page_keeps_what_stands_around_the_table() -> None:
    outcomes = {"a": Found(PACKED), "b": Found(ONE_EACH, note="float32"), "c-d": Found(REFUSED, "no <cache>"),
             "e": Found(NOT_BUILT, "ValueError: x\n y")}  # fmt: skip
    page = replaced(replaced(TEXT, {}), outcomes)
    assert listed(page) == {"a": RUN[PACKED], "b": RUN[ONE_EACH], "c-d": REFUSED, "e": NOT_BUILT}
    assert replaced(page, {}) == replaced(TEXT, {})
    assert "4 architectures: 2 run, 1 are refused, 1 were not built" in page
    assert not bad(outcomes)
    assert bad({"f": Found(CRASHED)})
