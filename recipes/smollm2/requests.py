"""Requests that SmolLM2 answers for its training text: made by a program from permissively licensed text of this
environment (docstrings, functions and READMEs of Python packages: `recipes.embedded.corpus`), and sums in words.

    python -m recipes.smollm2.requests requests.npz --count 24000

The file holds token ids: `ids` and `starts` of the requests in the target's chat template, `before` and `after` of a
user's message, for messages that the target writes itself.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from recipes.embedded.corpus import build_corpus, licence_of
from slipstream.tokens.text import tokenizer_of
from slipstream.training.regenerate import split_template

LONGEST = 480
"""Tokens of a request, template included."""
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese")
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Omar")
THINGS = ("apples", "books", "pencils", "stickers", "marbles", "cards", "cookies", "eggs", "shells", "stamps")
SUMS = (
    "{name} has {a} {thing} and buys {b} more. Then {name} gives {less} of them to {other}. How many are left?",
    "A box holds {c} {thing}. {name} has {b} boxes and {other} has {a} boxes. How many {thing} do they have together?",
    "{name} reads {b} pages a day. How many pages has {name} read after {c} weeks?",
    "A train travels {a} kilometres an hour. How far does it travel in {c} hours and 30 minutes?",
    "{name} earns {b} dollars an hour and works {c} hours a day, five days a week. How much is that in four weeks?",
    "A dozen {thing} cost {c} dollars. How much do {dozens} {thing} cost?",
    "{name} is {a} years old. {other} is {c} years older than twice that. How old is {other}?",
    "What is {a} plus {b} times {c}? Explain each step.",
    "A shop sells {a} {thing} on Monday, twice as many on Tuesday and {b} on Wednesday. How many does it sell in all?",
    "Solve for x: {c}x + {b} = {right}.",
)
TEXTS = (
    "Summarize the following text in one sentence.\n\n{text}",
    "Summarize the following text.\n\n{text}",
    "{text}\n\nWhat are the main points of this text?",
    "Read this text and answer the question.\n\n{text}\n\nQuestion: What does the text say about {word}?",
    "Use the passage to answer. Passage: {text}\n\nQuestion: Why does {word} matter here? Answer:",
    "Rewrite the text in simpler words.\n\n{text}",
    "Correct the grammar of this text and return it otherwise unchanged:\n\n{text}",
    "Translate the following sentence to {language}: {sentence}",
    "Translate to {language}:\n{sentence}",
    "Write a short blog post about this: {sentence}",
    "What does '{word}' mean in this sentence? {sentence}",
    "Turn this text into a list with bullet points:\n\n{text}",
)
CODE = (
    "Write a Python function `{name}`. {first}",
    "Complete the following Python function.\n\n{begun}",
    "{begun}\n",
    "Explain what this code does.\n\n{code}",
    "Rename the function {name} to {name}_new and return the whole code.\n\n{code}",
    "Add type hints to this function.\n\n{code}",
    "Add a comment to every line of this function.\n\n{code}",
    "Find possible bugs in this function and fix them:\n\n{code}",
    "Write unit tests for this function.\n\n{code}",
)


@dataclass(frozen=True)
class Function:
    source: str
    name: str
    doc: str


def functions(text: str) -> Iterator[Function]:
    """Functions of a Python file with a docstring that are short enough to ask about."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            source = inspect.cleandoc(ast.get_source_segment(text, node, padded=True) or "")
            if 120 < len(source) < 1200 and 30 < len(doc) < 600:
                yield Function(source, node.name, doc)


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of plain prose."""
    for part in re.split(r"\n\s*\n", text):
        plain = " ".join(part.split())
        letters = sum(each.isalpha() or each in " ,.'" for each in plain)
        if 150 < len(plain) < 1500 and letters > 0.93 * len(plain) and plain[0].isupper() and plain[-1] == ".":
            yield plain


def prose() -> list[str]:
    """Paragraphs of the descriptions of permissively licensed packages."""
    texts = dict[str, None]()
    for dist in metadata.distributions():
        if licence_of(dist):
            message: Any = dist.metadata  # an email.message.Message, whose protocol lacks get_payload()
            texts.update(dict.fromkeys(paragraphs(str(message.get_payload()))))
    return list(texts)


def sums(rng: random.Random) -> str:
    """A sum in words."""
    name, other = rng.sample(NAMES, 2)
    a, b, c = rng.randint(2, 60), rng.randint(2, 30), rng.randint(2, 9)
    return rng.choice(SUMS).format(
        name=name,
        other=other,
        thing=rng.choice(THINGS),
        a=a,
        b=b,
        c=c,
        less=min(a, b, c),
        dozens=12 * b,
        right=c * a + b,
    )


def about_text(text: str, rng: random.Random) -> str:
    """A request about a paragraph."""
    sentences = re.split(r"(?<=[.!?]) ", text)
    sentence = max(rng.sample(sentences, min(2, len(sentences))), key=len)
    word = rng.choice(re.findall(r"[A-Za-z]{6,}", text) or ["this"])
    return rng.choice(TEXTS).format(text=text, sentence=sentence, word=word, language=rng.choice(LANGUAGES))


def about_code(each: Function, rng: random.Random) -> str:
    """A request about a function."""
    first = each.doc.split("\n\n", 1)[0].replace("\n", " ")
    signature = each.source.split('"""', 1)[0].rstrip()
    return rng.choice(CODE).format(
        name=each.name,
        first=first,
        code=f"```python\n{each.source}\n```",
        begun=f'{signature}\n    """{each.doc}\n    """',
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--count", type=int, default=24000)
    given = parser.parse_args()
    rng = random.Random(0)
    code, texts = dict[str, Function](), prose()
    for file in build_corpus():
        for each in functions(file.text):
            code[each.source] = each
            texts.extend(paragraphs(each.doc))
    texts, sources = list(dict.fromkeys(texts)), list(code.values())
    print(f"{len(texts)} paragraphs, {len(sources)} functions", file=sys.stderr)
    tokenizer: Any = tokenizer_of("smollm2")
    before, after = split_template(tokenizer)

    rows, asked = list[list[int]](), set[str]()
    while len(rows) < given.count:
        kind = rng.random()
        request = (
            about_text(rng.choice(texts), rng)
            if kind < 0.45
            else about_code(rng.choice(sources), rng)
            if kind < 0.88
            else sums(rng)
        )
        row = [*before, *tokenizer(request, add_special_tokens=False)["input_ids"], *after]
        if request not in asked and len(row) <= LONGEST:
            asked.add(request)
            rows.append(row)
    starts = np.cumsum([0, *map(len, rows)])
    flat = np.concatenate(rows).astype(np.uint16)
    np.savez_compressed(given.out, ids=flat, starts=starts, before=before, after=after)


if __name__ == "__main__":
    main()
