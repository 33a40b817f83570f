"""Another library, xgrammar, as oracle: at each token of random texts it allows what our masks allow."""

import random
from typing import Any

import numpy as np
import pytest

from slipstream import Structured, zoo
from slipstream.grammar.compiler import Grammars
from slipstream.grammar.token_bytes import Vocabulary
from slipstream.models.text import load_tokenizer
from tests.grammar.schemas import SCHEMAS

xgrammar: Any = pytest.importorskip("xgrammar", reason="xgrammar is not installed")

V, EOS, MOST_TOKENS = 4096, 0, 48

REGEXES = ["[a-z]+(_[a-z]+)*", "(GET|POST) /[a-z0-9/]{0,12}", r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,4})?", "(é|ü|😀){1,4}"]
EBNF = [
    'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"',
    'root ::= "SELECT " name (", " name)* " FROM " name\nname ::= [a-z_]+',
]
OTHER_VIEWS = {
    "integer in a range": "xgrammar has no -0",
    "const object": "xgrammar writes constants without spaces",
    "unanchored pattern": "xgrammar matches the whole string",
}


@pytest.fixture(scope="module")
def compilers() -> tuple[Grammars, Any]:
    """Ours, and xgrammar's for the same tokens."""
    tokenizer = load_tokenizer(str(zoo.target_dir()))
    written = Vocabulary.of(tokenizer, V).written
    info = xgrammar.TokenizerInfo(written, xgrammar.VocabType.RAW, vocab_size=V, stop_token_ids=[EOS])
    return Grammars(tokenizer, V), xgrammar.GrammarCompiler(info, max_threads=1)


def walk(tested: Any, reference: Any, seed: int, equal: bool) -> None:
    """A random text of tokens that our masks allow. equal: whether both have to allow the same tokens everywhere;
    else theirs has to accept each of ours."""
    draw, output = random.Random(seed), list[int]()
    bits = xgrammar.allocate_token_bitmask(1, V)
    while len(output) < MOST_TOKENS:
        allowed = np.flatnonzero(tested.allowed(output, [[]])[0])
        if tested.complete(output, []):  # nothing may follow, so the request ends here
            assert reference.accept_token(EOS), output
            return
        if equal:
            reference.fill_next_token_bitmask(bits)
            words = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:V]
            assert np.array_equal(np.flatnonzero(words), allowed), output
        token = EOS if EOS in allowed and draw.random() < 0.2 else int(draw.choice(list(allowed)))
        assert reference.accept_token(token), (output, token)
        if token == EOS:
            assert reference.is_terminated()
            return
        output.append(token)


@pytest.mark.parametrize("kind", ["regex", "ebnf"])
def test_masks_of_regular_expressions_and_grammars_are_those_of_xgrammar(compilers: Any, kind: str) -> None:
    grammars, other = compilers
    for source in REGEXES if kind == "regex" else EBNF:
        form = Structured(regex=source) if kind == "regex" else Structured(grammar=source)
        compiled = other.compile_regex(source) if kind == "regex" else other.compile_grammar(source)
        for seed in range(4):
            walk(grammars.constraint(form, frozenset([EOS])), xgrammar.GrammarMatcher(compiled), seed, equal=True)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in OTHER_VIEWS])
def test_texts_that_meet_a_json_schema_are_accepted_by_xgrammar(compilers: Any, name: str) -> None:
    """Not equal: xgrammar ignores some keywords, and allows other spaces."""
    grammars, other = compilers
    compiled = other.compile_json_schema(SCHEMAS[name], any_whitespace=True)
    for seed in range(3):
        tested = grammars.constraint(Structured(json_schema=SCHEMAS[name]), frozenset([EOS]))
        walk(tested, xgrammar.GrammarMatcher(compiled), seed, equal=False)
